"""Roles in one process: a judge and a scorer that die there are started again, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from offbeat.cluster import local
from offbeat.cluster.build import make_rewards
from offbeat.cluster.local import LocalReplicas
from offbeat.cluster.specs import EngineSpec, RunSpec
from offbeat.config import Config
from offbeat.config_file import load_config
from offbeat.records import Prompt, ScoreItem

Project = Callable[..., Path]


def item(answer: str) -> ScoreItem:
    return ScoreItem(Prompt(0, np.zeros(1, np.int32), "abc>", "abc>", None, "cba"), answer)


def settings(path: Path) -> tuple[Config, RunSpec]:
    return load_config(path), RunSpec("run-1", "cpu", path.parent)


def test_a_judge_and_a_scorer_that_die_are_started_again(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    config, run = settings(project(("rule", "judge", "scorer"), reward__judge__cache=False))

    async def main() -> None:
        replicas = LocalReplicas(config, run)
        rewards = await make_rewards(config, await replicas.start())
        before = await rewards.score(item("aeiou"))
        (judge,), (scorer,) = replicas.judges["judge"], replicas.scorers["scorer"]

        def dies() -> None:
            raise MemoryError("no room for the next step")

        judge._stepper.step = dies  # type: ignore[union-attr]
        await scorer.stop()  # to its source it is as dead as one that crashed
        after = await asyncio.gather(*(rewards.score(item("aeiou")) for _ in range(6)))
        assert {name: r.value for name, r in before.rewards.items()}.keys() == {
            "rule", "judge", "scorer",
        }  # fmt: skip
        for scored in after:
            assert scored.total == pytest.approx(before.total)
        stats = rewards.stats()
        assert (stats["judge"].failed, stats["scorer"].failed) == ({}, {})
        assert stats["judge"].retries > 0
        assert stats["scorer"].retries > 0
        assert replicas.judges["judge"] != [judge]
        assert replicas.scorers["scorer"] != [scorer]
        await rewards.stop()
        await replicas.stop()

    asyncio.run(main())
    assert "reward/judge replica 0 died (MemoryError: no room for the next step)" in caplog.text


class Slow:
    """An engine whose start cannot be broken off, as those that load in a thread."""

    running = most = 0

    def __init__(self, spec: EngineSpec) -> None:
        self.role, self.started, self.stopped = spec.role, False, False

    async def start(self) -> None:
        Slow.running += 1
        Slow.most = max(Slow.most, Slow.running)
        await asyncio.sleep(0.2)
        Slow.running -= 1
        self.started = True

    async def stop(self) -> None:
        self.stopped = self.started


def test_starts_come_one_by_one_and_one_that_nobody_waits_for_is_stopped(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Slow] = []

    def make(spec: EngineSpec) -> Slow:
        made.append(Slow(spec))
        return made[-1]

    monkeypatch.setattr(local, "make_engine", make)
    config, run = settings(project(("rule", "judge"), reward__judge__replicas=2))

    async def main() -> None:
        replicas = LocalReplicas(config, run)
        standing = await replicas.start()
        first = made[1:3]
        assert [engine.role for engine in first] == ["reward/judge"] * 2
        again = [standing.replace_engine("judge", i) for i in (0, 1)]
        fresh = await asyncio.gather(*again, replicas.replace(0))
        assert Slow.most == 1
        assert all(engine.stopped for engine in made[:3])
        assert list(fresh[:2]) == replicas.judges["judge"]
        assert replicas.engines == [fresh[2]]
        leaving = asyncio.create_task(standing.replace_engine("judge", 1))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await replicas.stop()
        assert all(engine.started and engine.stopped for engine in made)

    asyncio.run(main())
