"""A policy that collects a reward which is not the truth: the run says so, and goes on."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

from tests.e2e.test_ray_run import records

from offbeat.cluster.launch import train
from offbeat.config_file import load_config
from offbeat.testing import tiny

Project = Callable[..., Path]


def test_letters_are_paid_for_and_right_answers_vanish(
    project: Project, models: Path, tmp_path: Path
) -> None:
    """The rule pays for letters; an actor that could reverse words learns to write more of them."""
    tiny.make_tiny_actor(tmp_path / "actor", train_steps=70, longest=3)
    tiny.write_reverse_data(tmp_path / "train.jsonl", 400, 11, longest=3)
    tiny.write_reverse_data(tmp_path / "held_out.jsonl", 128, 12, longest=3)
    rows = [{"question": "q", "answer": "a" * n, "grade": n / 8} for n in (0, 4, 8)]
    (tmp_path / "anchors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = project(
        model__path=str(tmp_path / "actor"), data__train=str(tmp_path / "train.jsonl"),
        data__validation=str(tmp_path / "held_out.jsonl"),
        validate__function=f"{models / 'rewards.py'}:correct", validate__every=8,
        reward__rule__anchors="anchors.jsonl", reward__rule__anchors_every=12,
        rollout__group_size=8, rollout__seats=64, rollout__max_context=32,
        train__groups_per_step=8, train__steps=24, train__learning_rate=5e-4,
    )  # fmt: skip
    console = io.StringIO()
    config = load_config(path, [])
    train(config, console)
    summary = json.loads((config.run_dir / "summary.json").read_text())
    accuracy = [entry["metrics"]["accuracy"] for entry in summary["validation"]]
    assert accuracy[0] > accuracy[-1] + 0.2, accuracy
    (warning,) = summary["health"]["warnings"]
    assert warning["source"] == "rule"
    assert warning["line"].startswith("warning: reward.rule rises while truth falls: ")
    assert warning["line"] in console.getvalue()
    events = [event["message"] for event in records(path, "run", "event")]
    assert warning["line"] in events
    assert summary["health"]["truth"]["rule"] < 0
    last = summary["health"]["last"]["sources"]["rule"]
    assert last["n"] == 10 * 64  # ten steps of 64 samples
    looks = records(path, "run", "anchors")
    assert [look["error"] for look in looks] == [0, 0, 0]
    steps = [look["step"] for look in looks]
    assert (steps[0], steps[-1]) == (0, 24)
    assert 12 <= steps[1] < 24
    assert (summary["status"], summary["steps"]) == ("finished", 24)
