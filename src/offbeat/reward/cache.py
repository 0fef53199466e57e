"""Verdicts that were paid for once: a file of them, keyed by all that they follow from.

One SQLite file, which several processes may share (WAL); one thread of its own reads and writes it,
commits are batched, and a layer in memory holds what was asked for last. What the event loop asks
in one turn goes to the thread together and comes back together, because a thread that wakes for
every call takes the loop's turns. The cache is a help and never a condition: whatever goes wrong
with the disk turns it off with one warning, a file that is damaged is set aside, and who asks waits
`PATIENCE_SECONDS` at most for an answer of the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from offbeat.reward.cache_file import Close, Get, Job, Keeper, Put, dismiss
from offbeat.reward.judge import Verdict, Weighed

MOST_ROWS = 2_000_000
MOST_IN_MEMORY = 16_000_000
"""Characters of keys and verdicts."""
LONGEST = 100_000
"""A verdict of more characters is not kept."""
PATIENCE_SECONDS = 2.0
MOST_LATE = 8  # answers on end that came too late, before the cache is turned off

log = logging.getLogger(__name__)

Kept = Verdict | Weighed


def plain_facts(facts: Mapping[str, object]) -> str:
    """Facts as one text for `verdict_key`, whatever their order: made once for many keys."""
    return json.dumps(dict(facts), sort_keys=True, default=str, ensure_ascii=False)


def verdict_key(identity: str, facts: Mapping[str, object] | str, *texts: str) -> str:
    """The key (sha256, hex) of what the model `identity` says to `texts` under `facts`.

    `facts` are plain values: the settings that a verdict depends on (or `plain_facts` of them).
    """
    known = facts if isinstance(facts, str) else plain_facts(facts)
    words = json.dumps([identity, known, texts], ensure_ascii=False)
    return hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest()


class VerdictCache:
    """The verdicts in one file, `most` at most: the oldest go."""

    def __init__(self, path: Path, *, most: int = MOST_ROWS) -> None:
        """Opens nothing: the file is opened, or made, when it is needed."""
        self._path = path
        self._most = most
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, str] = OrderedDict()
        self._size = 0
        self._asked: list[Job] = []  # in this turn of `_loop`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: queue.SimpleQueue[list[Job]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._late = 0
        self._off = False

    async def get(self, key: str) -> Kept | None:
        """What is kept under `key`, marked as cached and without cost; None if nothing is."""
        with self._lock:
            text = self._recent.get(key)
            if text is not None:
                self._recent.move_to_end(key)
        if text is None:
            text = await self._look_up(key)
        return None if text is None else _read(text)

    async def put(self, key: str, verdict: Kept) -> None:
        """Keeps a verdict; never waits for the disk."""
        text = _write(verdict)
        if len(text) <= LONGEST:
            self._remember(key, text)
            self._ask(Put(key, text))

    async def close(self) -> None:
        """Commits what waits and closes the file; it is opened again when it is needed."""
        closing = Close()
        with self._lock:
            if self._thread is None and not self._asked:
                return
            self._asked.append(closing)
        self._hand_over()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.wrap_future(closing.done)

    async def _look_up(self, key: str) -> str | None:
        job = Get(key)
        if not self._ask(job):
            return None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):  # wait_for may swallow a cancellation
                text = await job.found
        except TimeoutError:
            self._late += 1
            if self._late >= MOST_LATE:
                self.turn_off(f"{self._late} answers took more than {PATIENCE_SECONDS:g} s each")
            return None
        self._late = 0
        if text is not None:
            self._remember(key, text)
        return text

    def _remember(self, key: str, text: str) -> None:
        with self._lock:
            self._size += len(key) + len(text) - self._forget(key)
            self._recent[key] = text
            while self._size > MOST_IN_MEMORY:
                self._size -= self._forget(next(iter(self._recent)))

    def _forget(self, key: str) -> int:
        text = self._recent.pop(key, None)
        return 0 if text is None else len(key) + len(text)

    def _ask(self, job: Get | Put) -> bool:
        """Hands a job to the thread at the end of this turn; False: the cache is off."""
        with self._lock:
            if self._off:
                return False
            self._asked.append(job)
            loop = asyncio.get_running_loop()
            if self._loop is not loop:
                self._loop = loop
                loop.call_soon(self._hand_over)
        return True

    def _hand_over(self) -> None:
        """Gives the thread what was asked; it is started where there is none."""
        with self._lock:
            jobs, self._asked, self._loop = self._asked, [], None
            if self._off:
                dismiss(jobs)
            if self._off or not jobs:
                return
            self._jobs.put(jobs)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=Keeper(self._path, self._most, self).run,
                    name="offbeat-verdicts",
                    daemon=True,
                )
                self._thread.start()

    # ---- called by the thread ----

    def next_jobs(self, seconds: float) -> list[Job]:
        """The next jobs; none after so long without one."""
        try:
            return self._jobs.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return []

    def leave(self) -> bool:
        """Whether the thread may end: nothing came meanwhile."""
        with self._lock:
            if self._jobs.empty():
                self._thread = None
                return True
            return False

    def turn_off(self, why: str) -> None:
        with self._lock:
            if self._off:
                return
            self._off = True
        log.warning(
            "the verdict cache %s is off: %s; verdicts are asked for anew from here on",
            self._path, why,
        )  # fmt: skip


_SHARED: dict[Path, VerdictCache] = {}
_SHARING = threading.Lock()


def shared_cache(path: Path) -> VerdictCache:
    """This process's cache over the file `path`."""
    path = path.resolve()
    with _SHARING:
        return _SHARED.setdefault(path, VerdictCache(path))


def _write(kept: Kept) -> str:
    verdict = kept.verdict if isinstance(kept, Weighed) else kept
    found: dict[str, object] = {"text": verdict.text, "finish_reason": verdict.finish_reason}
    if isinstance(kept, Weighed):
        found["probabilities"] = kept.probabilities
    return json.dumps(found, ensure_ascii=True, separators=(",", ":"))


def _read(text: str) -> Kept | None:
    """None for what cannot be read: it is asked for anew."""
    try:
        found = json.loads(text)
        verdict = Verdict(str(found["text"]), str(found["finish_reason"]), cached=True)
        if "probabilities" not in found:
            return verdict
        return Weighed(tuple(float(each) for each in found["probabilities"]), verdict)
    except (ValueError, KeyError, TypeError):
        return None
