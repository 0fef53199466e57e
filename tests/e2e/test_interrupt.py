"""Ctrl-C and SIGTERM, sent to a real process: exit code, summary, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from offbeat.cluster.launch import train
from offbeat.config_file import load_config

Project = Callable[..., Path]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_summary(
    project: Project, tmp_path: Path, sent: signal.Signals
) -> None:
    weights = tmp_path / "weights"
    path = project(train__steps=10_000, data__epochs=10_000, weights__folder=str(weights))
    run_dir = load_config(path, []).run_dir
    process = subprocess.Popen(
        [sys.executable, "-m", "offbeat", "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "offbeat: interrupted\n")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("interrupted", "stopped by the user")
    assert summary["steps"] >= 1
    assert list(weights.iterdir()) == []


def test_sigterm_while_the_roles_start_leaves_a_summary_too(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project(train__steps=2)
    config = load_config(path, [])

    def slow_start(*_: object) -> MagicMock:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        return MagicMock()

    monkeypatch.setattr("offbeat.cluster.local.make_trainer", slow_start)
    with pytest.raises(KeyboardInterrupt):
        train(config, None)
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("interrupted", 0)


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
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "no trainer today")
