"""A run's reward sources and nothing else, started where the run would have them.

Judges and scorers stand on Ray pools with cluster.backend = "ray", else in this process. Functions
and external judges need neither, so a run that has nothing else starts no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from offbeat.cluster.build import Standing, make_rewards
from offbeat.cluster.plan import check_memory, plan_pools
from offbeat.cluster.signals import end_on_sigterm
from offbeat.cluster.specs import RunSpec
from offbeat.config import Config
from offbeat.errors import OffbeatError, UserError
from offbeat.records import ScoreItem
from offbeat.reward.loop import RewardLoop
from offbeat.reward.source import Scorer
from offbeat.rollout.engine import Engine

Say = Callable[[str], None]


@asynccontextmanager
async def reward_roles(
    config: Config, run: RunSpec, say: Say, examples: Sequence[ScoreItem] = ()
) -> AsyncIterator[RewardLoop]:
    """The reward loop over the run's active sources, started; all that it started ends with it.

    `say` is told what starts; scorers are checked on `examples` before they score. The rollout
    engine and the trainer are neither started nor needed.
    """
    side = _here if config.cluster.backend == "local" else _on_ray
    if not any(source.has_pool for source in config.active_rewards.values()):
        side = _nowhere
    async with _within(config, side(config, run, say)) as standing:
        rewards = await make_rewards(config, standing, examples=examples)
        try:
            yield rewards
        finally:
            await rewards.stop()


@asynccontextmanager
async def _within(
    config: Config, side: AbstractAsyncContextManager[Standing]
) -> AsyncIterator[Standing]:
    """Enters a side within the start's deadline."""
    seconds = config.cluster.start_deadline_seconds
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(seconds):
                standing = await stack.enter_async_context(side)
        except TimeoutError:
            raise OffbeatError(
                "the reward models did not start within cluster.start_deadline_seconds = "
                f"{seconds:.0f}"
            ) from None
        yield standing


@asynccontextmanager
async def _nowhere(config: Config, run: RunSpec, say: Say) -> AsyncIterator[Standing]:
    """Functions and external judges have no replicas, and need no torch here."""

    async def no_engine(name: str, index: int) -> Engine:
        raise RuntimeError(f"{name} has no replica {index}")

    async def no_scorer(name: str, index: int) -> Scorer:
        raise RuntimeError(f"{name} has no replica {index}")

    yield Standing({}, {}, no_engine, no_scorer)


@asynccontextmanager
async def _here(config: Config, run: RunSpec, say: Say) -> AsyncIterator[Standing]:
    from offbeat.cluster.local import LocalReplicas

    replicas = LocalReplicas(config, run, policy=False)
    say(f"starting {', '.join([*replicas.judges, *replicas.scorers])} in this process")
    try:
        yield await replicas.start()
    finally:
        await replicas.stop()


@asynccontextmanager
async def _on_ray(config: Config, run: RunSpec, say: Say) -> AsyncIterator[Standing]:
    try:
        from offbeat.cluster.ray_rewards import (
            Replacer,
            by_place,
            make_judges,
            make_scorers,
            standing_on,
        )
        from offbeat.cluster.ray_roles import connect, end_replicas, leave, reserve, started
    except ImportError:
        raise UserError(
            "cluster.backend = ray, but Ray is not installed; install ray, or set "
            "--cluster.backend local to score in this process"
        ) from None
    check_memory(config, run.device)
    plans = [plan for plan in plan_pools(config) if plan.name.startswith("reward/")]
    say(f"starting {', '.join(plan.name for plan in plans)} on Ray")
    connect(config, run.device)  # in the main thread: Ray sets signal handlers
    end_on_sigterm()  # Ray has put its own in place
    pools = {}
    judges, scorers = {}, {}
    try:
        pools = await reserve(config, plans, run.device)
        judges, scorers = make_judges(config, run, pools), make_scorers(config, run, pools)
        found = {f"reward/{name}": handles for name, handles in (judges | scorers).items()}
        await started(by_place(pools, found))
        yield standing_on(config, run, pools, judges, scorers, Replacer())
    finally:
        await end_replicas(
            [h for found in (judges, scorers) for part in found.values() for h in part]
        )
        await asyncio.to_thread(leave, pools)
