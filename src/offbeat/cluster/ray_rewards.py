"""A run's reward models as Ray actors on their pools: started, and started again when they die."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ray.actor import ActorHandle

from offbeat.cluster.actors import RayEngine, RayScorer, start_again, start_engine, start_scorer
from offbeat.cluster.build import Standing
from offbeat.cluster.pools import ResourcePool
from offbeat.cluster.specs import RunSpec, judge_engine, scorer_spec, standing
from offbeat.config import Config
from offbeat.reward.source import Scorer
from offbeat.rollout.engine import Engine

Pools = Mapping[str, ResourcePool]
Handles = dict[str, list[ActorHandle]]
"""Replicas by source, or by pool."""


def make_judges(config: Config, run: RunSpec, pools: Pools) -> Handles:
    """The judges' actors on their pools, not started yet."""
    return {
        name: [
            start_engine(judge_engine(name, section, config, run, i), pools[f"reward/{name}"], run)
            for i in range(section.replicas)
        ]
        for name, section in config.active_rewards.items()
        if name in standing(config.active_rewards, "genrm")
    }


def make_scorers(config: Config, run: RunSpec, pools: Pools) -> Handles:
    """The scorers' actors on their pools, not started yet."""
    return {
        name: [
            start_scorer(scorer_spec(name, section, config, run, i), pools[f"reward/{name}"], run)
            for i in range(section.replicas)
        ]
        for name, section in config.active_rewards.items()
        if name in standing(config.active_rewards, "disrm")
    }


def start_reward_replica(
    config: Config, run: RunSpec, pools: Pools, name: str, index: int
) -> ActorHandle:
    """A replacement of replica `index` of source `name`, not started yet."""
    section, pool = config.active_rewards[name], pools[f"reward/{name}"]
    if section.kind == "genrm":
        spec = judge_engine(name, section, config, run, index)
        return start_engine(spec, pool, run, named=False)
    return start_scorer(scorer_spec(name, section, config, run, index), pool, run, named=False)


def by_place(pools: Pools, replicas: Handles) -> list[Sequence[ActorHandle]]:
    """The replicas of all pools, those that share a device together."""
    places: defaultdict[tuple[str, int], list[ActorHandle]] = defaultdict(list)
    for name, handles in replicas.items():
        for replica, handle in enumerate(handles):
            places[pools[name].bundle(replica)].append(handle)
    return list(places.values())


class Replacer:
    """Kills replicas that died and starts others in their places, one after another on a shared
    device: what crashes one replica there may crash all."""

    def __init__(self) -> None:
        self._turns: defaultdict[tuple[str, int], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def again(
        self,
        handles: list[ActorHandle],
        index: int,
        pool: ResourcePool,
        start: Callable[[], ActorHandle],
    ) -> ActorHandle:
        """Replaces `handles[index]` by what `start` makes; leaves none if that does not start."""
        async with self._turns[pool.bundle(index)]:
            return await start_again(handles, index, start)


def standing_on(
    config: Config,
    run: RunSpec,
    pools: Pools,
    judges: Handles,
    scorers: Handles,
    replacer: Replacer,
) -> Standing:
    """Started actors as the reward loop sees them. Its replacements are put into the two lists."""

    async def replace_engine(name: str, index: int) -> Engine:
        spec = judge_engine(name, config.active_rewards[name], config, run, index)
        pool = pools[f"reward/{name}"]
        start = partial(start_engine, spec, pool, run, named=False)
        fresh = await replacer.again(judges[name], index, pool, start)
        return RayEngine(fresh, payloads=False)

    async def replace_scorer(name: str, index: int) -> Scorer:
        spec = scorer_spec(name, config.active_rewards[name], config, run, index)
        pool = pools[f"reward/{name}"]
        start = partial(start_scorer, spec, pool, run, named=False)
        return RayScorer(await replacer.again(scorers[name], index, pool, start))

    return Standing(
        {name: [RayEngine(h, payloads=False) for h in found] for name, found in judges.items()},
        {name: [RayScorer(h) for h in found] for name, found in scorers.items()},
        replace_engine,
        replace_scorer,
    )
