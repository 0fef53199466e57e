"""All roles of a run on one device, on Ray: they take turns, and nothing is ever stale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat.track.metrics import read_metrics

Project = Callable[..., Path]
pytestmark = pytest.mark.timeout(600)
STEPS = 4
CLOCK_SECONDS = 0.001
"""Spans are timed by several processes of one machine; a training step takes ten times as long."""


def offbeat(*arguments: str) -> tuple[str, str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    env.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=400,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


@pytest.fixture
def config(project: Project) -> Path:
    """Judge, scorer and rule, with one slot for them, the engine and the trainer."""
    return project(
        ("rule", "judge", "scorer"),
        cluster__backend="ray",
        cluster__slots=1,
        cluster__single_device=True,
        train__max_staleness=0,
        train__steps=STEPS,
    )


def test_the_map_says_that_roles_alternate(config: Path) -> None:
    out, _ = offbeat("check", str(config), "--cluster.device", "cpu")
    assert "for rollout, train, reward/judge, reward/scorer in turn" in out
    assert "the roles take turns" in out
    assert "1 of 1 slots" in out


def test_four_roles_on_one_slot_take_turns_and_nothing_is_stale(config: Path) -> None:
    offbeat("train", str(config), "--cluster.device", "cpu")
    run = config.parent / "runs" / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["groups"]["trained"] == 2 * STEPS
    assert summary["groups"]["discarded"] == {}
    assert summary["staleness"]["max"] == 0
    for name in ("rule", "judge", "scorer"):
        assert summary["rewards"][name]["scored"] > 0
    records = list(read_metrics(run / "metrics.jsonl"))
    steps = [record for record in records if record["type"] == "step"]
    assert [step["step"] for step in steps] == list(range(STEPS))
    spans = [record for record in records if record["type"] == "span"]
    rollout = [s for s in spans if s["role"] == "rollout" and s["kind"] != "load"]
    train = [s for s in spans if s["role"] == "train" and s["kind"] == "train"]
    judge = [s for s in spans if s["role"] == "reward/judge"]
    assert len(train) == STEPS
    assert rollout
    assert judge
    for step in train:
        beside = [s["kind"] for s in (*rollout, *judge) if overlap(s, step) > CLOCK_SECONDS]
        assert beside == [], "nothing is generated or judged while the trainer works"


def overlap(left: dict[str, Any], right: dict[str, Any]) -> float:
    """Seconds that two spans have in common."""
    return float(min(left["end"], right["end"]) - max(left["start"], right["start"]))
