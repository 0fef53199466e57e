"""Verdicts that were paid for once: a file of them, keyed by all that they follow from.

One SQLite file, which several processes may share (WAL); one thread of its own reads and writes it,
commits are batched, and a layer in memory holds what was asked for last. The cache is a help and
never a condition: whatever goes wrong with the disk turns it off with one warning, a file that is
damaged is set aside, and who asks waits `PATIENCE_SECONDS` at most for an answer of the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import queue
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.reward.judge import Verdict, Weighed

MOST_ROWS = 2_000_000
MOST_IN_MEMORY = 16_000_000
"""Characters of keys and verdicts."""
LONGEST = 100_000
"""A verdict of more characters is not kept."""
PATIENCE_SECONDS = 2.0
MOST_LATE = 8  # answers on end that came too late, before the cache is turned off
COMMIT_SECONDS = 0.2
COMMIT_ROWS = 256
CLOSING_SECONDS = 1.5  # that a close waits for other processes that write
MOST_WAITING = 20_000  # rows that wait for a commit while other processes write
IDLE_SECONDS = 5.0  # then the thread ends and the file is closed, until it is needed again
_SCHEMA = 1
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TABLE = """
CREATE TABLE IF NOT EXISTS verdicts (
  id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, verdict TEXT NOT NULL);
"""

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


@dataclass(slots=True)
class _Get:
    key: str
    found: Future[str | None] = field(default_factory=Future)


@dataclass(slots=True)
class _Put:
    key: str
    verdict: str


@dataclass(slots=True)
class _Close:
    done: Future[None] = field(default_factory=Future)


class VerdictCache:
    """The verdicts in one file, `most` at most: the oldest go."""

    def __init__(self, path: Path, *, most: int = MOST_ROWS) -> None:
        """Opens nothing: the file is opened, or made, when it is needed."""
        self._path = path
        self._most = most
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, str] = OrderedDict()
        self._size = 0
        self._jobs: queue.SimpleQueue[_Get | _Put | _Close] = queue.SimpleQueue()
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
            self._ask(_Put(key, text))

    async def close(self) -> None:
        """Commits what waits and closes the file; it is opened again when it is needed."""
        closing = _Close()
        with self._lock:
            if self._thread is None:
                return
            self._jobs.put(closing)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.wrap_future(closing.done)

    async def _look_up(self, key: str) -> str | None:
        job = _Get(key)
        if not self._ask(job):
            return None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):  # wait_for may swallow a cancellation
                text = await asyncio.wrap_future(job.found)
        except TimeoutError:
            self._late += 1
            if self._late >= MOST_LATE:
                self._turn_off(f"{self._late} answers took more than {PATIENCE_SECONDS:g} s each")
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

    def _ask(self, job: _Get | _Put) -> bool:
        """Hands a job to the thread, which is started where there is none; False: it is off."""
        with self._lock:
            if self._off:
                return False
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_Keeper(self._path, self._most, self).run,
                    name="offbeat-verdicts",
                    daemon=True,
                )
                self._thread.start()
            return True

    # ---- called by the thread ----

    def _next(self, seconds: float) -> _Get | _Put | _Close | None:
        """The next job; None after so long without one."""
        try:
            return self._jobs.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None

    def _leave(self) -> bool:
        """Whether the thread may end: nothing came meanwhile."""
        with self._lock:
            if self._jobs.empty():
                self._thread = None
                return True
            return False

    def _turn_off(self, why: str) -> None:
        with self._lock:
            if self._off:
                return
            self._off = True
        log.warning(
            "the verdict cache %s is off: %s; verdicts are asked for anew from here on",
            self._path, why,
        )  # fmt: skip


class _Keeper:
    """One life of the cache's thread: reads, and writes in batches."""

    def __init__(self, path: Path, most: int, owner: VerdictCache) -> None:
        self._path, self._most, self._owner = path, most, owner
        self._db: sqlite3.Connection | None = None
        self._waiting: dict[str, str] = {}
        self._commit_at = 0.0
        self._untrimmed = 0
        self._set_aside = False

    def run(self) -> None:
        """Until nothing has come for a while, or the cache is turned off."""
        job: _Get | _Put | _Close | None = None
        try:
            while True:
                pause = self._commit_at - time.monotonic() if self._waiting else IDLE_SECONDS
                job = self._owner._next(pause)
                self._guard(job)
                if job is None and not self._waiting and self._owner._leave():
                    break
                if isinstance(job, _Close):
                    self._close()
                    _answer(job.done, None)
        except (sqlite3.Error, OSError) as error:
            self._owner._turn_off(str(error) or type(error).__name__)
            _dismiss(job)
            while (job := self._owner._next(0.0)) is not None or not self._owner._leave():
                _dismiss(job)
        self._close()

    def _guard(self, job: _Get | _Put | _Close | None) -> None:
        """Does the job; a damaged file is set aside, once, and the job done with a new one."""
        try:
            self._do(job)
        except sqlite3.DatabaseError as error:
            if _code(error) not in _DAMAGED:
                raise
            self._close()
            self._replace_file(str(error))
            self._do(job)

    def _do(self, job: _Get | _Put | _Close | None) -> None:
        if isinstance(job, _Get):
            text = self._waiting.get(job.key) or self._find(job.key)
            _answer(job.found, text)
        elif isinstance(job, _Put):
            if not self._waiting:
                self._commit_at = time.monotonic() + COMMIT_SECONDS
            self._waiting[job.key] = job.verdict
        due = time.monotonic() >= self._commit_at or len(self._waiting) >= COMMIT_ROWS
        if self._waiting and due and not isinstance(job, _Close):
            self._commit()
        until = time.monotonic() + CLOSING_SECONDS
        while self._waiting and isinstance(job, _Close) and time.monotonic() < until:
            self._commit()

    def _find(self, key: str) -> str | None:
        query = "SELECT verdict FROM verdicts WHERE key = ?"
        try:
            row = self._open().execute(query, (_blob(key),)).fetchone()
        except sqlite3.OperationalError as error:
            if _code(error) not in _BUSY:
                raise
            return None  # another process makes or mends the file
        return None if row is None else str(row[0])

    def _commit(self) -> None:
        rows = [(_blob(key), text) for key, text in self._waiting.items()]
        try:
            db = self._open()
            with db:
                db.execute("BEGIN IMMEDIATE")
                db.executemany("INSERT OR REPLACE INTO verdicts (key, verdict) VALUES (?, ?)", rows)
                self._untrimmed += len(rows)
                if self._untrimmed > min(10_000, self._most // 10):
                    self._trim(db)
        except sqlite3.OperationalError as error:
            if _code(error) not in _BUSY:
                raise
            self._commit_at = time.monotonic() + COMMIT_SECONDS  # another process writes
            for key in list(self._waiting)[: max(0, len(self._waiting) - MOST_WAITING)]:
                del self._waiting[key]
            return
        self._waiting.clear()

    def _trim(self, db: sqlite3.Connection) -> None:
        """A row that is written anew is the newest, so there are never more rows than ids."""
        oldest = "SELECT max(id) - ? FROM verdicts"
        db.execute(f"DELETE FROM verdicts WHERE id <= ({oldest})", (self._most,))
        self._untrimmed = 0

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self._path, timeout=COMMIT_SECONDS, isolation_level=None)
            try:
                _prepare(db)
            except BaseException:
                db.close()
                raise
            self._db = db
            self._untrimmed = self._most  # what another start left is trimmed by the first commit
        return self._db

    def _replace_file(self, why: str) -> None:
        """Sets the file aside, unless another process has done that already."""
        if self._set_aside:
            raise OSError(why)
        self._set_aside = True
        if _sound(self._path):
            return
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.time():.0f}")
        log.warning("the verdict cache %s is set aside as %s: %s", self._path, aside.name, why)
        self._path.replace(aside)
        for end in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                self._path.with_name(self._path.name + end).unlink()

    def _close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()


_SHARED: dict[Path, VerdictCache] = {}
_SHARING = threading.Lock()


def shared_cache(path: Path) -> VerdictCache:
    """This process's cache over the file `path`."""
    path = path.resolve()
    with _SHARING:
        return _SHARED.setdefault(path, VerdictCache(path))


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    (schema,) = db.execute("PRAGMA user_version").fetchone()
    if schema == 0:
        with db:
            db.execute("BEGIN IMMEDIATE")
            db.execute(_TABLE)
            db.execute(f"PRAGMA user_version={_SCHEMA}")
    elif schema != _SCHEMA:
        raise OSError(f"it is of version {schema}, and this Offbeat writes {_SCHEMA}")


def _sound(path: Path) -> bool:
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=COMMIT_SECONDS)) as db:
            (said,) = db.execute("PRAGMA quick_check(1)").fetchone()
            return bool(said == "ok")
    except sqlite3.Error:
        return False


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary code; 0 where Python's module raised by itself."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _blob(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _answer(future: Future[str | None] | Future[None], value: str | None) -> None:
    """Unless who waited has gone."""
    if future.set_running_or_notify_cancel():
        future.set_result(value)  # type: ignore[arg-type]


def _dismiss(job: _Get | _Put | _Close | None) -> None:
    """Nobody waits for a cache that is off."""
    waiting = job.found if isinstance(job, _Get) else job.done if isinstance(job, _Close) else None
    if waiting is not None and not waiting.done():
        _answer(waiting, None)


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
