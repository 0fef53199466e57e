"""A whole run with actor, judge and scorer on vLLM engines of their own, on Ray: it learns."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.cluster.launch import train
from offbeat.config_file import load_config
from offbeat.testing import tiny

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("steps", "rise"), [(8, None), pytest.param(100, 0.12, marks=pytest.mark.long)]
)
def test_a_run_on_three_vllm_engines_raises_true_accuracy(
    project: Callable[..., Path], models: Path, tmp_path: Path, steps: int, rise: float | None
) -> None:
    """The short one ends before there is a rise to be seen."""
    tiny.make_tiny_actor(tmp_path / "actor", train_steps=70, longest=3)
    tiny.make_tiny_scorer(tmp_path / "scorer", hidden=64)
    tiny.write_reverse_data(tmp_path / "train.jsonl", 2000, 11, longest=3)
    tiny.write_reverse_data(tmp_path / "held_out.jsonl", 128, 12, longest=3)
    correct = f"{models / 'rewards.py'}:correct"
    path = project(
        ("exact", "judge", "scorer"),
        reward__exact__kind="function", reward__exact__function=correct,
        reward__judge__engine="vllm", reward__judge__weight=0.05,
        reward__scorer__engine="vllm", reward__scorer__weight=0.01,
        reward__scorer__model=str(tmp_path / "scorer"),
        model__path=str(tmp_path / "actor"), data__train=str(tmp_path / "train.jsonl"),
        data__validation=str(tmp_path / "held_out.jsonl"), validate__function=correct,
        rollout__engine="vllm", rollout__group_size=8, rollout__seats=64, rollout__max_context=32,
        train__groups_per_step=16, train__steps=steps, train__learning_rate=3e-4,
        cluster__backend="ray",
    )  # fmt: skip
    config = load_config(path, [])
    train(config, io.StringIO())
    summary = json.loads((config.run_dir / "summary.json").read_text())
    before, after = (entry["metrics"]["accuracy"] for entry in summary["validation"])
    assert rise is None or after - before >= rise, (before, after)
    groups = 16 * steps
    assert summary["groups"]["trained"] == groups
    assert 0 < summary["staleness"]["max"] <= 2
    assert 0 <= summary["drift"]["logprob_diff_mean"] < 1e-3, summary["drift"]
    for name in ("judge", "scorer"):
        assert summary["rewards"][name]["scored"] >= 0.99 * groups * 8
    decoded = {
        span["role"]
        for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()
        if (span := json.loads(line)).get("kind") == "decode"
    }
    assert decoded >= {"rollout", "reward/judge"}
