"""Each mutant breaks one rule of the real code, and the simulation must notice. Otherwise it would
prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from offbeat import buffer
from offbeat.buffer import Buffer
from offbeat.records import Batch, Completion, Progress
from offbeat.rollout.books import Books
from offbeat.rollout.generation import _Work
from offbeat.rollout.rollouter import Rollouter
from offbeat.testing.sim_world import Shape
from offbeat.testing.simulation import SimulationFailed, simulate
from offbeat.weights.sync import Replica, WeightSync

SEEDS = 150
GROUPS = 60
TAKE = _Work.take
Patch = pytest.MonkeyPatch


def fencing(patch: Patch) -> None:
    """Answers of an attempt that was given up count for the next one."""

    def take(self: _Work, item: Completion | Progress) -> Completion | None:
        return TAKE(self, replace(item, request_id=self.request.request_id))

    patch.setattr(_Work, "take", take)


def deadlines(patch: Patch) -> None:
    """Whatever there is a slot for is admitted."""
    patch.setattr(Buffer, "_fits", lambda self, *_: self.live() < self.max_live)
    patch.setattr(Buffer, "_check_step", lambda *_: None)


def consumption(patch: Patch) -> None:
    """A batch overtakes stragglers, whoever is late then."""
    patch.setattr(buffer, "feasible", lambda *_: True)


def commit(patch: Patch) -> None:
    """A batch is handed out before it is durable."""

    async def batch(self: Books, step: int, ordinals: Sequence[int]) -> Batch:
        groups = tuple(self._groups.pop(ordinal) for ordinal in ordinals)
        self._batch = Batch(step, groups)
        self.next_step = step + 1
        if ordinals:
            self.ledger.batched(ordinals, step)
            self.store.put(self.ledger.drain())
        return self._batch

    patch.setattr(Books, "batch", batch)


def acknowledgement(patch: Patch) -> None:
    """A replacement joins before it has loaded the current version."""

    async def restart(self: WeightSync[Any], replica: Replica[Any]) -> None:
        replica.engine = await self._replace(replica.index)
        replica.outstanding, replica.routable = 0, True
        if self.current is not None:
            replica.version = self.current.version

    patch.setattr(WeightSync, "_restart", restart)


def lineage(patch: Patch) -> None:
    """A trainer that starts again goes on in the lineage of the one that died."""

    async def same(self: Books) -> int:
        return int(self.store.meta()["lineage"])

    patch.setattr(Books, "new_lineage", same)


def idempotence(patch: Patch) -> None:
    """A batch that is asked for twice at once is chosen twice."""

    async def batch(self: Rollouter, step: int) -> Batch:
        return await self._batch_of(step)

    patch.setattr(Rollouter, "batch", batch)


@pytest.mark.parametrize(
    ("mutant", "promise"),
    [
        (fencing, 1),
        (deadlines, 3),
        (consumption, 3),
        (commit, 6),
        (acknowledgement, 4),
        (lineage, 4),
        (idempotence, 9),
    ],
)
def test_the_simulation_notices(
    mutant: Callable[[Patch], None], promise: int, monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    said = []
    for seed in range(SEEDS):
        shape = replace(Shape.drawn(seed, GROUPS), trouble=2.0)
        try:
            simulate(seed, shape)
        except SimulationFailed as failed:
            said.append(str(failed).splitlines()[0])
            if f"promise {promise}: " in said[-1]:
                return
    raise AssertionError(f"noticed only: {said}")
