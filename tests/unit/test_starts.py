"""Replicas that share one device start one after another; those with devices of their own at once.

vLLM measures a GPU's free memory while it starts, and fails if others take or give some meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from offbeat.cluster import ray_roles
from offbeat.cluster.rollouter_actor import RollouterActor
from offbeat.cluster.specs import RunSpec
from offbeat.config_file import load_config


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


@pytest.mark.parametrize(("single", "at_once"), [(True, 1), (False, 3)])
def test_at_the_runs_start(single: bool, at_once: int) -> None:
    seen = [0, 0, 0]
    handles: list[Any] = [Starting(seen) for _ in range(3)]
    asyncio.run(ray_roles.started(handles, one_by_one=single))
    assert seen == [0, at_once, 3]


@pytest.mark.parametrize(("single", "at_once"), [(True, 1), (False, 2)])
def test_when_several_are_started_again(
    project: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, single: bool, at_once: int
) -> None:
    more = {"cluster__single_device": True, "train__max_staleness": 0} if single else {}
    config = load_config(project(**more))
    monkeypatch.setattr("ray.kill", lambda handle: None)
    rollouter = RollouterActor(config, RunSpec("run-1", "cpu", config.run_dir))
    seen = [0, 0, 0]
    handles: list[Any] = [Starting(seen) for _ in range(2)]

    async def main() -> None:
        start: Any = partial(Starting, seen)
        await asyncio.gather(*(rollouter._again(handles, i, start) for i in range(2)))

    asyncio.run(main())
    assert seen == [0, at_once, 2]
