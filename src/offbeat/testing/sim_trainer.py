"""A simulated trainer: its weights are a fingerprint of all it was trained on, in order."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offbeat.errors import RunFailed
from offbeat.records import Batch, Completion, GenerateRequest, Manifest, PolicyVersion, Span
from offbeat.testing.sim_world import Process, Saved, World
from offbeat.train.checkpoint import LEDGER_COPY, version_of

if TYPE_CHECKING:
    from offbeat.train.step import StepResult

KEPT = 2  # checkpoints, beside the first


@dataclass(frozen=True, slots=True)
class Trained:
    """What the loop wants to know of a step."""

    step: int
    no_signal: tuple[int, ...] = ()


class SimTrainer:
    """The trainer as the loop sees it: one process at a time, in it one call at a time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._begin(world.lineage, Saved(0, 0, 0))

    def _begin(self, lineage: int, saved: Saved) -> None:
        self.process = Process(self.world, "trainer")
        self._lineage, self._step, self._weights = lineage, saved.step, saved.weights
        self._last: Trained | None = None
        self._turn = asyncio.Lock()
        self.world.makers += 1
        self._number = self.world.makers

    async def setup(self, checkpoint: Path | None) -> None:
        """Begins with a checkpoint's weights, or the model's."""
        await asyncio.sleep(0.5)
        self._begin(self.world.lineage, self.world.disk.load(checkpoint))

    async def restart(self, lineage: int, checkpoint: Path | None) -> PolicyVersion:
        """See `TrainerRole.restart`."""
        self.process.kill()
        await asyncio.sleep(self.world.rng.uniform(0.2, 1.0))
        self._begin(lineage, self.world.disk.load(checkpoint))
        return PolicyVersion(lineage, self._step)

    async def ping(self) -> None:
        """See `TrainerRole.ping`."""
        await self.process.ask("ping", self._nothing)

    async def step(self, batch: Batch) -> StepResult:
        """See `TrainerRole.step`."""
        return cast("StepResult", await self.process.ask("step", lambda: self._train(batch)))

    async def _train(self, batch: Batch) -> Trained:
        async with self._turn:
            if self._last is not None and self._last.step == batch.step:
                return self._last
            if batch.step != self._step:
                raise RunFailed(f"the trainer is at step {self._step} and got batch {batch.step}")
            found = self.world.promises.trained(batch, self._step)
            await asyncio.sleep(self.world.shape.step_seconds * self.world.rng.uniform(0.5, 1.5))
            self._weights = zlib.crc32(found.to_bytes(4, "little"), self._weights)
            self._step += 1
            self._last = Trained(batch.step)
            self.world.collect(len(batch.groups))
            return self._last

    async def publish(self) -> Manifest:
        """See `TrainerRole.publish`."""
        return await self.process.ask("publish", self._publish)

    async def _publish(self) -> Manifest:
        async with self._turn:
            await asyncio.sleep(0.02)
            version = PolicyVersion(self._lineage, self._step)
            self.world.promises.made(version, self._number)
            return Manifest(version, "full", "", {})

    async def answer(
        self, requests: Sequence[GenerateRequest]
    ) -> tuple[PolicyVersion, list[Completion]]:
        """Nothing is validated."""
        raise NotImplementedError

    async def save(self, path: Path, extra: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        """See `TrainerRole.save`."""
        await self.process.ask("save", lambda: self._save(path, files))

    async def _save(self, path: Path, files: Mapping[str, Path]) -> None:
        async with self._turn:
            await asyncio.sleep(self.world.rng.uniform(0.05, 0.3))
            promises, saved = self.world.promises, self.world.disk.saved
            promises.event(f"{path.name} holds version {self._step}")
            same = version_of(path) == self._step
            promises.check(same, 5, f"{path.name} holds version {self._step}")
            if LEDGER_COPY in files:
                rows = self.world.tables.copies.pop(files[LEDGER_COPY])
                steps = {row.step for row in rows.values() if row.step is not None}
                whole = steps >= set(range(self._step))
                promises.check(whole, 5, f"the ledger in {path.name} has the steps {steps}")
            saved[self._step] = Saved(self._step, self._lineage, self._weights)
            for old in sorted(saved)[1:-KEPT]:
                del saved[old]

    async def drain_spans(self) -> list[Span]:
        """See `TrainerRole.drain_spans`."""
        return await self.process.ask("spans", self._no_spans)

    async def _nothing(self) -> None:
        pass

    async def _no_spans(self) -> list[Span]:
        return []
