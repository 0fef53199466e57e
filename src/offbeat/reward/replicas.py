"""Replicas of one reward model: the least busy one is asked, one that died is started again.

Invariant: when a call has failed, its replica was asked for its health, and is either well (then
it is avoided for a while that grows with its failures on end) or out of routing, before the caller
hears of it. So whoever asks again meets no dead replica. A replica that is out is replaced on its
own devices and joins again; calls that ran on it end at once as `replica_lost`, and calls wait for
one that is on its way. What a replica does after it was taken out is ignored.

Limits: `max_restarts` starts on end, failed ones included, until it has served for
`FORGIVEN_SECONDS`; then it is given up. Without any replica calls wait `start_deadline_seconds`
from the moment the last one was lost. After that, and at once when all are given up, calls fail
as `unavailable`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from offbeat.errors import RequestRefused
from offbeat.reward.pool import CallFailed
from offbeat.reward.template import TemplateFailed

LOST = "replica_lost"
"""The cause of a call whose replica died or hung: the replica's fault, not the sample's."""
SUSPECT_SECONDS = 0.5
SUSPECT_LIMIT_SECONDS = 30.0
HEALTH_SECONDS = 15.0
RESTARTS = 3
RESTART_PAUSE_SECONDS = 0.5  # before the second try; it doubles
FORGIVEN_SECONDS = 600.0
NOT_THE_REPLICAS = (RequestRefused, TemplateFailed)
"""What is wrong with one text: the replica is well, and no other would take it."""

log = logging.getLogger(__name__)


class Mortal(Protocol):
    """What is needed of a replica, engine or scorer, to start it again when it dies."""

    async def health(self) -> Any:
        """Raises what ended the replica."""
        ...

    async def stop(self) -> None:
        """Ends the replica."""
        ...


M = TypeVar("M", bound=Mortal)
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Life(Generic[M]):
    """One life of a replica: calls outstanding, failures on end, avoided until, since when."""

    index: int
    engine: M
    since: float
    outstanding: int = 0
    failures: int = 0
    avoided_until: float = 0.0
    limits: set[asyncio.Timeout] = field(default_factory=set)
    checking: asyncio.Task[None] | None = None
    died_of: str = ""

    def failed(self, now: float) -> None:
        pause = min(SUSPECT_LIMIT_SECONDS, SUSPECT_SECONDS * 2.0 ** min(self.failures, 20))
        self.failures += 1
        self.avoided_until = now + pause


class Replicas(Generic[M]):
    """Routes calls to started replicas, `at_once` to each at most (None: as many as come).

    `replace(index)` ends replica `index` for good and returns a started one on the same devices;
    when it fails or is cancelled it leaves nothing running there. Without it failing replicas are
    only avoided. Whoever placed the replicas stops them; `stop` ends what is on its way.
    """

    def __init__(
        self,
        name: str,
        engines: Sequence[M],
        *,
        deadline_seconds: float,
        start_deadline_seconds: float,
        replace: Callable[[int], Awaitable[M]] | None = None,
        at_once: int | None = None,
        max_restarts: int = RESTARTS,
    ) -> None:
        self._name = name
        self._max_restarts = max_restarts
        self._deadline, self._start_deadline = deadline_seconds, start_deadline_seconds
        self._replace, self._at_once = replace, at_once
        self._serving = {i: Life(i, engine, 0.0) for i, engine in enumerate(engines)}
        self._starts = [0] * len(engines)  # on end, by replica
        self._reviving: dict[int, asyncio.Task[None]] = {}
        self._checks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._empty_since = 0.0
        self._last_cause = ""
        self._stopped = False

    @property
    def serving(self) -> dict[int, M]:
        """The replicas in routing, by index."""
        return {index: life.engine for index, life in sorted(self._serving.items())}

    @property
    def down_since(self) -> float | None:
        """Since when (the event loop's time) no replica has been in routing; None while one is."""
        return None if self._serving else self._empty_since

    async def call(self, ask: Callable[[M], Awaitable[T]]) -> T:
        """The answer of the least busy replica, within the deadline of one call.

        Raises `CallFailed` with the cause `timeout` or `unavailable`, or `replica_lost` if the
        replica left routing; `RequestRefused` and `TemplateFailed` of the call as they are.
        """
        life = await self._pick()
        try:
            async with asyncio.timeout(self._deadline) as limit:
                life.limits.add(limit)
                try:
                    answer = await ask(life.engine)
                finally:
                    life.limits.discard(limit)
        except NOT_THE_REPLICAS:
            raise
        except Exception as error:  # boundary: whatever ends a call may have ended its replica
            late = isinstance(error, TimeoutError) and limit.expired()
            reason = self._words(error, f"no answer within {self._deadline:g} s", late=late)
            life.failed(_now())
            await self._check(life, reason)
            if self._lost(life):
                raise CallFailed(LOST, life.died_of) from error
            raise CallFailed("timeout" if late else "unavailable", reason) from error
        finally:
            life.outstanding -= 1
            self._change()
        life.failures, life.avoided_until = 0, 0.0
        return answer

    async def stop(self) -> None:
        """Ends the checks and the restarts that are under way."""
        self._stopped = True
        tasks = [*self._checks, *self._reviving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._change()

    # -- routing ---------------------------------------------------------------------------------

    async def _pick(self) -> Life[M]:
        """The one to ask, counted as busy; waits for one that is free or on its way."""
        while True:
            life, until = self._best()
            if life is not None:
                life.outstanding += 1
                return life
            if not self._serving:
                until = self._returns_by()
            changed = self._changed
            try:
                async with asyncio.timeout_at(until):
                    await changed.wait()
            except TimeoutError:
                continue  # one is avoided no longer, or none came back

    def _best(self) -> tuple[Life[M] | None, float | None]:
        """The best replica if it may be asked now; if not, when another may be."""
        now = _now()
        asked = [life for life in self._serving.values() if life.checking is None]
        if not asked:
            return None, None
        best = min(asked, key=lambda life: (max(0.0, life.avoided_until - now), life.outstanding))
        if self._free(best):
            return best, None
        free = [life.avoided_until for life in asked if self._free(life)]
        return None, min(free, default=None)

    def _free(self, life: Life[M]) -> bool:
        return self._at_once is None or life.outstanding < self._at_once

    def _returns_by(self) -> float:
        """Until when calls wait for a replica; raises `CallFailed` if for none or no longer."""
        if self._stopped:
            raise CallFailed("unavailable", "the source was stopped")
        if not self._reviving:
            raise CallFailed("unavailable", f"all replicas are given up: {self._last_cause}")
        until = self._empty_since + self._start_deadline
        if _now() >= until:
            raise CallFailed(
                "unavailable",
                f"no replica came back within cluster.start_deadline_seconds = "
                f"{self._start_deadline:g}: {self._last_cause}",
            )
        return until

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # -- death -----------------------------------------------------------------------------------

    def _lost(self, life: Life[M]) -> bool:
        return self._serving.get(life.index) is not life

    async def _check(self, life: Life[M], cause: str) -> None:
        """After a failed call: asks for health, once for all calls that fail together."""
        if self._replace is None or self._stopped or self._lost(life):
            return
        if life.checking is None:
            life.checking = asyncio.create_task(
                self._ask_health(life, cause), name=f"reward/{self._name}/{life.index}/health"
            )
            self._checks.add(life.checking)
            life.checking.add_done_callback(self._checks.discard)
        await asyncio.wait([life.checking])

    async def _ask_health(self, life: Life[M], cause: str) -> None:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await life.engine.health()
        except Exception as error:  # boundary: whatever health raises, the replica is not well
            silent = f"health gave no answer within {HEALTH_SECONDS:g} s"
            told = self._words(error, silent, late=isinstance(error, TimeoutError))
            self._take_out(life, cause if told == cause else f"{cause}; then {told}")
        finally:
            life.checking = None
            self._change()

    def _take_out(self, life: Life[M], cause: str) -> None:
        """Leaves routing now, ends the calls that run on it, and starts the replacement."""
        del self._serving[life.index]
        life.died_of = self._last_cause = cause
        now = _now()
        if not self._serving:
            self._empty_since = now
        if now - life.since >= FORGIVEN_SECONDS:
            self._starts[life.index] = 0
        for limit in life.limits:
            if not limit.expired():
                limit.reschedule(now)
        log.warning("%s died (%s); it is started again", self._who(life.index), cause)
        self._reviving[life.index] = asyncio.create_task(
            self._revive(life.index, cause), name=f"reward/{self._name}/{life.index}/revive"
        )

    async def _revive(self, index: int, died_of: str) -> None:
        """Starts replica `index` until it serves, or gives it up."""
        died, cause, pause = _now(), died_of, RESTART_PAUSE_SECONDS
        try:
            while self._starts[index] < self._max_restarts:
                self._starts[index] += 1
                try:
                    await self._restart(index)
                except Exception as error:  # boundary: a start that fails is tried again
                    late = f"its replacement did not start within {self._start_deadline:g} s"
                    cause = self._words(error, late, late=isinstance(error, TimeoutError))
                    self._last_cause = cause
                    log.warning("%s: replacement: %s", self._who(index), cause)
                    await asyncio.sleep(pause)
                    pause *= 2
                    continue
                if self._stopped:
                    return
                took = _now() - died
                log.warning("%s died (%s); restarted in %.0f s", self._who(index), died_of, took)
                return
            log.error(
                "%s is given up after %d restarts; the last: %s",
                self._who(index), self._starts[index], cause,
            )  # fmt: skip
        finally:
            del self._reviving[index]
            self._change()

    async def _restart(self, index: int) -> None:
        if self._replace is None:
            raise RuntimeError("a replica that cannot be replaced is never taken out")
        async with asyncio.timeout(self._start_deadline):
            engine = await self._replace(index)
        if self._stopped:
            await engine.stop()  # it came up too late
            return
        self._serving[index] = Life(index, engine, _now())

    def _who(self, index: int) -> str:
        return f"reward/{self._name} replica {index}"

    @staticmethod
    def _words(error: Exception, late_words: str, *, late: bool) -> str:
        if late:
            return late_words
        first, *_ = str(error).splitlines() or [""]  # Ray says more, in paragraphs
        return f"{type(error).__name__}: {first}"


def _now() -> float:
    return asyncio.get_running_loop().time()
