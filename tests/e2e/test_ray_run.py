"""Whole runs as Ray actors, on a cluster that the user started and on one of Offbeat's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from offbeat.testing.judge_server import JudgeServer
from offbeat.track.metrics import read_metrics

Project = Callable[..., Path]
SLOTS = 8
HOLDER = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
group = ray.util.placement_group([{"offbeat_slot": 1}] * int(sys.argv[2]))
assert group.wait(60)
print("held", flush=True)
time.sleep(600)
"""
pytestmark = pytest.mark.timeout(600)  # two cores may be shared with others


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster with offbeat_slot resources, as a user would start one."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "resources": {"offbeat_slot": SLOTS}, "object_store_memory": 128 << 20}
    started = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    yield started.address
    started.shutdown()


def start(config: Path, address: str | None, *overrides: str) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    env.pop("RAY_ADDRESS", None)
    if address is not None:
        env["RAY_ADDRESS"] = address
    return subprocess.Popen(
        [sys.executable, "-m", "offbeat", "train", str(config), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def finish(process: subprocess.Popen[str], code: int = 0, seconds: float = 240) -> tuple[str, str]:
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == code, f"{out}\n{err}"
    return out, err


def records(config: Path, name: str, kind: str) -> list[dict[str, Any]]:
    path = config.parent / "runs" / name / "metrics.jsonl"
    return [record for record in read_metrics(path) if record["type"] == kind]


@pytest.mark.long  # two at once, shorter, are in test_validate_on_ray.py
def test_two_runs_on_one_cluster_interleave_and_both_finish(cluster: str, project: Project) -> None:
    """Each with a judge, a scorer and a rule on pools of their own, and one judge that is a server
    for both, started at one moment."""
    sources = ("rule", "judge", "scorer")
    with JudgeServer("8") as server:
        more: dict[str, object] = {
            "cluster__backend": "ray", "train__steps": 20, "data__epochs": 8,
            "reward__server__kind": "genrm", "reward__server__base_url": server.base_url,
            "reward__server__cache": False,
        }  # fmt: skip
        paths = [project(sources, name, **more) for name in ("left", "right")]
        both = [start(path, cluster) for path in paths]
        try:
            for process in both:
                finish(process)
        finally:
            for process in both:
                process.kill()
        assert len(server.calls) >= 2 * 40 * 2
    times = {}
    for path in paths:
        summary = json.loads((path.parent / "runs" / path.stem / "summary.json").read_text())
        assert summary["status"] == "finished"
        assert summary["groups"]["trained"] == 40
        assert summary["rewards"]["scorer"]["failed"] == {}
        assert summary["rewards"]["server"]["failed"] == {}
        assert summary["rewards"]["server"]["mean_last"] == pytest.approx(7 / 9)
        times[path.stem] = [step["time"] for step in records(path, path.stem, "step")]
    merged = sorted((t, name) for name, stamps in times.items() for t in stamps)
    switches = sum(a[1] != b[1] for a, b in pairwise(merged))
    assert switches >= 3, merged


def test_missing_slots_are_named_with_the_command_that_adds_them(
    cluster: str, project: Project
) -> None:
    path = project(cluster__backend="ray", rollout__replicas=SLOTS + 1)
    _, err = finish(start(path, cluster), code=2)
    assert "ray start" in err
    assert "offbeat_slot" in err
    assert "Traceback" not in err
    assert not (path.parent / "runs" / "run").exists()


def test_pools_that_others_hold_fail_at_their_deadline(cluster: str, project: Project) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, cluster, str(SLOTS - 1)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        late = project(name="late", cluster__backend="ray", cluster__placement_deadline_seconds=2)
        _, err = finish(start(late, cluster), code=2)
        assert "placement_deadline_seconds" in err
        assert "pool" in err
    finally:
        holder.kill()
        holder.wait(30)


def wait_for(
    process: subprocess.Popen[str], what: str, probe: Callable[[], bool], seconds: float = 150
) -> None:
    deadline = time.time() + seconds
    while not probe():
        assert process.poll() is None, process.communicate()
        assert time.time() < deadline, f"{what} took more than {seconds:g} s"
        time.sleep(0.2)


def kill_one(process: subprocess.Popen[str], actor: str, replicas: int) -> float:
    """Kills the process of one replica; returns when."""
    found = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if actor in " ".join(child.cmdline())
    ]
    assert len(found) == replicas
    found[0].kill()
    return time.time()


def test_own_cluster_on_which_an_engine_and_a_scorer_are_killed(project: Project) -> None:
    """Offbeat starts Ray itself. The engine is replaced, the other scorer takes over until the
    killed one is back; nothing is discarded, and the run goes on until it is told to end."""
    path = project(
        ("rule", "scorer"), cluster__backend="ray", cluster__slots=5, rollout__replicas=2,
        rollout__max_tokens=24, reward__scorer__replicas=2, train__steps=100_000,
        train__checkpoint_every=100_000, data__epochs=10_000,
    )  # fmt: skip
    process = start(path, None)

    def steps(more: int = 0) -> Callable[[], bool]:
        wanted = (len(records(path, "run", "step")) if more else 0) + max(more, 2)
        return lambda: len(records(path, "run", "step")) >= wanted

    try:
        metrics = path.parent / "runs" / "run" / "metrics.jsonl"
        wait_for(process, "starting", metrics.exists)
        wait_for(process, "two steps", steps())
        killed = kill_one(process, "EngineActor", 2)

        def both() -> bool:
            syncs = records(path, "run", "sync")
            fresh = [s for s in syncs if s["start"] > killed and s["acknowledged"]]
            return {s["replica"] for s in fresh} == {0, 1}

        wait_for(process, "replacing the killed engine", both)
        kill_one(process, "ScorerActor", 2)
        wait_for(process, "five steps with one scorer", steps(5))
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        finish(process, 130)
    finally:
        process.kill()
    summary = json.loads((path.parent / "runs" / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    groups = summary["groups"]
    assert groups["trained"] >= 14
    assert groups["discarded"] == {}
    assert groups["admitted"] == groups["trained"] + groups["live"]
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    scorer = summary["rewards"]["scorer"]
    assert scorer["scored"] >= 4 * groups["trained"]
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == [], "no process is left behind"


@pytest.mark.long
def test_a_dead_trainer_that_may_not_start_again_ends_the_run_with_the_steps_done(
    project: Project,
) -> None:
    """What may, is in test_supervision.py."""
    path = project(
        cluster__backend="ray", cluster__max_restarts=0, train__steps=100_000, data__epochs=10_000
    )
    process = start(path, None)
    try:
        metrics = path.parent / "runs" / "run" / "metrics.jsonl"
        wait_for(process, "starting", metrics.exists)
        wait_for(process, "two steps", lambda: len(records(path, "run", "step")) >= 2)
        family = psutil.Process(process.pid).children(recursive=True)
        killed = kill_one(process, "TrainerActor", 1)
        out, err = finish(process, 1, seconds=120)
    finally:
        process.kill()
    assert time.time() - killed < 90
    assert "the trainer's process has ended" in err
    assert "cluster.max_restarts = 0" in err
    assert "steps are done" in err
    assert f"offbeat resume {path.parent / 'runs' / 'run'}" in out
    assert "Traceback" not in err
    summary = json.loads((path.parent / "runs" / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["last_good_step"] >= 1
    assert "trainer" in summary["error"]
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == [], "no process is left behind"
