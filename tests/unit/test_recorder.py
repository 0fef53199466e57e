"""What the recorder makes of a run's numbers: the same as the trainer, and of the whole run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.cluster import launch
from offbeat.config import Config
from offbeat.records import Batch, Completion, Group, Prompt, Reward, Sample, Span
from offbeat.reward.stats import SourceStats
from offbeat.track.metrics import MetricsWriter
from offbeat.track.moments import mean
from offbeat.track.recorder import Recorder, reward_record


def recorder_of(folder: Path) -> Recorder:
    return Recorder(folder, bound=2, total_steps=9, stream=None, replicas={}, started=0.0)


def step_record(step: int) -> dict[str, Any]:
    return {
        "type": "step", "step": step, "time": 1000.0 + step, "tokens": 10, "generated_tokens": 10,
        "applied": True, "reward": {"total": 0.5, "judge": 0.5}, "staleness":
        {"mean": 0.0, "max": 0, "histogram": {"0": 4}}, "groups_counts":
        {"admitted": 2 * step + 2, "trained": 2 * step + 2, "discarded": {}, "live": 0},
        "scored": {"judge": {"scored": 6, "abstained": 0, "failed": {"timeout": 1}}},
    }  # fmt: skip


@given(st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=1, max_size=64))
def test_a_steps_mean_reward_is_the_trainers_to_the_bit(totals: list[float]) -> None:
    """What `offbeat replay` compares."""
    samples = tuple(
        Sample(
            Completion("r", i, "x", 1, 0, 0, "stop", None), {"a": Reward.scored("a", total)}, total
        )
        for i, total in enumerate(totals)
    )
    group = Group(Prompt(0, np.array([1], np.int32), "q", "q"), 0, 9, samples)
    means, _ = reward_record(Batch(0, (group,)))
    assert means["total"] == means["a"] == mean(totals)


@pytest.mark.parametrize("anew", [False, True])
def test_outcomes_are_the_sources_own_counts_while_these_are_the_runs(
    tmp_path: Path, anew: bool
) -> None:
    recorder = recorder_of(tmp_path)
    for step in range(5):
        recorder._stats.step(step_record(step))
    if anew:
        recorder.rewards_begin_anew()  # the rollouter died
    counts = {"admitted": 10, "trained": 10, "discarded": {}, "live": 0}
    recorder.books(counts, {"judge": SourceStats(scored=40, failed={"timeout": 2}, retries=3)})
    judge = recorder.close("finished")["rewards"]["judge"]
    expected = (30, {"timeout": 5}) if anew else (40, {"timeout": 2})
    assert (judge["scored"], judge["failed"]) == expected
    assert judge["retries"] == 3


@dataclass
class Sync:
    version: int = 3
    replica: int = 0
    start: float = 0.0
    end: float = 9.0
    acknowledged: bool = True
    lineage: int = 0


def test_a_pause_is_that_of_an_engine_of_rollout(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    spans = [
        Span("rollout", 0, "pause", 1.0, 1.125, 0.0, 3),
        Span("validate", 0, "pause", 1.0, 3.0, 0.0, 3),
        Span("rollout", 1, "pause", 1.0, 4.0, 0.0, 3),
        Span("rollout", 0, "pause", 1.0, 5.0, 0.0, 2),
    ]
    recorder.tail(spans, [Sync()], None)
    assert recorder.close("finished")["sync"]["pause_max_s"] == 0.125


def test_a_run_that_ends_before_its_loop_says_what_it_has(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "run": "r",
            "runs_dir": str(tmp_path),
            "model": {"path": "m"},
            "data": {"train": "d"},
            "reward": {"judge": {"kind": "function", "function": "f.py:f"}},
        }
    )
    config.run_dir.mkdir()
    writer = MetricsWriter(config.run_dir)
    for step in range(4):
        writer.write(step_record(step))
    writer.close()

    async def main() -> None:
        resumed = launch.Resume(None, claimed=True)
        async with launch._claimed(config, 2000.0, print, resumed):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert (summary["steps"], summary["groups"]["trained"]) == (4, 8)
