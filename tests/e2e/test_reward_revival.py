"""Reward replicas are killed and stopped by pid under load: no sample is lost, all come back."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.test_ray_run import finish, records, start, wait_for

from offbeat.cluster.leftovers import TAG

Project = Callable[..., Path]
pytestmark = pytest.mark.timeout(600)  # two cores may be shared with others

ENDLESS: dict[str, Any] = {
    "cluster__backend": "ray",
    "train__steps": 100_000,
    "train__checkpoint_every": 100_000,
    "data__epochs": 10_000,
}


def processes_of(process: subprocess.Popen[str], replica: str) -> list[psutil.Process]:
    """The processes of one replica, say `reward/judge/0`, by the tag in their environment."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if child.environ().get(TAG, "").endswith(f"/{replica}"):
                found.append(child)
        except psutil.Error:
            continue  # ended meanwhile
    return found


def signal_to(process: subprocess.Popen[str], replica: str, number: int) -> psutil.Process:
    (victim,) = processes_of(process, replica)
    victim.send_signal(number)
    return victim


def scored_since(path: Path, since: float) -> set[tuple[str, int]]:
    """Roles and replicas that computed something after a moment."""
    return {(s["role"], s["replica"]) for s in records(path, "run", "span") if s["start"] > since}


def restarts(path: Path) -> list[str]:
    log = (path.parent / "runs" / "run" / "logs" / "rollouter.log").read_text()
    return re.findall(r"reward/(\w+ replica \d) died \(.+\); restarted in \d+ s", log)


def run_until_back(
    path: Path, kill: Callable[[subprocess.Popen[str]], list[psutil.Process]], back: set[Any]
) -> dict[str, Any]:
    """The summary of a run in which `kill` strikes and all of `back` compute again."""
    process = start(path, None)
    try:
        metrics = path.parent / "runs" / "run" / "metrics.jsonl"
        wait_for(process, "starting", metrics.exists, seconds=300)
        wait_for(process, "two steps", lambda: len(records(path, "run", "step")) >= 2)
        victims = kill(process)
        wanted = sorted(f"{role.removeprefix('reward/')} replica {i}" for role, i in back)
        wait_for(process, "restarting", lambda: sorted(restarts(path)) == wanted)
        _, alive = psutil.wait_procs(victims, timeout=1)
        assert alive == [], "the old process is gone before another takes its place"
        joined = time.time()
        wait_for(process, "serving again", lambda: back <= scored_since(path, joined))
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        finish(process, 130)
    finally:
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == [], "no process is left behind, replacements included"
    summary: dict[str, Any] = json.loads(
        (path.parent / "runs" / "run" / "summary.json").read_text()
    )
    return summary


def nothing_lost(summary: dict[str, Any]) -> None:
    groups = summary["groups"]
    assert groups["discarded"] == {}
    assert groups["admitted"] == groups["trained"] + groups["live"]
    assert groups["trained"] >= 8
    for name in ("judge", "scorer"):
        outcomes = summary["rewards"][name]
        assert outcomes["scored"] >= 4 * groups["trained"] * 0.9
        # the tiny judge may write what is no grade; nothing is missing because of the dead
        assert set(outcomes["failed"]) <= {"unparseable", "out_of_range"}, outcomes
    assert summary["rewards"]["scorer"]["failed"] == {}


@pytest.mark.long
def test_one_of_two_judges_and_one_of_two_scorers_are_killed(project: Project) -> None:
    path = project(
        ("rule", "judge", "scorer"), cluster__slots=6, rollout__max_tokens=24,
        reward__judge__replicas=2, reward__scorer__replicas=2, **ENDLESS,
    )  # fmt: skip

    def kill(process: subprocess.Popen[str]) -> list[psutil.Process]:
        (judge,) = processes_of(process, "reward/judge/1")
        # what an engine's core becomes whose engine was killed: it holds the devices still
        orphan = subprocess.Popen(["sleep", "600"], env={TAG: judge.environ()[TAG]})
        return [
            signal_to(process, "reward/judge/1", signal.SIGKILL),
            signal_to(process, "reward/scorer/0", signal.SIGKILL),
            psutil.Process(orphan.pid),
        ]

    back = {("reward/judge", 1), ("reward/scorer", 0)}
    nothing_lost(run_until_back(path, kill, back))


@pytest.mark.long
def test_the_only_judge_is_killed_and_the_only_scorer_hangs(project: Project) -> None:
    """Samples wait for their return, and admission with them."""
    path = project(
        ("rule", "judge", "scorer"), cluster__slots=4, rollout__max_tokens=24,
        reward__scorer__deadline_seconds=5, **ENDLESS,
    )  # fmt: skip

    def strike(process: subprocess.Popen[str]) -> list[psutil.Process]:
        return [
            signal_to(process, "reward/judge/0", signal.SIGKILL),
            signal_to(process, "reward/scorer/0", signal.SIGSTOP),
        ]

    back = {("reward/judge", 0), ("reward/scorer", 0)}
    nothing_lost(run_until_back(path, strike, back))
