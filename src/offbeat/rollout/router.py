"""Which engine gets a group: the one that it had, else the one with the fewest unfinished samples.

A group goes as one request to one replica, which computes its prompt once. A group that comes
again goes to the same replica, where its prompt's keys and values may still lie.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from offbeat.errors import DeadlinePassed
from offbeat.rollout.engine import Engine
from offbeat.weights.sync import Replica

T = TypeVar("T")


@dataclass(slots=True)
class Place:
    """Where a group was generated last: the replica, and the engine that was in it then."""

    replica: Replica[Engine] | None = None
    engine: Engine | None = None

    def take(self, replica: Replica[Engine]) -> Engine:
        """The group is on `replica` now; returns its engine."""
        self.replica, self.engine = replica, replica.engine
        return replica.engine


class Router:
    """Picks engines and keeps count of their unfinished samples.

    `seats` is how many samples one engine decodes at once.
    """

    def __init__(
        self, replicas: Sequence[Replica[Engine]], changed: asyncio.Condition, seats: int
    ) -> None:
        self._replicas = replicas
        self._changed = changed
        self._seats = seats

    async def pick(
        self, deadline_seconds: float, samples: int = 1, place: Place | None = None
    ) -> Replica[Engine]:
        """The replica for `samples` of a group that was at `place`; waits for one if none is in.

        The one that it had, unless that is out, replaced (what it kept is gone) or has not that
        many seats free; else the least loaded one.

        Raises `DeadlinePassed`, naming the engines that are out, when none joins in time.
        """

        def best() -> Replica[Engine] | None:
            had = None if place is None else place.replica
            if had is not None and place is not None and place.engine is not None:
                full = had.outstanding + samples > self._seats
                if not had.has_left(place.engine) and not full:
                    return had
            routable = [replica for replica in self._replicas if replica.routable]
            return min(routable, key=lambda replica: replica.outstanding, default=None)

        return await wait_for(
            self._changed, best, deadline_seconds, lambda: "no engine is routable: all have failed"
        )

    @contextmanager
    def load(self, replica: Replica[Engine], samples: int) -> Iterator[Callable[[], None]]:
        """Counts `samples` as unfinished on `replica` while the block runs; it calls what it is
        given whenever one of them has ended."""
        engine = replica.engine
        left = samples
        replica.outstanding += samples

        def leave(count: int) -> None:
            nonlocal left
            left -= count
            if replica.engine is engine:  # a restarted engine began again at zero
                replica.outstanding -= count

        try:
            yield lambda: leave(1)
        finally:
            leave(left)


async def wait_for(
    changed: asyncio.Condition,
    probe: Callable[[], T | None],
    deadline_seconds: float,
    whom: Callable[[], str],
) -> T:
    """Waits until `probe` gives something; `DeadlinePassed` says whom it waited for."""
    if (found := probe()) is not None:
        return found
    try:
        async with asyncio.timeout(deadline_seconds), changed:
            while (found := probe()) is None:
                await changed.wait()
            return found
    except TimeoutError:
        raise DeadlinePassed(f"{whom()} (waited {deadline_seconds:.0f} s)") from None
