"""Whole runs in one process, on real models, without Ray."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.reference_grpo import Settings
from tests.reference_grpo import train as reference_train
from transformers import AutoModelForCausalLM

from offbeat.cluster.launch import train
from offbeat.cluster.local import local_roles
from offbeat.cluster.specs import RunSpec
from offbeat.config import Config
from offbeat.config_file import load_config
from offbeat.errors import RunFailed, UserError
from offbeat.loop import AsyncLoop, TrainerRole
from offbeat.records import Batch, Manifest, PolicyVersion, Span
from offbeat.store import read_counts
from offbeat.track.metrics import read_metrics
from offbeat.track.recorder import Recorder

Project = Callable[..., Path]


def run(path: Path, *overrides: str) -> tuple[Config, dict[str, Any], str]:
    config = load_config(path, list(overrides))
    stream = io.StringIO()
    assert train(config, stream) == 0
    summary = json.loads((config.run_dir / "summary.json").read_text())
    return config, summary, stream.getvalue()


def test_three_kinds_of_reward_train_one_model(project: Project, models: Path) -> None:
    path = project(
        ("rule", "judge", "scorer"),
        validate__function=f"{models / 'rewards.py'}:correct",
        validate__every=2,
        data__validation=str(models / "validation.jsonl"),
    )
    config, summary, console = run(path)
    assert summary["status"] == "finished"
    assert summary["steps"] == 4
    groups = summary["groups"]
    discarded = sum(groups["discarded"].values())
    assert groups["admitted"] == groups["trained"] + discarded + groups["live"]
    assert groups["trained"] == 8
    assert summary["staleness"]["max"] <= config.train.max_staleness
    versions = [entry["step"] for entry in summary["validation"]]
    assert (versions[0], versions[-1]) == (0, 4)
    assert versions == sorted(set(versions)), "what is due during another one is not made up for"
    for name in ("rule", "judge", "scorer"):
        outcome = summary["rewards"][name]
        total = outcome["scored"] + outcome["abstained"] + sum(outcome["failed"].values())
        assert total == 4 * config.samples_per_step
    assert summary["rewards"]["scorer"]["scored"] == 4 * config.samples_per_step
    assert {"rollout", "train", "reward/judge", "reward/scorer"} <= set(summary["busy"])
    assert "step 4/4" in console
    assert read_counts(config.run_dir / "ledger.sqlite")["trained"] == 8
    first, last = sorted((config.run_dir / "checkpoints").iterdir())
    weights = [AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (first, last)]
    assert any(not torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    assert len(list((config.run_dir / "samples").glob("step-*.parquet"))) == 4


def test_last_batch_may_be_smaller(project: Project) -> None:
    _, summary, _ = run(project(train__steps=9, train__groups_per_step=3, data__limit=7))
    assert summary["steps"] == 3
    assert summary["groups"]["trained"] == 7


def test_without_signal_for_long_the_run_ends_non_zero_and_names_the_setting(
    project: Project, tmp_path: Path
) -> None:
    body = "def flat(prompts, completions):\n    return [1.0] * len(completions)\n"
    (tmp_path / "flat.py").write_text(body)
    path = project(
        ("flat",), reward__flat__kind="function", reward__flat__function="flat.py:flat",
        train__max_no_signal_steps=3, train__steps=20,
    )  # fmt: skip
    config = load_config(path, [])
    with pytest.raises(RunFailed, match="max_no_signal_steps"):
        train(config, None)
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "max_no_signal_steps" in summary["error"]


def test_run_name_that_exists_is_refused(project: Project) -> None:
    path = project(train__steps=1)
    run(path)
    with pytest.raises(UserError, match="--run"):
        train(load_config(path, []), None)


@dataclass
class RecordingTrainer:
    """Writes down what the trainer is given, for the oracle."""

    inner: TrainerRole
    steps: list[Any] = field(default_factory=list)

    async def step(self, batch: Batch) -> Any:
        groups = []
        for group in batch.groups:
            samples = [
                (
                    s.completion.ref.token_ids.tolist(),
                    s.completion.ref.logprobs.tolist(),
                    s.total,
                )
                for s in group.samples
            ]
            groups.append((group.prompt.token_ids.tolist(), samples))
        self.steps.append(groups)
        return await self.inner.step(batch)

    async def publish(self) -> Manifest:
        return await self.inner.publish()

    async def save(self, path: Path, extra: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        await self.inner.save(path, extra, files)

    async def ping(self) -> None:
        await self.inner.ping()

    async def restart(self, lineage: int, checkpoint: Path | None) -> PolicyVersion:
        return await self.inner.restart(lineage, checkpoint)

    async def drain_spans(self) -> list[Span]:
        return await self.inner.drain_spans()


async def _recorded(config: Config, folder: Path) -> RecordingTrainer:
    config.run_dir.mkdir(parents=True)
    spec = RunSpec("oracle", "cpu", folder)
    async with local_roles(config, spec) as roles:
        recorder = Recorder(
            config.run_dir, bound=0, total_steps=roles.total_steps, stream=None, replicas={},
            started=time.time(),
        )  # fmt: skip
        trainer = RecordingTrainer(roles.trainer)
        await AsyncLoop(config, roles.rollouter, trainer, recorder, roles.total_steps).run()
        recorder.close("finished")
        return trainer


def test_max_staleness_zero_equals_the_synchronous_reference_bit_for_bit(
    project: Project, models: Path, tmp_path: Path
) -> None:
    path = project(
        train__max_staleness=0, train__prefix_sharing=False, train__steps=5,
        train__tokens_per_micro_batch=64, train__learning_rate=1e-3,
    )  # fmt: skip
    config = load_config(path, [])
    recorded = asyncio.run(_recorded(config, tmp_path))
    assert len(recorded.steps) == 5
    torch.set_num_threads(1)
    settings = Settings(
        learning_rate=1e-3, warmup_steps=config.train.warmup_steps, tokens_per_micro_batch=64
    )
    expected = reference_train(str(models / "actor"), recorded.steps, settings)
    last = config.run_dir / "checkpoints" / "step-000005"
    actual = AutoModelForCausalLM.from_pretrained(last).state_dict()
    before = AutoModelForCausalLM.from_pretrained(models / "actor").state_dict()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name
    assert any(not torch.equal(actual[name], before[name]) for name in actual)


def test_synchronous_training_shows_no_overlap(project: Project) -> None:
    config, summary, _ = run(project(train__max_staleness=0, train__steps=6))
    assert summary["staleness"] == {"max": 0, "mean": 0.0, "bound": 0}
    assert summary["overlap"]["train_and_rollout"] == 0.0
    assert summary["overlap"]["open_decode_or_score"] == 0.0
    spans = [r for r in read_metrics(config.run_dir / "metrics.jsonl") if r["type"] == "span"]
    assert {"train", "rollout"} <= {span["role"] for span in spans}


def test_steps_record_the_mismatch_of_engine_and_trainer(project: Project) -> None:
    config, _, _ = run(project(train__max_staleness=0, train__steps=2))
    steps = [r for r in read_metrics(config.run_dir / "metrics.jsonl") if r["type"] == "step"]
    assert all(np.isfinite(step["logprob_diff_mean"]) for step in steps)
    assert max(step["logprob_diff_mean"] for step in steps) < 1e-4
    assert all(abs(step["ratio_mean"] - 1) < 1e-4 for step in steps)
    assert all(step["loop_lag_ms"] >= 0 for step in steps)
