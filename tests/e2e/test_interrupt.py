"""Ctrl-C and SIGTERM, sent to real processes: exit code, checkpoint, summary, and what then goes on
from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from tests.e2e.starts import SECONDS, Started, rows, summary_of
from tests.e2e.test_resume import check_books, check_samples

from offbeat.cli_resume import plan_resume
from offbeat.cluster.launch import train
from offbeat.cluster.specs import GoOn
from offbeat.config_file import load_config
from offbeat.testing.faults import Fault
from offbeat.train.checkpoint import newest_valid, version_of

Project = Callable[..., Path]


def run_dir_of(path: Path) -> Path:
    return load_config(path, []).run_dir


def saved(run_dir: Path) -> int:
    found = newest_valid(run_dir / "checkpoints")
    return -1 if found is None else version_of(found)


def trained(run_dir: Path) -> int:
    """Steps that the ledger has as done."""
    return len({row.step for row in rows(run_dir) if row.state == "trained"})


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_drains_to_a_checkpoint_and_says_how_to_go_on(
    project: Project, tmp_path: Path, sent: signal.Signals
) -> None:
    weights = tmp_path / "weights"
    path = project(train__steps=10_000, data__epochs=10_000, weights__folder=str(weights))
    run_dir = run_dir_of(path)
    run = Started(["train", path], tmp_path)
    run.says(" 3/10000")
    run.send(sent)
    assert run.ends() == 130
    assert f"go on with: offbeat resume {run_dir}\n" in run.text
    assert run.text.endswith("offbeat: interrupted\n")
    assert "Traceback" not in run.text
    summary = summary_of(run_dir)
    assert (summary["status"], summary["error"]) == ("interrupted", "stopped by the user")
    assert saved(run_dir) == summary["steps"] == trained(run_dir) >= 3, "no step is lost"
    assert list(weights.iterdir()) == []


def test_sigterm_in_a_long_step_ends_when_the_step_has_ended_and_goes_on(
    project: Project, tmp_path: Path
) -> None:
    path = project(train__steps=6)
    run_dir = run_dir_of(path)
    slow = Fault("trainer.before_update", "delay", nth=3, seconds=3.0)
    run = Started(["train", path], tmp_path, slow)
    run.fires()
    run.send(signal.SIGTERM)
    run.says("ending: the step that runs is finished and saved")
    assert run.ends() == 130, run.text
    assert saved(run_dir) == trained(run_dir) == 3
    again = Started(["resume", run_dir], tmp_path)
    assert again.ends() == 0, again.text
    assert "goes on from step-000003" in again.text
    check_books(run_dir, 6, 2)
    check_samples(run_dir, 2)


def test_a_second_signal_ends_at_once_and_the_run_can_go_on(
    project: Project, tmp_path: Path
) -> None:
    path = project(train__steps=6, train__checkpoint_every=2)
    run_dir = run_dir_of(path)
    run = Started(["train", path], tmp_path, Fault("trainer.before_step", "hang", nth=4))
    run.fires()
    run.send(signal.SIGTERM)
    run.says("ending: the step that runs is finished and saved")
    assert run.process.is_alive()
    run.send(signal.SIGTERM)
    assert run.ends() == 130, run.text
    assert f"go on with: offbeat resume {run_dir}" in run.text
    assert summary_of(run_dir)["status"] == "interrupted"
    again = Started(["resume", run_dir], tmp_path)
    assert again.ends() == 0, again.text
    check_books(run_dir, 6, 2)
    check_samples(run_dir, 2)


def test_what_does_not_end_within_the_grace_time_is_ended(project: Project, tmp_path: Path) -> None:
    path = project(train__steps=6, cluster__grace_seconds=0.5)
    run_dir = run_dir_of(path)
    run = Started(["train", path], tmp_path, Fault("ledger.trained", "hang", nth=2))
    run.fires()
    run.send(signal.SIGINT)
    assert run.ends() == 130, run.text
    assert plan_resume(run_dir).go_on is not None


def test_a_signal_during_the_redo_after_a_resume_loses_nothing(
    project: Project, tmp_path: Path
) -> None:
    path = project(train__steps=9, train__checkpoint_every=20)
    run_dir = run_dir_of(path)
    first = Started(["train", path], tmp_path, Fault("trainer.before_step", "kill", nth=6))
    assert first.ends() == -9
    second = Started(
        ["resume", run_dir], tmp_path, Fault("trainer.before_step", "delay", nth=3, seconds=2.0)
    )
    second.fires()
    second.send(signal.SIGTERM)
    assert second.ends() == 130, second.text
    assert saved(run_dir) == 3, "the redone steps are saved, too"
    third = Started(["resume", run_dir], tmp_path)
    assert third.ends() == 0, third.text
    check_books(run_dir, 9, 2)
    check_samples(run_dir, 2)


def test_sigterm_while_the_roles_start_leaves_a_summary_too(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project(train__steps=2)
    config = load_config(path, [])

    def slow_start(*_: object) -> MagicMock:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        return MagicMock()

    with monkeypatch.context() as patched:
        patched.setattr("offbeat.cluster.local.make_trainer", slow_start)
        with pytest.raises(KeyboardInterrupt):
            train(config, None)
    assert (summary_of(config.run_dir)["status"], summary_of(config.run_dir)["steps"]) == (
        "interrupted",
        0,
    )
    plan = plan_resume(config.run_dir)
    assert plan.go_on in (None, GoOn(0, None)), "the ledger may have come to be"
    from offbeat.cluster.launch import resume

    assert resume(plan.config, plan.go_on, None) == 0
    check_books(config.run_dir, 2, 2)


def test_a_failure_while_the_roles_start_is_in_the_summary(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project(train__steps=2)
    config = load_config(path, [])

    def broken(*_: object) -> None:
        raise RuntimeError("no trainer today")

    monkeypatch.setattr("offbeat.cluster.local.make_trainer", broken)
    with pytest.raises(RuntimeError):
        train(config, None)
    summary = summary_of(config.run_dir)
    assert (summary["status"], summary["error"]) == ("failed", "no trainer today")


def test_roles_that_do_not_start_in_time_are_told(project: Project, tmp_path: Path) -> None:
    path = project(train__steps=2, cluster__start_deadline_seconds=4)
    slow = Fault("trainer.setup", "delay", seconds=8.0)
    first = Started(["train", path], tmp_path, slow)
    assert first.ends() == 1, first.text
    assert "cluster.start_deadline_seconds = 4" in first.text
    assert "Traceback" not in first.text


@pytest.mark.long
def test_ctrl_c_on_ray_drains_to_a_checkpoint_and_goes_on(project: Project, tmp_path: Path) -> None:
    """A terminal sends it to the driver's whole group: Ray's own processes must not die of it."""
    path = project(
        train__steps=10_000,
        data__epochs=10_000,
        cluster__backend="ray",
        train__checkpoint_every=500,
    )
    run_dir = run_dir_of(path)
    said = tmp_path / "ray.log"
    env = os.environ | {"RAY_AUTH_MODE": "disabled"}
    env.pop("RAY_ADDRESS", None)
    with said.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "offbeat", "train", str(path)],
            stdout=out,
            stderr=out,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            end = time.monotonic() + SECONDS
            while " 2/10000" not in said.read_text():
                assert process.poll() is None, said.read_text()
                assert time.monotonic() < end, said.read_text()
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(SECONDS) == 130, said.read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)
    assert f"go on with: offbeat resume {run_dir}" in said.read_text()
    summary = summary_of(run_dir)
    assert summary["status"] == "interrupted"
    assert saved(run_dir) == summary["steps"] == trained(run_dir) >= 2
    again = Started(
        ["resume", run_dir, "--cluster.backend", "local", "--train.steps", summary["steps"] + 4],
        tmp_path,
    )
    assert again.ends() == 0, again.text
    check_books(run_dir, summary["steps"] + 4, 2)
