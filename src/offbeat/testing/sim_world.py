"""What a simulated run is made of beside the code under test: sizes, chances, disk, processes."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from offbeat.config import Config
from offbeat.errors import RoleDied
from offbeat.records import Prompt
from offbeat.testing.memory_store import Tables
from offbeat.testing.promises import Promises
from offbeat.train.checkpoint import checkpoint_name, version_of

if TYPE_CHECKING:
    from offbeat.rollout.rollouter import Rollouter
    from offbeat.testing.sim_engine import SimEngine

T = TypeVar("T")
CALM_START = 4  # from this start of a run on nothing goes wrong any more: it has to end well
COLLECT_EVERY = 2000  # groups
LONGEST = 60.0  # medians of a sample's time, at most


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a run and how it goes. `seconds`: a sample's median; `tail`: the exponent of its
    Pareto distribution; `trouble` scales every chance that something goes wrong (0: nothing does);
    `fault_seconds`: mean time between deaths of roles and outages; `scale` stretches deadlines."""

    engines: int = 4
    groups_per_step: int = 8
    max_staleness: int = 2
    group_size: int = 2
    steps: int = 125
    checkpoint_every: int = 10
    sources: int = 1
    seconds: float = 0.2
    step_seconds: float = 0.3
    tail: float = 1.5
    trouble: float = 1.0
    fault_seconds: float = 25.0
    scale: float = 1.0

    @classmethod
    def drawn(cls, seed: int, groups: int = 1000) -> Shape:
        """The shape of a seed, of about `groups` groups."""
        rng = random.Random(f"shape {seed}")
        size = rng.choice((4, 8, 8, 16, 32) if groups >= 500 else (1, 2, 4, 8))
        return cls(
            engines=rng.choice((1, 2, 3, 4, 8)),
            groups_per_step=size,
            max_staleness=rng.choice((0, 1, 1, 2, 2, 3, 5)),
            group_size=2,
            steps=max(1, groups // size),
            checkpoint_every=rng.choice((1, 5, 10, 25)),
            sources=rng.choice((1, 1, 2)),
            seconds=rng.choice((0.1, 0.2, 0.4)),
            step_seconds=rng.choice((0.05, 0.3, 0.6)),
            tail=rng.choice((1.05, 1.2, 1.5, 2.5)),
            trouble=rng.choice((0.0, 0.5, 1.0, 1.0, 2.0)),
            fault_seconds=rng.choice((10.0, 25.0, 60.0)),
        )

    def config(self) -> Config:
        """The settings of such a run; its deadlines are some seconds."""
        source = {
            "kind": "function",
            "function": "f.py:f",
            "retries": 1,
            "deadline_seconds": 3 * self.scale,
            "patience_seconds": 15 * self.scale,
        }
        return Config.model_validate(
            {
                "run": "simulated",
                "runs_dir": "/nonexistent",
                "model": {"path": "m"},
                "data": {"train": "d"},
                "rollout": {
                    "replicas": self.engines,
                    "group_size": self.group_size,
                    "max_tokens": 4,
                    "deadline_seconds": 10 * self.scale,
                },
                "train": {
                    "groups_per_step": self.groups_per_step,
                    "max_staleness": self.max_staleness,
                    "steps": self.steps,
                    "min_scored": min(2, self.group_size),
                    "checkpoint_every": self.checkpoint_every,
                    "straggler_patience_seconds": 4 * self.scale,
                    "batch_deadline_seconds": 60 * self.scale,
                    "deadline_seconds": 20 * self.scale,
                },
                "weights": {"deadline_seconds": 2 * self.scale},
                "cluster": {
                    "start_deadline_seconds": 20 * self.scale,
                    "heartbeat_seconds": 4 * self.scale,
                },
                "reward": {f"source{i}": source for i in range(self.sources)},
            }
        )


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint: a fingerprint stands for the weights."""

    step: int
    lineage: int
    weights: int


@dataclass(slots=True)
class Disk:
    """The checkpoints of a run."""

    saved: dict[int, Saved] = field(default_factory=dict)

    async def newest(self, folder: Path = Path("checkpoints")) -> Path | None:
        """As `newest_valid`."""
        await asyncio.sleep(0.001)
        return folder / checkpoint_name(max(self.saved)) if self.saved else None

    def load(self, path: Path | None) -> Saved:
        """What the trainer begins with."""
        return Saved(0, 0, 0) if path is None else self.saved[version_of(path)]


class SimPrompts:
    """`total` prompts that differ in their ordinal alone."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._ids = np.array([1, 2], np.int32)

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt of an ordinal."""
        return Prompt(ordinal, self._ids, "p", "p")


class World:
    """One simulated run: what outlives its processes, and what they share while they live."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self.seed, self.shape = seed, shape
        self.config = shape.config()
        self.rng = random.Random(seed)
        self.tables, self.disk = Tables(), Disk()
        self.prompts = SimPrompts(4 * shape.steps * shape.groups_per_step)
        clock = asyncio.get_running_loop().time
        self.promises = Promises(clock, shape.max_staleness, shape.group_size, self.tables.groups)
        self.start = 0  # starts of the run before this one
        self.lineage = 0
        self.resumed = False
        self.engines: list[SimEngine] = []
        self.core: Rollouter | None = None
        self.makers = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._uncollected = 0

    @property
    def calm(self) -> bool:
        """Whether nothing goes wrong any more."""
        return self.start >= CALM_START

    def may_lose_newest(self) -> bool:
        """Whether the checkpoint before the newest can be gone on from: there is one, and the
        batches after it are kept. (With the second one on end damaged they are not.)"""
        versions = sorted(self.disk.saved)
        return len(versions) > 1 and all(
            row.ordinal in self.tables.payloads
            for row in self.tables.groups.values()
            if row.step is not None and row.step >= versions[-2]
        )

    def chance(self, share: float) -> bool:
        """True in this share of cases, as troubled as the run is."""
        return not self.calm and self.rng.random() < share * self.shape.trouble

    def sample_seconds(self) -> float:
        """How long a sample takes: a heavy tail."""
        times = self.rng.paretovariate(self.shape.tail) * self.rng.uniform(0.4, 1.0)
        return self.shape.seconds * min(times, LONGEST)

    def commit_seconds(self) -> float:
        """How long the store takes to commit: now and then the disk stands still."""
        return self.rng.uniform(0.2, 1.5) if self.chance(0.02) else self.rng.uniform(0.001, 0.005)

    def collect(self, groups: int) -> None:
        """Collects garbage after so many groups, and at no other time: by the seed alone."""
        self._uncollected += groups
        if self._uncollected >= COLLECT_EVERY:
            gc.collect()
            self._uncollected = 0

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of a process: nobody may be waiting for it any more when it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def end_tasks(self) -> None:
        """Ends all that is left of a start's processes."""
        while self._tasks:
            for task in sorted(self._tasks, key=hash):
                task.cancel()
            await asyncio.wait(self._tasks, timeout=1)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # who waits for it is told; nobody may


class Process:
    """A role's process: it dies with all that it does; calls on it may be lost, or come twice."""

    def __init__(self, world: World, role: Literal["rollouter", "trainer"]) -> None:
        self.world, self.role = world, role
        self.alive = True
        self.hung = False
        self._serving: set[asyncio.Task[Any]] = set()

    def kill(self) -> None:
        """The process is gone, and with it what it was doing."""
        self.world.promises.event(f"{self.role} dies")
        self.alive = self.hung = False
        for task in sorted(self._serving, key=hash):
            task.cancel()

    async def ask(
        self, what: str, work: Callable[[], Coroutine[Any, Any, T]], twice: float = 0.0
    ) -> T:
        """The answer to a call, which goes on if nobody waits for it any more. With the chance
        `twice` the call comes a second time."""
        world = self.world
        if not self.alive:
            raise self.death(what)
        if self.hung:
            await asyncio.Event().wait()
        if world.chance(0.2):
            await asyncio.sleep(world.rng.uniform(0.0, 0.02))
        if world.chance(0.0005):
            self.kill()
            raise self.death(what)
        task = self.serve(work())
        if world.chance(twice):
            self.serve(work())
        answer = await self._answer(what, task)
        if world.chance(0.0005):  # it ran, and the answer is lost with the process
            self.kill()
            raise self.death(what)
        return answer

    def serve(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs something in the process."""
        task = self.world.spawn(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return task

    def death(self, what: str) -> RoleDied:
        """What a caller is told."""
        return RoleDied(self.role, f"the {self.role} has ended ({what})")

    async def _answer(self, what: str, task: Awaitable[T]) -> T:
        me = asyncio.current_task()
        assert me is not None
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self.alive or me.cancelling():
                raise
            raise self.death(what) from None
