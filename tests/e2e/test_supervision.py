"""Processes of a run on Ray die and hang, one after another and together; the run loses nothing.

Rewards are random in their last digits, so that whatever is judged again shows; with
`train.keep_batches` the ledger keeps all that was trained, and a replay of it gives the weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.promises import check_promises, equal_to_replay

from offbeat.ledger import LEFT_OVER
from offbeat.store import Recorded, read_payloads, read_rows
from offbeat.track.metrics import read_metrics

Project = Callable[..., Path]
pytestmark = pytest.mark.timeout(1800)  # two cores may be shared with others

REWARDS = """
import random


def noisy(prompts, completions, **columns):
    return [sum(ch.isalpha() for ch in c) + 1e-3 * random.random() for c in completions]
"""


class Run:
    """One run of the command line, what it says, and what it has left on disk so far."""

    def __init__(self, process: subprocess.Popen[bytes], said: Path, directory: Path) -> None:
        self.process, self.said, self.directory = process, said, directory

    def records(self, kind: str) -> list[dict[str, Any]]:
        path = self.directory / "metrics.jsonl"
        found = read_metrics(path) if path.exists() else []
        return [record for record in found if record["type"] == kind]

    def steps(self) -> int:
        return max((record["step"] + 1 for record in self.records("step")), default=0)

    def wait(self, what: str, probe: Callable[[], bool], seconds: float = 600) -> None:
        deadline = time.time() + seconds
        while not probe():
            assert self.process.poll() is None, f"{what}: {self.log()}"
            assert time.time() < deadline, f"{what} took more than {seconds:g} s: {self.log()}"
            time.sleep(0.2)

    def train_on(self, more: int = 3) -> None:
        """Waits until so many further steps have been trained."""
        wanted = self.steps() + more
        self.wait(f"step {wanted}", lambda: self.steps() >= wanted)

    def send(self, number: signal.Signals, *names: str) -> list[psutil.Process]:
        """Sends a signal to the one process of each name (to one of several)."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        found = [next(p for p in family if name in command(p)) for name in names]
        for process in found:
            process.send_signal(number)
        return found

    def kill_all(self) -> None:
        """Driver, Ray and all actors, at one moment."""
        top = psutil.Process(self.process.pid)
        family = [top, *top.children(recursive=True)]
        for one in family:  # nobody notices a death and acts on it
            with contextlib.suppress(psutil.NoSuchProcess):
                one.suspend()
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait(timeout=60)

    def finish(self, code: int = 0, seconds: float = 600) -> str:
        family = psutil.Process(self.process.pid).children(recursive=True)
        assert self.process.wait(timeout=seconds) == code, self.log()
        said = self.said.read_text()
        assert "Traceback" not in said
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == [], "no process is left behind"
        return said

    def log(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text()[-2000:]}"
            for path in [self.said, *sorted((self.directory / "logs").glob("*.log"))]
        )


def command(process: psutil.Process) -> str:
    """Its command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class Memory:
    """What was durable at some moment: none of it is made again."""

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger
        self.seen: dict[int, tuple[int, Recorded]] = {}

    def note(self) -> None:
        rows = [r for r in read_rows(self.ledger) if r.state in ("ready", "batched", "trained")]
        kept = read_payloads(self.ledger, [row.ordinal for row in rows])
        self.seen |= {row.ordinal: (row.attempt, kept[row.ordinal]) for row in rows}

    def check(self) -> None:
        rows = {row.ordinal: row for row in read_rows(self.ledger)}
        kept = read_payloads(self.ledger, self.seen)
        for ordinal, (attempt, payload) in self.seen.items():
            assert rows[ordinal].attempt == attempt, f"{rows[ordinal]} had attempt {attempt}"
            if rows[ordinal].state != "discarded":
                assert kept[ordinal] == payload, f"group {ordinal} was generated or judged again"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(directory: Path, *arguments: str) -> Run:
        env = os.environ | {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
        env.pop("RAY_ADDRESS", None)
        said = tmp_path / f"said-{len(started)}.txt"
        with said.open("wb") as output:
            command = [sys.executable, "-m", "offbeat", *arguments]
            process = subprocess.Popen(command, stdout=output, stderr=output, env=env)
        started.append(process)
        return Run(process, said, directory)

    yield start
    for process in started:
        process.kill()


def prepared(project: Project, **changes: object) -> tuple[Path, Path]:
    """A configuration and its run's directory."""
    more: dict[str, object] = {
        "cluster__backend": "ray", "cluster__heartbeat_seconds": 10, "train__keep_batches": True,
        "train__steps": 100_000, "train__checkpoint_every": 5, "data__epochs": 10_000,
        "rollout__max_tokens": 24, "weights__deadline_seconds": 20,
    }  # fmt: skip
    path = project(**more | changes)
    (path.parent / "rewards.py").write_text(REWARDS)
    text = path.read_text()
    old = next(line for line in text.splitlines() if line.startswith("function = "))
    path.write_text(text.replace(old, 'function = "rewards.py:noisy"'))
    return path, path.parent / "runs" / "run"


def lineage(run: Run) -> int:
    return max((sync["lineage"] for sync in run.records("sync")), default=0)


@pytest.mark.faults  # six minutes on two cores
def test_every_process_of_a_run_dies_and_nothing_is_lost(
    project: Project, launch: Callable[..., Run]
) -> None:
    """Trainer, rollouter, both, an engine that hangs past its deadline and wakes up, a function's
    worker, a trainer that hangs; then all at once, after which `offbeat resume` finishes."""
    path, directory = prepared(project, cluster__max_restarts=12, rollout__replicas=2)
    memory = Memory(directory / "ledger.sqlite")
    run = launch(directory, "train", str(path))
    run.wait("six steps", lambda: run.steps() >= 6)

    memory.note()
    run.send(signal.SIGKILL, "TrainerActor")
    run.train_on()
    first = lineage(run)
    assert first >= 1, "a trainer that begins again opens a lineage"

    memory.note()
    run.send(signal.SIGKILL, "RollouterActor")
    run.train_on()

    memory.note()
    run.send(signal.SIGKILL, "RollouterActor", "TrainerActor")
    run.train_on()
    second = lineage(run)
    assert second > first

    (engine,) = run.send(signal.SIGSTOP, "EngineActor")
    stopped = time.time()

    def both() -> bool:
        fresh = [s for s in run.records("sync") if s["start"] > stopped and s["acknowledged"]]
        return {s["replica"] for s in fresh} == {0, 1}

    run.wait("the replacement of the hung engine", both)
    with contextlib.suppress(psutil.NoSuchProcess):  # what it says now is too late
        engine.resume()
    run.send(signal.SIGKILL, "function_worker")
    run.train_on()

    memory.note()
    run.send(signal.SIGSTOP, "TrainerActor")
    run.train_on()
    assert lineage(run) > second

    memory.note()
    run.kill_all()
    run = launch(directory, "resume", str(directory), "--train.steps", str(run.steps() + 6))
    run.finish()
    check_promises(directory)
    memory.check()
    assert equal_to_replay(directory) >= 2
    summary = json.loads((directory / "summary.json").read_text())
    assert set(summary["groups"]["discarded"]) <= {LEFT_OVER}


def test_w3_a_dead_rollouter_begins_again_until_its_budget_is_used_up_then_resume_goes_on(
    project: Project, launch: Callable[..., Run]
) -> None:
    """One that hangs is replaced within its deadline; the next death ends the run."""
    path, directory = prepared(project, cluster__max_restarts=1, cluster__heartbeat_seconds=30)
    memory = Memory(directory / "ledger.sqlite")
    run = launch(directory, "train", str(path))
    run.wait("three steps", lambda: run.steps() >= 3)
    memory.note()
    run.send(signal.SIGSTOP, "RollouterActor")
    run.train_on()
    memory.note()
    run.send(signal.SIGKILL, "RollouterActor")
    said = run.finish(1)
    assert "cluster.max_restarts" in said
    assert "steps are done" in said
    assert f"offbeat resume {directory}" in said
    check_promises(directory, finished=False)
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "rollouter" in summary["error"]
    steps = run.steps() + 2
    run = launch(directory, "resume", str(directory), "--train.steps", str(steps))
    run.finish()
    check_promises(directory)
    memory.check()
    assert equal_to_replay(directory) >= 1
