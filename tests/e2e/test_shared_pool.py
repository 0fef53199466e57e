"""A judge and a scorer share one device of a run on Ray; one that is killed comes back there."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.test_ray_run import records
from tests.e2e.test_reward_revival import (
    ENDLESS,
    nothing_lost,
    processes_of,
    run_until_back,
    signal_to,
)

Project = Callable[..., Path]
pytestmark = pytest.mark.timeout(600)  # two cores may be shared with others

ANCHORS = [("abc", "cba", 10), ("abcd", "dcba", 10), ("ab", "zz", 1), ("xy", "xy", 1)]
HALVES: dict[str, Any] = {
    "reward__judge__pool": "small",
    "reward__judge__device_share": 0.5,
    "reward__scorer__pool": "small",
    "reward__scorer__device_share": 0.5,
}


@pytest.mark.long
def test_one_of_two_that_share_a_slot_is_killed_and_comes_back(project: Project) -> None:
    """Three slots for rollout, trainer and both reward models: with slots of their own, or with
    a replacement that waits for another slot, there would be no such run."""
    path = project(
        ("rule", "judge", "scorer"), cluster__slots=3, rollout__max_tokens=24,
        reward__judge__anchors="anchors.jsonl", reward__judge__anchors_every=3,
        **HALVES, **ENDLESS,
    )  # fmt: skip
    rows = [{"question": f"{w}>", "answer": a, "grade": g} for w, a, g in ANCHORS]
    (path.parent / "anchors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    neighbours: list[int] = []

    def kill(process: subprocess.Popen[str]) -> list[psutil.Process]:
        neighbours.extend(child.pid for child in processes_of(process, "reward/judge/0"))
        victims = [signal_to(process, "reward/scorer/0", signal.SIGKILL)]
        assert [child.pid for child in processes_of(process, "reward/judge/0")] == neighbours
        return victims

    summary = run_until_back(path, kill, {("reward/scorer", 0)})
    nothing_lost(summary)
    assert summary["rewards"]["judge"]["scored"] > 0
    steps = records(path, "run", "step")
    assert len(steps) >= 2
    assert steps[-1]["health"]["sources"]["scorer"]["n"] > 0
    looks = records(path, "run", "anchors")
    assert [look["step"] for look in looks][:2] == [0, 3]
    assert all(look["judged"] == len(ANCHORS) for look in looks)
    assert {look["drift"] for look in looks[1:]} == {0}  # greedy: the same verdicts each time
    assert summary["anchors"]["judge"]["looks"] == len(looks)
