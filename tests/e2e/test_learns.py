"""A small real model, pretrained on its task, gets better at it: by true accuracy, held out."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from offbeat.cluster.launch import train
from offbeat.config_file import load_config
from offbeat.testing import tiny

Project = Callable[..., Path]

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from offbeat.cli import main
sys.exit(main(["train", sys.argv[1]]))
"""


def test_asynchronous_grpo_raises_true_accuracy(
    project: Project, models: Path, tmp_path: Path
) -> None:
    tiny.make_tiny_actor(tmp_path / "actor", train_steps=70, longest=3)
    tiny.write_reverse_data(tmp_path / "train.jsonl", 2000, 11, longest=3)
    tiny.write_reverse_data(tmp_path / "held_out.jsonl", 128, 12, longest=3)
    correct = f"{models / 'rewards.py'}:correct"
    path = project(
        ("exact",), reward__exact__kind="function", reward__exact__function=correct,
        model__path=str(tmp_path / "actor"), data__train=str(tmp_path / "train.jsonl"),
        data__validation=str(tmp_path / "held_out.jsonl"), validate__function=correct,
        rollout__group_size=8, rollout__seats=64, rollout__max_context=32,
        train__groups_per_step=16, train__steps=100, train__learning_rate=3e-4,
    )  # fmt: skip
    config = load_config(path, [])
    train(config, io.StringIO())
    summary = json.loads((config.run_dir / "summary.json").read_text())
    before, after = (entry["metrics"]["accuracy"] for entry in summary["validation"])
    assert after - before >= 0.12, (before, after)
    assert summary["rewards"]["exact"]["mean_last"] > summary["rewards"]["exact"]["mean_first"]
    assert 0 < summary["staleness"]["max"] <= 2


def test_everything_runs_without_ray(project: Project) -> None:
    path = project(("rule", "scorer"), train__steps=2)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((path.parent / "runs" / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
