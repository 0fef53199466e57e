"""Which engine gets a group: the routable one with the fewest unfinished samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from offbeat.errors import DeadlinePassed
from offbeat.rollout.engine import Engine
from offbeat.weights.sync import Replica

T = TypeVar("T")


class Router:
    """Picks engines by load and keeps count of their unfinished samples."""

    def __init__(self, replicas: Sequence[Replica[Engine]], changed: asyncio.Condition) -> None:
        self._replicas = replicas
        self._changed = changed

    async def pick(self, deadline_seconds: float) -> Replica[Engine]:
        """The least loaded routable engine; waits for one to join if none is.

        Raises `DeadlinePassed`, naming the engines that are out, when none joins in time.
        """

        def best() -> Replica[Engine] | None:
            routable = [replica for replica in self._replicas if replica.routable]
            return min(routable, key=lambda replica: replica.outstanding, default=None)

        return await wait_for(
            self._changed, best, deadline_seconds, lambda: "no engine is routable: all have failed"
        )

    @contextmanager
    def load(self, replica: Replica[Engine], samples: int) -> Iterator[None]:
        """Counts `samples` as unfinished on `replica` while the block runs."""
        engine = replica.engine
        replica.outstanding += samples
        try:
            yield
        finally:
            if replica.engine is engine:  # a restarted engine began again at zero
                replica.outstanding -= samples


async def wait_for(
    changed: asyncio.Condition,
    probe: Callable[[], T | None],
    deadline_seconds: float,
    whom: Callable[[], str],
) -> T:
    """Waits until `probe` gives something; `DeadlinePassed` says whom it waited for."""
    try:
        async with asyncio.timeout(deadline_seconds), changed:
            while (found := probe()) is None:
                await changed.wait()
            return found
    except TimeoutError:
        raise DeadlinePassed(f"{whom()} (waited {deadline_seconds:.0f} s)") from None
