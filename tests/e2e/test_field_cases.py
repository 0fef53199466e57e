"""Cases from the field through whole runs: the table is docs/cases.md."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from offbeat.cli import main
from offbeat.cluster.launch import train
from offbeat.config import Config, RewardSourceSection, TrainSection
from offbeat.config_file import load_config
from offbeat.records import Batch, Completion, Group, Payload, Prompt, Sample, ScoreItem
from offbeat.reward.build import build_source
from offbeat.reward.loop import RewardLoop
from offbeat.rollout.policy_model import PolicyModel
from offbeat.testing.judge_server import JudgeServer
from offbeat.track.metrics import read_metrics
from offbeat.train.step import gather

Project = Callable[..., Path]


def run(path: Path, *overrides: str) -> tuple[Config, dict[str, Any]]:
    config = load_config(path, list(overrides))
    assert train(config, None) == 0
    return config, json.loads((config.run_dir / "summary.json").read_text())


def steps_of(config: Config) -> list[dict[str, Any]]:
    return [r for r in read_metrics(config.run_dir / "metrics.jsonl") if r["type"] == "step"]


def samples_of(config: Config) -> list[dict[str, Any]]:
    files = sorted((config.run_dir / "samples").glob("step-*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def function(folder: Path, name: str, body: str) -> dict[str, object]:
    """Settings of a rule whose value for a completion `c` is the expression `body`."""
    text = f"def {name}(prompts, completions):\n    return [{body} for c in completions]\n"
    (folder / f"{name}.py").write_text(text)
    return {
        f"reward__{name}__kind": "function",
        f"reward__{name}__function": f"{name}.py:{name}",
    }


@pytest.mark.parametrize("policy", ["skip", "train"])
def test_g2_g4_a_data_set_without_signal_never_ends_well(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    """Also where the data ends long before train.max_no_signal_steps."""
    rule = function(tmp_path, "flat", "1.0")
    path = project((), train__on_no_signal=policy, data__limit=6, train__steps=9, **rule)
    assert main(["train", str(path)]) == 1
    said = capsys.readouterr().err
    for word in ("all 6 groups", "no_signal", f'train.on_no_signal = "{policy}"', "3 steps"):
        assert word in said
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    groups = summary["groups"]
    assert (groups["trained"], groups["no_signal"], groups["discarded"]) == (6, 6, {})
    steps = steps_of(load_config(path))
    assert [step["no_signal"] for step in steps] == [2, 2, 2]
    computed = [isinstance(step["ratio_mean"], float) for step in steps]
    assert computed == [policy == "train"] * 3


def test_g3_a_nan_among_four_rewards_of_a_function(tmp_path: Path) -> None:
    """From the user's function to the advantages: 0.2, NaN, 0.8, 0.5."""
    values = '{"a": 0.2, "b": float("nan"), "c": 0.8, "d": 0.5}'
    function(tmp_path, "four", f"{values}[c]")
    section = RewardSourceSection.model_validate(
        {"kind": "function", "function": "four.py:four", "retries": 0}
    )
    prompt = Prompt(0, np.array([1], np.int32), "p", "p")

    async def score() -> Any:
        loop = await RewardLoop.create(
            {"r": build_source("r", section, base=tmp_path)}, {"r": section}
        )
        try:
            return await asyncio.gather(*(loop.score(ScoreItem(prompt, c)) for c in "abcd"))
        finally:
            await loop.stop()

    scored = asyncio.run(asyncio.wait_for(score(), 60))
    assert scored[1].rewards["r"].cause == "non_finite"
    one = np.zeros(1, np.int32)
    payloads = [Payload(one + i, np.zeros(1, np.float32), one) for i in range(4)]
    samples = tuple(
        Sample(Completion("0.0", i, c, 1, 0, 0, "stop", None), s.rewards, s.total)
        for i, (c, s) in enumerate(zip("abcd", scored, strict=True))
    )
    batch = Batch(0, (Group(prompt, 0, 0, samples),))
    settings = TrainSection.model_validate({"on_no_signal": "train"})
    found = gather(batch, [payloads], settings)
    assert [int(t.completion[0]) for t in found.trajectories] == [0, 2, 3]
    assert found.advantages == pytest.approx([-0.3 / 0.3001, 0.3 / 0.3001, 0.0], abs=1e-6)
    assert found.rewards == (0.2, 0.8, 0.5)


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_t4_the_ratio_is_one_at_any_temperature_whatever_generation_config_says(
    project: Project, models: Path, tmp_path: Path, temperature: float
) -> None:
    """Defaults that other tools pick up in silence: a model directory that asks for truncation."""
    shutil.copytree(models / "actor", tmp_path / "actor")
    defaults = {"do_sample": True, "temperature": 0.2, "top_k": 3, "top_p": 0.5}
    (tmp_path / "actor" / "generation_config.json").write_text(
        json.dumps(defaults | {"repetition_penalty": 1.8})
    )
    path = project(
        model__path=str(tmp_path / "actor"), rollout__temperature=temperature,
        train__max_staleness=0, train__steps=3, train__learning_rate=1e-2,
    )  # fmt: skip
    config, _ = run(path)
    for step in steps_of(config):
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert step["logprob_diff_p99"] < 1e-3
        assert step["clip_fraction"] == 0.0


def test_t6_empty_and_blank_answers_are_samples_that_rewards_see(
    project: Project, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that answers with eos at once, or with one space."""
    tokenizer = AutoTokenizer.from_pretrained(models / "actor")
    kept = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(" ")]
    draw = PolicyModel.draw

    def only(self: PolicyModel, logits: torch.Tensor, *rest: Any) -> Any:
        masked = torch.full_like(logits, -math.inf)
        masked[:, kept] = 0.0
        return draw(self, masked, *rest)

    monkeypatch.setattr(PolicyModel, "draw", only)
    rule = function(tmp_path, "seen", "10.0 * (c == '') + len(c) * c.isspace()")
    config, summary = run(project((), train__steps=3, **rule))
    samples = samples_of(config)
    assert {s["completion"] for s in samples} >= {"", " "}
    for s in samples:
        blanks = len(s["completion"])
        assert s["completion"] == " " * blanks
        assert s["total"] == (blanks or 10.0)
        assert s["tokens"] == blanks + (s["finish_reason"] == "stop")
    assert summary["groups"]["discarded"] == {}


def test_t7_a_prompt_that_is_too_long_is_refused_or_skipped_by_its_line(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "long.jsonl"
    prompts = ["abc>", "x" * 57, "y" * 56, "dcb>"]
    data.write_text("".join(json.dumps({"prompt": p, "reference": ""}) + "\n" for p in prompts))
    path = project(data__train=str(data), train__steps=9)
    assert main(["train", str(path)]) == 2
    assert "long.jsonl line 2 has a prompt of 57 tokens" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main(["train", str(path), "--data.on_overlong", "skip"]) == 0
    assert "train: 1 prompts are too long and skipped, in line 2" in capsys.readouterr().err
    trained = {s["prompt"] for s in samples_of(load_config(path))}
    assert trained == {"abc>", "y" * 56, "dcb>"}


def test_j7_a_judge_that_dies_in_the_middle_ends_the_run_by_name(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with JudgeServer("8") as server:
        judge: dict[str, object] = {
            "reward__judge__kind": "genrm", "reward__judge__base_url": server.base_url,
            "reward__judge__model": "judge", "reward__judge__retries": 0,
            "reward__judge__patience_seconds": 4,
        }  # fmt: skip
        path = project(train__steps=30, train__max_staleness=0, **judge)
        metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
        done = threading.Event()

        def stop_in_the_middle() -> None:
            while not done.wait(0.05):
                if metrics.exists() and '"type":"step"' in metrics.read_text():
                    return server.stop()

        killer = threading.Thread(target=stop_in_the_middle)
        killer.start()
        try:
            assert main(["train", str(path)]) == 1
        finally:
            done.set()
            killer.join()
    said = capsys.readouterr().err
    assert "reward.judge" in said
    assert server.base_url in said
    assert "patience_seconds = 4" in said
    summary = json.loads((metrics.parent / "summary.json").read_text())
    groups = summary["groups"]
    assert summary["status"] == "failed"
    assert groups["trained"] >= 2
    assert sum(groups["discarded"].values()) <= 2, "calls wait for the judge"
    saved = sorted(folder.name for folder in (metrics.parent / "checkpoints").iterdir())
    assert saved[-1] == f"step-{summary['steps']:06d}", "no step that is done is lost"
    assert all(not name.startswith("generation") for name in groups["discarded"])


def test_d2_d5_a_scorer_reads_text_with_its_own_tokenizer_beside_training(
    project: Project, models: Path
) -> None:
    """The policy's tokens are characters, the scorer's word pieces; nothing else is needed."""
    config, summary = run(project(("scorer",), train__max_staleness=2, train__steps=4))
    tokenizer = AutoTokenizer.from_pretrained(models / "scorer")
    model = AutoModelForSequenceClassification.from_pretrained(models / "scorer").eval()
    samples = samples_of(config)
    assert len(samples) == 4 * config.samples_per_step
    assert summary["rewards"]["scorer"]["scored"] >= len(samples)
    for sample in samples:
        text = f"{sample['prompt']}\n{sample['completion']}"
        with torch.inference_mode():
            expected = model(**tokenizer(text, return_tensors="pt")).logits[0, 0].item()
        assert sample["value_scorer"] == pytest.approx(expected, abs=1e-4)
    assert np.std([sample["total"] for sample in samples]) > 1e-3


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("limit", [7, 9])
def test_w9_the_schedule_spans_a_data_set_that_the_batch_does_not_divide(
    project: Project, schedule: str, limit: int
) -> None:
    path = project(
        data__limit=limit, data__epochs=2, train__groups_per_step=4, train__warmup_steps=1,
        train__schedule=schedule, rollout__group_size=2,
    )  # fmt: skip
    config, summary = run(path, "--train.steps", "none")
    rates = [step["learning_rate"] / config.train.learning_rate for step in steps_of(config)]
    total = {7: 4, 9: 5}[limit]
    assert summary["groups"]["trained"] == 2 * limit
    after = [i / (total - 1) for i in range(total - 1)]
    falls = [1 - x if schedule == "linear" else (1 + math.cos(math.pi * x)) / 2 for x in after]
    assert rates == pytest.approx([1.0, *falls])
    assert min(rates) > 0
