"""Engines of their own for validation: they load a version when they are asked, and answer.

```
 newest manifest ──(weight sync's lock: nothing newer is published)──► every engine has loaded it
                                                                          │ publications go on
 held-out requests ──► the least loaded of them ──► answers of one version ◄┘
```

They never get rollout's requests, and rollout never waits for them beyond their load. One that dies
is replaced and loads the newest version then; if that is another one, whatever was answered so far
is dropped and all of it begins anew, so that a validation never mixes versions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from offbeat.config import Config
from offbeat.errors import first_of
from offbeat.records import PolicyVersion, Span
from offbeat.rollout.engine import Engine
from offbeat.rollout.generation import Generation
from offbeat.rollout.parts import spans_of
from offbeat.rollout.router import Router
from offbeat.weights.sync import Replica, WeightSync

log = logging.getLogger(__name__)
T = TypeVar("T")
Ask = Callable[[Generation, PolicyVersion], Awaitable[T]]


class DedicatedEngines:
    """The replicas of pool `validate`; `replace(index)` ends one and returns a started one."""

    def __init__(
        self,
        config: Config,
        engines: Sequence[Engine],
        version: PolicyVersion,
        replace: Callable[[int], Awaitable[Engine]],
    ) -> None:
        self.replicas = [Replica(i, engine, version) for i, engine in enumerate(engines)]
        self._first = version
        self._config = config
        self._replace = replace
        self._changed = asyncio.Condition()

    async def pinned(self, published: WeightSync[Engine], ask: Ask[T]) -> T:
        """What `ask` makes of the engines when all of them hold the newest published version.

        `ask` is cancelled and called again, with a newer version, when an engine had to be replaced
        by one of that. Raises `RunFailed` when an engine cannot be replaced.
        """
        while True:
            found: list[T] = []
            try:
                async with asyncio.TaskGroup() as tasks:
                    found.append(await self._once(published, ask, tasks))
                    raise _Done  # an engine that is still being replaced is when it is next needed
            except ExceptionGroup as group:
                if found:
                    self._forgive()
                    return found[0]
                _, failure = group.split(_Moved)
                if failure is not None:
                    raise first_of(failure) from failure
                log.warning("an engine was replaced by one of a newer version: all begins anew")

    def _forgive(self) -> None:
        """Who has served is counted from the beginning if it fails again."""
        for replica in self.replicas:
            if replica.routable:
                replica.restarts = 0

    async def drain_spans(self) -> list[Span]:
        """Compute spans since the last call."""
        return await spans_of([r.engine.drain_spans for r in self.replicas if r.routable])

    async def _once(
        self, published: WeightSync[Engine], ask: Ask[T], tasks: asyncio.TaskGroup
    ) -> T:
        pinned: list[PolicyVersion] = []

        async def replace(index: int) -> Engine:
            engine = await self._replace(index)
            sync.current = published.current  # what is pinned may not be readable any more
            return engine

        async def changed() -> None:
            if pinned and any(r.routable and r.version != pinned[0] for r in self.replicas):
                raise _Moved  # before anyone is routed to it
            async with self._changed:
                self._changed.notify_all()

        sync = WeightSync(
            self.replicas,
            deadline_seconds=self._config.weights.deadline_seconds,
            start_deadline_seconds=self._config.cluster.start_deadline_seconds,
            replace=replace,
            on_change=changed,
            tasks=tasks,
            loads_at_once=len(self.replicas),
            whom="validation engine",
        )
        async with published.lock:
            for replica in self.replicas:  # one that died at last is found out when it loads
                replica.routable, replica.outstanding = True, 0
            if published.current is not None:
                await sync.publish(published.current)
                pinned.append(published.current.version)
            else:
                pinned.append(self._first)
        router = Router(self.replicas, self._changed, self._config.rollout.seats)
        return await ask(Generation(router, lambda: sync, self._config.rollout), pinned[0])


class _Done(Exception):
    """Ends the task group from inside."""


class _Moved(Exception):
    """An engine came back with another version."""
