"""The same roles in one process, without Ray: for tests, simulation and small machines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.cluster.build import RolloutSide, make_engine, make_scorer, make_trainer
from offbeat.cluster.roles import Roles
from offbeat.cluster.specs import RunSpec, ScorerSpec, judge_engine, policy_engine, standing
from offbeat.config import Config
from offbeat.data import planned_steps
from offbeat.records import Batch, Manifest, PolicyVersion, Span
from offbeat.reward.source import Scorer
from offbeat.rollout.engine import Engine

if TYPE_CHECKING:
    from offbeat.train.step import StepResult


STOP_SECONDS = 10.0


class LocalTrainer:
    """The trainer in a thread of this process; payloads are the arrays themselves."""

    def __init__(self, config: Config, run: RunSpec, total_steps: int) -> None:
        self.core = make_trainer(config, run, total_steps)

    async def setup(self) -> PolicyVersion:
        return await asyncio.to_thread(self.core.setup)

    async def step(self, batch: Batch) -> StepResult:
        payloads = [[sample.completion.ref for sample in group.samples] for group in batch.groups]
        return await asyncio.to_thread(self.core.step, batch, payloads)

    async def publish(self) -> Manifest:
        return await asyncio.to_thread(self.core.publish)

    async def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        await asyncio.to_thread(self.core.save, path, dict(extra))

    async def drain_spans(self) -> list[Span]:
        return self.core.drain_spans()


@asynccontextmanager
async def local_roles(config: Config, run: RunSpec) -> AsyncIterator[Roles]:
    """Starts every role in this process and ends them all."""
    sources = config.active_rewards
    engines = [make_engine(policy_engine(config, run, i)) for i in range(config.rollout.replicas)]
    judges = {
        name: [make_engine(judge_engine(name, sources[name], config, run, i)) for i in range(n)]
        for name, n in standing(sources, "genrm").items()
    }
    scorers = {
        name: [make_scorer(ScorerSpec(name, i, sources[name], run.device)) for i in range(n)]
        for name, n in standing(sources, "disrm").items()
    }
    started: list[Engine | Scorer] = [*engines]
    started += [replica for part in judges.values() for replica in part]
    started += [replica for part in scorers.values() for replica in part]
    side = RolloutSide(config, run)
    running: asyncio.Task[None] | None = None
    trainer: LocalTrainer | None = None
    try:
        for replica in started:  # one by one: loading models is not thread-safe in transformers
            await replica.start()
        total_steps = planned_steps(config, await side.start(judges, scorers))
        trainer = LocalTrainer(config, run, total_steps)
        await trainer.setup()

        async def replace(index: int) -> Engine:
            old, fresh = engines[index], make_engine(policy_engine(config, run, index))
            await _ended(old.stop())
            started.append(fresh)
            await fresh.start()
            engines[index] = fresh
            return fresh

        core = side.build(engines, total_steps, replace, config.run_dir / "ledger.sqlite")
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
            await _ended(*(replica.stop() for replica in started))
            if trainer is not None:
                trainer.core.close()


async def _ended(*work: Awaitable[None]) -> None:
    """Waits until all have ended, one way or another, but not for ever."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_SECONDS):
            await asyncio.gather(*work, return_exceptions=True)
