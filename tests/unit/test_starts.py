"""Replicas that share one device start one after another; those with devices of their own at once.

vLLM measures a GPU's free memory while it starts, and fails if others take or give some meanwhile.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

pytest.importorskip("ray")
from offbeat.cluster import ray_roles
from offbeat.cluster.plan import PoolPlan
from offbeat.cluster.pools import ResourcePool
from offbeat.cluster.ray_rewards import Replacer


class Starting:
    """An actor's handle whose start takes a while; counts how many start at the same time."""

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen
        self.start = self

    async def remote(self) -> None:
        self._seen[0] += 1
        self._seen[1] = max(self._seen[:2])
        await asyncio.sleep(0.02)
        self._seen[0] -= 1
        self._seen[2] += 1


@pytest.mark.parametrize(("places", "at_once"), [([3], 1), ([2, 1], 2), ([1, 1, 1], 3)])
def test_at_the_runs_start(places: list[int], at_once: int) -> None:
    seen = [0, 0, 0]
    handles: list[Any] = [[Starting(seen) for _ in range(n)] for n in places]
    asyncio.run(ray_roles.started(handles))
    assert seen == [0, at_once, 3]


def pool(name: str, within: str | None = None) -> ResourcePool:
    group: Any = None
    return ResourcePool(PoolPlan(name, "genrm", 2, 1, (), within, 0.5), "cpu", group)


@pytest.mark.parametrize(
    ("which", "at_once"),
    [
        ([("a", None, 0), ("a", None, 1)], 2),  # two replicas, each on a device of its own
        ([("a", "shared", 0), ("b", "shared", 0)], 1),
        ([("a", "shared", 0), ("b", "shared", 1)], 2),  # on two devices of one pool
        ([("a", "left", 0), ("b", "right", 0)], 2),
    ],
)
def test_when_several_are_started_again(
    monkeypatch: pytest.MonkeyPatch,
    which: list[tuple[str, str | None, int]],
    at_once: int,
) -> None:
    monkeypatch.setattr("ray.kill", lambda handle: None)
    replacer = Replacer()
    seen = [0, 0, 0]
    handles: list[Any] = [Starting(seen) for _ in range(2)]

    async def main() -> None:
        start: Any = partial(Starting, seen)
        again = [replacer.again(handles, i, pool(name, home), start) for name, home, i in which]
        await asyncio.gather(*again)

    asyncio.run(main())
    assert seen == [0, at_once, 2]
