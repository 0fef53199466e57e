"""The same roles in one process, without Ray: for tests, simulation and small machines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat.cluster.build import (
    RolloutSide,
    Standing,
    answer,
    make_engine,
    make_scorer,
    make_trainer,
)
from offbeat.cluster.leftovers import end_run
from offbeat.cluster.roles import Roles
from offbeat.cluster.specs import (
    RunSpec,
    judge_engine,
    policy_engine,
    scorer_spec,
    standing,
    validators,
)
from offbeat.config import Config
from offbeat.data import planned_steps
from offbeat.errors import OffbeatError
from offbeat.records import Batch, Completion, GenerateRequest, Manifest, PolicyVersion, Span
from offbeat.reward.source import Scorer
from offbeat.rollout.engine import Engine

if TYPE_CHECKING:
    from offbeat.train.step import StepResult

Replica = TypeVar("Replica", Engine, Scorer)
STOP_SECONDS = 10.0
START_SECONDS = 60.0  # for a replacement's start that nobody waits for any more


class LocalTrainer:
    """The trainer in a thread of this process; payloads are the arrays themselves."""

    def __init__(self, config: Config, run: RunSpec, total_steps: int) -> None:
        self._config, self._run, self._total_steps = config, run, total_steps
        self.core = make_trainer(config, run, total_steps)

    async def setup(self) -> PolicyVersion:
        checkpoint = None if self._run.go_on is None else self._run.go_on.checkpoint
        return await asyncio.to_thread(self.core.setup, checkpoint)

    async def restart(self, lineage: int, checkpoint: Path | None) -> PolicyVersion:
        await asyncio.to_thread(self.core.close)
        self.core = make_trainer(
            self._config, dataclasses.replace(self._run, lineage=lineage), self._total_steps
        )
        return await asyncio.to_thread(self.core.setup, checkpoint)

    async def ping(self) -> None:
        pass

    async def step(self, batch: Batch) -> StepResult:
        payloads = [[sample.completion.ref for sample in group.samples] for group in batch.groups]
        return await asyncio.to_thread(self.core.step, batch, payloads)

    async def publish(self) -> Manifest:
        return await asyncio.to_thread(self.core.publish)

    async def save(self, path: Path, extra: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        await asyncio.to_thread(self.core.save, path, dict(extra), files)

    async def answer(
        self, requests: Sequence[GenerateRequest]
    ) -> tuple[PolicyVersion, list[Completion]]:
        return await asyncio.to_thread(answer, self.core, requests)

    async def drain_spans(self) -> list[Span]:
        return self.core.drain_spans()


class LocalReplicas:
    """Engines and reward replicas of this process, started one by one: loading models is not
    thread-safe in transformers. A start cannot be broken off in its thread: whoever waits for it
    may leave, and what came up all the same is stopped."""

    def __init__(self, config: Config, run: RunSpec, *, policy: bool = True) -> None:
        """Without `policy` there are no engines of the policy."""
        self._config, self._run = config, run
        sources = config.active_rewards
        self.engines = [self._policy(i) for i in range(config.rollout.replicas if policy else 0)]
        own = validators(config) if policy else 0
        self.validators = [self._validator(i) for i in range(own)]
        self.judges = {
            name: [self._judge(name, i) for i in range(n)]
            for name, n in standing(sources, "genrm").items()
        }
        self.scorers = {
            name: [self._scorer(name, i) for i in range(n)]
            for name, n in standing(sources, "disrm").items()
        }
        self._all: list[Engine | Scorer] = [*self.engines, *self.validators]
        self._all += [replica for part in self.judges.values() for replica in part]
        self._all += [replica for part in self.scorers.values() for replica in part]
        self._one_by_one = asyncio.Lock()
        self._starting: asyncio.Task[None] | None = None  # the newest replacement's

    async def start(self) -> Standing:
        """Starts all; returns those of the reward sources."""
        for replica in self._all:
            await replica.start()
        return Standing(
            {name: tuple(found) for name, found in self.judges.items()},
            {name: tuple(found) for name, found in self.scorers.items()},
            self._replace_judge,
            self._replace_scorer,
        )

    async def replace(self, index: int) -> Engine:
        """Ends rollout engine `index` and starts another."""
        return await self._again(self.engines, index, lambda: self._policy(index))

    async def replace_validator(self, index: int) -> Engine:
        """The same for an engine that only validates."""
        return await self._again(self.validators, index, lambda: self._validator(index))

    async def stop(self) -> None:
        """Ends all that were ever started, also what still starts."""
        if self._starting is not None:
            await _ended(self._starting, seconds=START_SECONDS)
        await _ended(*(replica.stop() for replica in self._all))

    async def _replace_judge(self, name: str, index: int) -> Engine:
        return await self._again(self.judges[name], index, lambda: self._judge(name, index))

    async def _replace_scorer(self, name: str, index: int) -> Scorer:
        return await self._again(self.scorers[name], index, lambda: self._scorer(name, index))

    async def _again(
        self, replicas: list[Replica], index: int, make: Callable[[], Replica]
    ) -> Replica:
        async with self._one_by_one:
            if self._starting is not None:
                await asyncio.wait([self._starting])
            await _ended(replicas[index].stop())
            replicas[index] = fresh = make()
            self._all.append(fresh)
            self._starting = asyncio.create_task(fresh.start())
            await asyncio.shield(self._starting)
            return fresh

    def _policy(self, index: int) -> Engine:
        return make_engine(policy_engine(self._config, self._run, index))

    def _validator(self, index: int) -> Engine:
        return make_engine(policy_engine(self._config, self._run, index, "validate"))

    def _judge(self, name: str, index: int) -> Engine:
        section = self._config.active_rewards[name]
        return make_engine(judge_engine(name, section, self._config, self._run, index))

    def _scorer(self, name: str, index: int) -> Scorer:
        section = self._config.active_rewards[name]
        return make_scorer(scorer_spec(name, section, self._config, self._run, index))


@asynccontextmanager
async def local_roles(config: Config, run: RunSpec) -> AsyncIterator[Roles]:
    """Starts every role in this process and ends them all."""
    replicas = LocalReplicas(config, run)
    side = RolloutSide(config, run)
    running: asyncio.Task[None] | None = None
    trainer: LocalTrainer | None = None
    await asyncio.to_thread(end_run, config.run_dir.resolve())  # of a start on Ray
    try:
        async with _in_time(config.cluster.start_deadline_seconds):
            total_steps = planned_steps(config, await side.start(await replicas.start()))
            trainer = LocalTrainer(config, run, total_steps)
            await trainer.setup()
            dedicated = side.dedicated(replicas.validators, replicas.replace_validator)
            core = await side.build(
                replicas.engines, total_steps, replicas.replace, dedicated, go_on=run.go_on
            )
            running = asyncio.create_task(core.run())
            await core.running.wait()
        yield Roles(core, trainer, total_steps)
    finally:
        if running is not None and side.core is not None:
            await side.core.stop()
            await _ended(running)
        try:
            await side.close()
        finally:
            await replicas.stop()
            if trainer is not None:
                trainer.core.close()


@asynccontextmanager
async def _in_time(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as late:
        if not limit.expired():
            raise
        raise OffbeatError(
            f"the roles did not start within cluster.start_deadline_seconds = {seconds:g}"
        ) from late


async def _ended(*work: Awaitable[None], seconds: float = STOP_SECONDS) -> None:
    """Waits until all have ended, one way or another, but not for ever."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*work, return_exceptions=True)
