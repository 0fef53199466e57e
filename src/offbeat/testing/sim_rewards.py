"""Simulated reward sources: they take their time, fail by cause, break their contract, are down."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from offbeat.records import Reward, ScoreItem, Span
from offbeat.testing.sim_world import World

CAUSES = ("timeout", "unavailable", "unparseable", "replica_lost")


class SimSource:
    """One source; its values are drawn."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self._deadline = world.config.reward[name].deadline_seconds
        self._up = asyncio.Event()
        self._up.set()
        self._down_since: float | None = None

    @property
    def name(self) -> str:
        """See `RewardSource.name`."""
        return self._name

    @property
    def down_since(self) -> float | None:
        """See `RewardSource.down_since`."""
        return self._down_since

    async def start(self) -> None:
        """It serves."""

    async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
        """See `RewardSource.score`."""
        world = self._world
        await self._up.wait()
        await asyncio.sleep(world.rng.expovariate(1 / world.shape.seconds) / 4)
        if world.chance(0.01):
            return await self._odd(items)
        return [Reward(self._name, "scored", world.rng.random()) for _ in items]

    async def _odd(self, items: Sequence[ScoreItem]) -> list[Reward]:
        rng = self._world.rng
        kind = rng.choice(("hangs", "fails", "fails", "raises", "abstains", "nan", "short"))
        if kind == "hangs":
            await asyncio.sleep(self._deadline)
        if kind == "raises":
            raise ValueError("the source broke its contract")
        if kind == "short":
            return []
        if kind == "abstains":
            return [Reward.abstained(self._name) for _ in items]
        if kind == "nan":
            return [Reward(self._name, "scored", float("nan")) for _ in items]
        return [Reward.failed(self._name, rng.choice(CAUSES)) for _ in items]

    async def outage(self, seconds: float) -> None:
        """Nobody is there to score for so long."""
        self._world.promises.event(f"{self._name} is down")
        self._up.clear()
        self._down_since = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        self._down_since = None
        self._up.set()

    def facts(self) -> Mapping[str, float]:
        """None."""
        return {}

    async def drain_spans(self) -> list[Span]:
        """It tells nothing."""
        return []

    async def stop(self) -> None:
        """It holds nothing."""
