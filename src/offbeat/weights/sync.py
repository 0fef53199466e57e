"""Weight sync: a published version goes to every engine; then the floor rises.

Invariants: at most one publication is in flight; the floor is the lowest version that every
routable engine has acknowledged; an engine that misses its deadline leaves routing *before* its
acknowledgement is waived, and joins again in the same moment as it acknowledges the current one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from offbeat.errors import RunFailed
from offbeat.records import Manifest, PolicyVersion

log = logging.getLogger(__name__)


class Loader(Protocol):
    """What weight sync needs of an engine."""

    async def load(self, manifest: Manifest) -> PolicyVersion:
        """Swaps weights; returning is the acknowledgement."""
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


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One replica's part of one publication; times in seconds of `time.time()`."""

    version: int
    replica: int
    start: float
    end: float
    acknowledged: bool


class WeightSync(Generic[E]):
    """Publishes versions to replicas and restarts those that do not follow.

    `replace(index)` ends a replica's process and returns a started one with the first weights.
    """

    def __init__(
        self,
        replicas: Sequence[Replica[E]],
        *,
        deadline_seconds: float,
        replace: Callable[[int], Awaitable[E]],
        on_change: Callable[[], None],
        tasks: asyncio.TaskGroup,
        max_restarts: int = 3,
    ) -> None:
        self.replicas = replicas
        self.lock = asyncio.Lock()
        self.current: Manifest | None = None
        self.reports: list[SyncReport] = []
        self._deadline = deadline_seconds
        self._replace = replace
        self._on_change = on_change
        self._tasks = tasks
        self._max_restarts = max_restarts
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
            routable = [replica for replica in self.replicas if replica.routable]
            await asyncio.gather(*(self._load(replica, manifest) for replica in routable))
            self._on_change()
            return self.floor

    async def _load(self, replica: Replica[E], manifest: Manifest) -> None:
        start = time.time()
        try:
            async with asyncio.timeout(self._deadline):
                replica.version = await replica.engine.load(manifest)
        except Exception as error:  # boundary: whatever ends an engine's load takes it out
            cause = "missed its deadline" if isinstance(error, TimeoutError) else repr(error)
            log.warning("engine %d: load of version %s: %s", replica.index, manifest.version, cause)
            self.take_out(replica, cause)
        acknowledged = replica.routable
        self.reports.append(
            SyncReport(manifest.version.step, replica.index, start, time.time(), acknowledged)
        )

    def take_out(self, replica: Replica[E], cause: str) -> None:
        """Leaves routing now and starts the replacement, once."""
        if not replica.routable:
            return
        replica.routable = False
        self._tasks.create_task(self._revive(replica, cause))

    async def _revive(self, replica: Replica[E], cause: str) -> None:
        replica.restarts += 1
        if replica.restarts > self._max_restarts:
            raise RunFailed(
                f"engine {replica.index} failed {replica.restarts} times; the last time: {cause}"
            )
        replica.engine = await self._replace(replica.index)
        loaded: Manifest | None = None
        while loaded is not self.current:  # a newer version may be published meanwhile
            target = self.current
            if target is not None:
                async with asyncio.timeout(self._deadline):
                    replica.version = await replica.engine.load(target)
            loaded = target
        replica.outstanding = 0
        replica.routable = True  # no await since the check above: it joins at the current version
        log.info("engine %d joined again at version %s", replica.index, replica.version)
        self._on_change()

    def drain_reports(self) -> list[SyncReport]:
        """Reports since the last call."""
        reports, self.reports = self.reports, []
        return reports
