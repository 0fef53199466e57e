"""Validation as Ray actors: a pool of its own, the trainer, and an engine that is killed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from offbeat.cluster.leftovers import TAG
from offbeat.track.metrics import read_metrics

Project = Callable[..., Path]
SLOTS = 8  # two runs of four roles each
ROWS = 8
SOURCES = ("rule", "judge", "scorer")
pytestmark = pytest.mark.timeout(900)  # two cores may be shared with others


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster with offbeat_slot resources, as a user would start one."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "resources": {"offbeat_slot": SLOTS}, "object_store_memory": 128 << 20}
    started = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    yield started.address
    started.shutdown()


def start(config: Path, address: str | None) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    env.pop("RAY_ADDRESS", None)
    if address is not None:
        env["RAY_ADDRESS"] = address
    return subprocess.Popen(
        [sys.executable, "-m", "offbeat", "train", str(config), "--cluster.device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def finish(process: subprocess.Popen[str], seconds: float = 300) -> None:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, f"{out}\n{err}"


def project_of(project: Project, models: Path, on: str, **more: Any) -> Path:
    return project(
        SOURCES,
        on,
        validate__on=on,
        validate__every=2,
        validate__function=f"{models / 'rewards.py'}:letters",
        data__validation=str(models / "validation.jsonl"),
        cluster__backend="ray",
        **more,
    )


def told(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary, and the records of the run's metrics."""
    run = path.parent / "runs" / path.stem
    return json.loads((run / "summary.json").read_text()), list(read_metrics(run / "metrics.jsonl"))


def test_two_modes_at_once_with_a_judge_a_scorer_and_a_rule_on_pools_of_their_own(
    cluster: str, project: Project, models: Path
) -> None:
    """On one cluster nothing collides by name; the third mode is in test_validate_anywhere.py."""
    paths = [project_of(project, models, on) for on in ("train", "dedicated")]
    processes = [start(path, cluster) for path in paths]
    try:
        for process in processes:
            finish(process, 400)
    finally:
        for process in processes:
            process.kill()
    first = []
    for path in paths:
        summary, records = told(path)
        assert summary["status"] == "finished"
        validations = summary["validation"]
        assert [validations[0]["step"], validations[-1]["step"]] == [0, 4]
        for entry in validations:
            assert entry["by"] == path.stem
            metrics = entry["metrics"]
            assert metrics["n"] == ROWS
            assert metrics["reward/rule"] == pytest.approx(metrics["accuracy"])
            assert math.isfinite(metrics["reward/scorer"])
            assert metrics["failed/scorer"] == 0
            assert 0 <= metrics["failed/judge"] <= ROWS
        roles = {record["role"] for record in records if record["type"] == "span"}
        assert ("validate" in roles) == (path.stem == "dedicated")
        first.append(validations[0]["metrics"])
    assert first[1] == pytest.approx(first[0], nan_ok=True)


@pytest.mark.long
def test_an_engine_that_only_validates_is_killed_and_comes_back(
    project: Project, models: Path
) -> None:
    path = project(
        ("rule",), "killed", cluster__backend="ray", cluster__slots=3, validate__on="dedicated",
        validate__every=5, data__validation=str(models / "validation.jsonl"),
        train__steps=2000, train__checkpoint_every=10_000, data__epochs=100,
    )  # fmt: skip
    metrics = path.parent / "runs" / "killed" / "metrics.jsonl"
    process = start(path, None)

    def versions() -> list[int]:
        if not metrics.exists():
            return []
        return [r["step"] for r in read_metrics(metrics) if r["type"] == "validation"]

    def wait(what: str, probe: Callable[[], bool]) -> None:
        deadline = time.time() + 300
        while not probe():
            assert process.poll() is None, process.communicate()
            assert time.time() < deadline, what
            time.sleep(0.2)

    try:
        wait("the first validations", lambda: len(versions()) >= 2)
        found = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "EngineActor" in " ".join(child.cmdline()) and "validate" in owner(child)
        ]
        assert len(found) == 1
        found[0].kill()
        before = len(versions())
        wait("three validations after the kill", lambda: len(versions()) >= before + 3)
        process.send_signal(2)
        process.communicate(timeout=120)
    finally:
        process.kill()
    log = (path.parent / "runs" / "killed" / "logs" / "rollouter.log").read_text()
    assert "validation engine 0 is taken out" in log
    assert "validation engine 0 joined again" in log
    summary, _ = told(path)
    assert summary["groups"]["discarded"] == {}, "rollout has noticed nothing"
    assert all(entry["metrics"]["n"] == ROWS for entry in summary["validation"])


def owner(process: psutil.Process) -> str:
    """The actor's name, which its environment holds."""
    return process.environ().get(TAG, "")


@pytest.mark.long
def test_on_a_single_device_the_trainer_answers_in_its_turn(project: Project, models: Path) -> None:
    path = project_of(
        project, models, "train", cluster__slots=1, cluster__single_device=True,
        train__max_staleness=0,
    )  # fmt: skip
    finish(start(path, None))
    summary, _ = told(path)
    versions = [entry["step"] for entry in summary["validation"]]
    assert (versions[0], versions[-1]) == (0, 4)
    assert {entry["by"] for entry in summary["validation"]} == {"train"}
    assert summary["staleness"]["max"] == 0
