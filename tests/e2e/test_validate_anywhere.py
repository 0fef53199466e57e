"""Validation through rollout's engines, through engines of its own and by the trainer, while
judges, a scorer and a function score: the same rewards, one version each, training untouched."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.cluster.launch import train
from offbeat.config import Config
from offbeat.config_file import load_config
from offbeat.testing.judge_server import JudgeServer, Mix
from offbeat.track.metrics import read_metrics

Project = Callable[..., Path]
pytestmark = pytest.mark.timeout(600)  # two cores may be shared with others
MODES = ("rollout", "dedicated", "train")
SOURCES = ("rule", "judge", "scorer")
ROWS = 8


@pytest.fixture(scope="module")
def held_out(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The held-out prompts, of two data sources."""
    path = tmp_path_factory.mktemp("held-out") / "validation.jsonl"
    rows = [json.loads(line) for line in (models / "validation.jsonl").read_text().splitlines()]
    with path.open("w") as file:
        for i, row in enumerate(rows):
            file.write(json.dumps(row | {"data_source": ("even", "odd")[i % 2]}) + "\n")
    return path


def run(path: Path, *overrides: str) -> tuple[Config, dict[str, Any], str]:
    config = load_config(path, list(overrides))
    stream = io.StringIO()
    assert train(config, stream) == 0
    summary = json.loads((config.run_dir / "summary.json").read_text())
    return config, summary, stream.getvalue()


def settings(models: Path, held_out: Path, on: str, **more: Any) -> dict[str, Any]:
    return {
        "validate__on": on,
        "validate__function": f"{models / 'rewards.py'}:letters",
        "data__validation": str(held_out),
        **more,
    }


def test_three_modes_score_with_all_sources_and_greedy_answers_of_a_version_are_the_same(
    project: Project, models: Path, held_out: Path
) -> None:
    first: dict[str, Any] = {}
    for on in MODES:
        path = project(SOURCES, on, **settings(models, held_out, on, validate__every=2))
        config, summary, console = run(path)
        assert summary["status"] == "finished"
        assert summary["groups"]["trained"] == 8
        validations = summary["validation"]
        steps = [entry["step"] for entry in validations]
        assert (steps[0], steps[-1]) == (0, 4)
        assert steps == sorted(set(steps))
        if on == "train":
            assert set(steps) <= {0, 2, 4}, "between two steps, and only when it is due"
        assert {entry["by"] for entry in validations} == {on}
        for entry in validations:
            metrics = entry["metrics"]
            assert (metrics["n"], metrics["n/even"], metrics["n/odd"]) == (ROWS, 4, 4)
            assert metrics["unscored"] == 0
            halves = (metrics["accuracy/even"], metrics["accuracy/odd"])
            assert metrics["accuracy"] == pytest.approx(sum(halves) / 2)
            assert metrics["reward/rule"] == pytest.approx(metrics["accuracy"])
            assert metrics["failed/rule"] == metrics["failed/scorer"] == 0
            assert math.isfinite(metrics["reward/scorer"])
            assert 0 <= metrics["failed/judge"] <= ROWS
        for name in SOURCES:  # what validation scored is not among what training scored
            outcome = summary["rewards"][name]
            seen = outcome["scored"] + outcome["abstained"] + sum(outcome["failed"].values())
            assert seen == 4 * config.samples_per_step
        assert f"version {steps[-1]}" in console
        first[on] = validations[0]["metrics"]
        roles = {s["role"] for s in read_metrics(config.run_dir / "metrics.jsonl") if "role" in s}
        assert ("validate" in roles) == (on == "dedicated")
    assert first["rollout"] == pytest.approx(first["train"], nan_ok=True)
    assert first["rollout"] == pytest.approx(first["dedicated"], nan_ok=True)


@pytest.mark.parametrize("on", MODES)
def test_several_samples_give_pass_at_k(
    project: Project, models: Path, held_out: Path, on: str
) -> None:
    more = settings(models, held_out, on, validate__samples=4, validate__temperature=1.0)
    if on == "dedicated":  # two engines, which fetch the version by the other transport
        more |= {"weights__transport": "broadcast", "validate__replicas": 2, "cluster__slots": 5}
    _, summary, _ = run(project(("rule", "scorer"), **more, train__steps=1))
    for entry in summary["validation"]:
        metrics = entry["metrics"]
        passes = [metrics[f"pass@{k}"] for k in (1, 2, 4)]
        assert passes == sorted(passes)
        assert 0 <= passes[0] <= passes[-1] <= 1
        assert metrics["n"] == ROWS
        assert math.isfinite(metrics["reward"])


def test_training_is_bit_identical_with_and_without_the_trainers_answers(
    project: Project, models: Path, held_out: Path
) -> None:
    """One group at a time, synchronous: what rollout draws depends on no timing."""
    common = {"train__max_staleness": 0, "train__groups_per_step": 1, "train__learning_rate": 1e-3}
    on = settings(models, held_out, "train", validate__every=1, **common)
    paths = [project(name="without", **common), project(name="with", **on)]
    weights = []
    for path in paths:
        config, summary, _ = run(path)
        weights.append(
            AutoModelForCausalLM.from_pretrained(
                config.run_dir / "checkpoints" / "step-000004"
            ).state_dict()
        )
    versions = [entry["step"] for entry in summary["validation"]]
    assert (versions[0], versions[-1]) == (0, 4)
    assert len(versions) > 2, "also between the steps"
    before = AutoModelForCausalLM.from_pretrained(models / "actor").state_dict()
    assert any(not torch.equal(before[name], weights[0][name]) for name in before)
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_two_judges_a_scorer_and_a_function_and_failures_in_no_mean(
    project: Project, models: Path, held_out: Path
) -> None:
    """By the trainer; the second judge is a server whose verdicts are garbage half of the time."""
    with JudgeServer(reply="8", mix=Mix(seed=1, garbage=0.5)) as server:
        path = project(
            SOURCES,
            **settings(models, held_out, "train", validate__every=2),
            reward__server__kind="genrm",
            reward__server__base_url=server.base_url,
            reward__server__model="judge",
            reward__server__template=str(models / "judge.jinja"),
            reward__server__retries=0,
            reward__server__on_failure="abstain",
            reward__server__max_failed_share=1.0,
        )
        config, summary, _ = run(path)
    assert summary["status"] == "finished"
    rewards = summary["validation"]
    versions = [entry["step"] for entry in rewards]
    assert (versions[0], versions[-1]) == (0, 4)
    failed = [entry["metrics"]["failed/server"] for entry in rewards]
    assert 0 < sum(failed) < len(rewards) * ROWS
    for entry in rewards:
        metrics = entry["metrics"]
        for name in ("rule", "scorer"):
            assert math.isfinite(metrics[f"reward/{name}"])
            assert metrics[f"failed/{name}"] == 0
        if metrics["failed/server"] < ROWS:
            assert metrics["reward/server"] == pytest.approx(7 / 9), (
                "8 of 1 to 10, and nothing else"
            )
    rows = [
        row
        for file in sorted((config.run_dir / "transcripts").glob("*.parquet"))
        for row in pq.read_table(file).to_pylist()
        if row["scope"] == "validation" and row["source"] == "server"
    ]
    assert {row["attempt"] for row in rows} == set(versions), "of the versions that were validated"
    assert sum(row["cause"] is not None for row in rows) == sum(failed)
