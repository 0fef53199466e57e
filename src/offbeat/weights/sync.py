"""Weight sync: a published version goes to every engine, some at a time; then the floor rises.

Invariants: at most one publication is in flight; the floor is the lowest version that every
routable engine has acknowledged; an engine that misses its deadline, or fails a request and is not
well after it, leaves routing *before* its acknowledgement is waived, and joins again in the same
moment as it acknowledges the current one. What an engine does after its replacement is ignored.

A publication rolls: at most `loads_at_once` of the engines load at the same time, the others
generate meanwhile. A load's deadline counts from that load's start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from offbeat.errors import RunFailed
from offbeat.faults import apoint
from offbeat.records import EngineHealth, Manifest, PolicyVersion

log = logging.getLogger(__name__)
HEALTH_SECONDS = 15.0
RESTART_PAUSE_SECONDS = 0.5  # before the second try; it doubles


class Loader(Protocol):
    """What weight sync needs of an engine."""

    async def load(self, manifest: Manifest) -> PolicyVersion:
        """Swaps weights; returning is the acknowledgement."""
        ...

    async def health(self) -> EngineHealth:
        """Raises what ended the engine."""
        ...


E = TypeVar("E", bound=Loader)


@dataclass(slots=True)
class Replica(Generic[E]):
    """An engine as the rollouter sees it. `outstanding` counts its unfinished samples."""

    index: int
    engine: E
    version: PolicyVersion
    routable: bool = True
    outstanding: int = 0
    restarts: int = 0
    _watchers: dict[Callable[[], None], None] = field(default_factory=dict)

    def has_left(self, engine: E) -> bool:
        """Whether `engine`, which was this replica's, is out of routing or replaced."""
        return not self.routable or self.engine is not engine

    @contextmanager
    def watched(self, wake: Callable[[], None]) -> Iterator[None]:
        """While the block runs, `wake` is called in the moment the engine is taken out."""
        self._watchers[wake] = None
        try:
            yield
        finally:
            self._watchers.pop(wake, None)

    def leave(self) -> None:
        """Out of routing: whoever waits for the engine is woken, to go on elsewhere."""
        self.routable = False
        for wake in tuple(self._watchers):
            wake()


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One replica's part of one publication; times in seconds of `time.time()`."""

    version: int
    replica: int
    start: float
    end: float
    acknowledged: bool
    lineage: int


def at_once(replicas: int, loads_at_once: int | None) -> int:
    """How many of `replicas` engines may load at the same time; by default half of them."""
    return min(loads_at_once or max(1, replicas // 2), replicas)


def waves(replicas: int, loads_at_once: int | None) -> int:
    """Load deadlines that a publication lasts at most, as each load starts when one has ended."""
    return -(-replicas // at_once(replicas, loads_at_once))


class WeightSync(Generic[E]):
    """Publishes versions to replicas and restarts those that do not follow.

    `replace(index)` ends a replica's process and returns a started one with the first weights.
    `loads_at_once` None: half of the replicas. `whom` is what a replica is called in messages.
    """

    def __init__(
        self,
        replicas: Sequence[Replica[E]],
        *,
        deadline_seconds: float,
        start_deadline_seconds: float,
        replace: Callable[[int], Awaitable[E]],
        on_change: Callable[[], Awaitable[None]],
        tasks: asyncio.TaskGroup,
        loads_at_once: int | None = None,
        max_restarts: int = 3,
        whom: str = "engine",
    ) -> None:
        self.replicas = replicas
        self.lock = asyncio.Lock()
        self.current: Manifest | None = None
        self.reports: list[SyncReport] = []
        self._deadline = deadline_seconds
        self._start_deadline = start_deadline_seconds
        self._replace = replace
        self._on_change = on_change
        self._tasks = tasks
        self._at_once = at_once(len(replicas), loads_at_once)
        self._max_restarts = max_restarts
        self._whom = whom
        self._floor = min(replica.version for replica in replicas)

    @property
    def floor(self) -> int:
        """The lowest step that every routable engine acknowledged; unchanged while none is."""
        routable = [replica.version for replica in self.replicas if replica.routable]
        if routable:
            self._floor = min(routable)
        return self._floor.step

    async def publish(self, manifest: Manifest) -> int:
        """Loads `manifest` into every routable engine; returns the new floor.

        Holding `lock` elsewhere (a validation pinned to a version) delays it.
        """
        async with self.lock:
            self.current = manifest
            behind = [(replica, replica.engine) for replica in self.replicas if replica.routable]
            lanes = self._at_once
            if lanes < len(self.replicas):  # the others generate: one at least, while some are out
                lanes = min(lanes, max(1, len(behind) - 1))
            await asyncio.gather(*(self._roll(behind, manifest) for _ in range(lanes)))
            await self._on_change()
            return self.floor

    async def _roll(self, behind: list[tuple[Replica[E], E]], manifest: Manifest) -> None:
        """One load after another until none is behind.

        The least loaded goes first: it interrupts the fewest samples, and as the next groups are
        routed to it, they begin with the new weights while the busy engines finish what they have.
        """
        while behind:
            turn = min(behind, key=lambda pair: pair[0].outstanding)
            behind.remove(turn)
            replica, engine = turn
            if not replica.has_left(engine):  # else its replacement joins with this version
                await self._load(replica, manifest)

    async def _load(self, replica: Replica[E], manifest: Manifest) -> None:
        start = time.time()
        engine = replica.engine
        acknowledged = False
        try:
            async with asyncio.timeout(self._deadline):
                version = await engine.load(manifest)
                await apoint("weights.acknowledged")
            if replica.engine is engine:  # else it was replaced meanwhile
                replica.version, acknowledged = version, replica.routable
        except Exception as error:  # boundary: whatever ends an engine's load takes it out
            cause = self._cause(error, f"missed its deadline of {self._deadline:g} s")
            log.warning(
                "%s %d: load of version %s: %s", self._whom, replica.index, manifest.version, cause
            )
            self.take_out(replica, engine, cause)
        self.reports.append(
            SyncReport(
                manifest.version.step,
                replica.index,
                start,
                time.time(),
                acknowledged,
                manifest.version.lineage,
            )
        )

    async def check(self, replica: Replica[E], engine: E, failure: Exception) -> None:
        """After a failed request: an engine that is not well leaves routing before it is asked
        again."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await engine.health()
        except Exception as error:  # boundary: whatever health raises, the engine is not well
            cause = self._cause(error, f"health gave no answer within {HEALTH_SECONDS:g} s")
            self.take_out(replica, engine, f"{self._cause(failure, 'deadline')}; then {cause}")

    def take_out(self, replica: Replica[E], engine: E, cause: str) -> None:
        """Leaves routing now and starts the replacement, once; not if `engine` was replaced."""
        if not replica.routable or replica.engine is not engine:
            return
        replica.leave()
        log.warning("%s %d is taken out: %s", self._whom, replica.index, cause)
        work = self._revive(replica, cause)
        try:
            self._tasks.create_task(work)
        except RuntimeError:  # the tasks are ending, with the run
            work.close()

    async def _revive(self, replica: Replica[E], cause: str) -> None:
        pause = RESTART_PAUSE_SECONDS
        while True:
            replica.restarts += 1
            if replica.restarts > self._max_restarts:
                raise RunFailed(
                    f"{self._whom} {replica.index} failed {replica.restarts} times; "
                    f"the last: {cause}"
                )
            try:
                await self._restart(replica)
                break
            except Exception as error:  # boundary: a start that fails is tried again
                cause = self._cause(error, "its replacement did not start in time")
                log.warning("%s %d: replacement: %s", self._whom, replica.index, cause)
                await asyncio.sleep(pause)
                pause *= 2
        log.info("%s %d joined again at version %s", self._whom, replica.index, replica.version)
        await self._on_change()

    async def _restart(self, replica: Replica[E]) -> None:
        async with asyncio.timeout(self._start_deadline):
            replica.engine = await self._replace(replica.index)
        loaded: Manifest | None = None
        pause, clock = RESTART_PAUSE_SECONDS, asyncio.get_running_loop().time
        give_up = clock() + self._start_deadline
        while loaded is not self.current:  # a newer version may be published meanwhile
            target = self.current
            try:
                if target is not None:
                    async with asyncio.timeout(self._deadline):
                        replica.version = await replica.engine.load(target)
                loaded = target
            except Exception as error:  # boundary: the trainer that published it may have died
                async with asyncio.timeout(HEALTH_SECONDS):
                    await replica.engine.health()
                if clock() >= give_up:
                    raise
                log.warning("%s %d: load: %s", self._whom, replica.index, error or repr(error))
                await asyncio.sleep(pause)  # its successor publishes another
                pause *= 2
        replica.outstanding = 0
        replica.routable = True  # no await since the check above: it joins at the current version

    @staticmethod
    def _cause(error: Exception, late: str) -> str:
        return late if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"

    def drain_reports(self) -> list[SyncReport]:
        """Reports since the last call."""
        reports, self.reports = self.reports, []
        return reports
