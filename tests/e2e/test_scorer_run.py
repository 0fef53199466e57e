"""A run with scorers of every kind at once: its samples have the values of plain transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from offbeat.cluster.launch import train
from offbeat.config_file import load_config
from offbeat.testing.tiny import make_tiny_scorer

Project = Callable[..., Path]
LABELS = ("bad", "ok", "good")
VALUES = torch.tensor([-1.0, 0.5, 2.0])


def test_scorers_of_every_kind_train_one_model(
    project: Project, models: Path, tmp_path: Path
) -> None:
    labels = make_tiny_scorer(tmp_path / "labels", labels=LABELS)
    tokens = make_tiny_scorer(tmp_path / "tokens", labels=LABELS, token_level=True, decoder=True)
    path = project(
        ("scorer",),
        cluster__slots=6,
        train__max_staleness=2,
        train__steps=3,
        reward__scorer__normalize="affine",
        reward__scorer__affine=[0.5, 1.0],
        reward__labels__kind="disrm",
        reward__labels__model=str(labels),
        reward__labels__label_values__good=2.0,
        reward__labels__label_values__ok=0.5,
        reward__labels__label_values__bad=-1.0,
        reward__labels__replicas=2,
        reward__tokens__kind="disrm",
        reward__tokens__model=str(tokens),
        reward__tokens__chat=True,
        reward__tokens__label=2,
        reward__tokens__normalize="running",
    )
    config = load_config(path)
    assert train(config, None) == 0
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    files = sorted((config.run_dir / "samples").glob("step-*.parquet"))
    samples: list[dict[str, Any]] = [row for at in files for row in pq.read_table(at).to_pylist()]
    assert len(samples) == 3 * config.samples_per_step
    pairs = [(sample["prompt"], sample["completion"]) for sample in samples]

    plain = read(AutoModelForSequenceClassification, models / "scorer", "{}\n{}", pairs)[:, 0]
    assert of(samples, "scorer") == pytest.approx((0.5 * plain + 1).tolist(), abs=1e-4)
    assert [float(s["raw_scorer"]) for s in samples] == pytest.approx(plain.tolist(), abs=1e-4)

    three = read(AutoModelForSequenceClassification, labels, "{}\n{}", pairs)
    wanted = torch.softmax(three, 1) @ VALUES
    assert of(samples, "labels") == pytest.approx(wanted.tolist(), abs=1e-4)

    shown = "user: {}<eos>assistant: {}<eos>"
    last = read(AutoModelForTokenClassification, tokens, shown, pairs)[:, 2].double().numpy()
    found = np.array(of(samples, "tokens"))
    assert float(np.std(last)) > 1e-3
    # One straight line for all samples of a group.
    for prompt in {prompt for prompt, _ in pairs}:
        here = [i for i, pair in enumerate(pairs) if pair[0] == prompt]
        if float(np.std(last[here])) > 1e-3:
            factor, term = np.polyfit(last[here], found[here], 1)
            assert factor > 0
            assert found[here] == pytest.approx(factor * last[here] + term, abs=1e-3)
    facts = {name: source["facts"] for name, source in summary["rewards"].items()}
    assert facts["tokens"]["normalize_n"] >= len(samples)
    mean, deviation = float(last.mean()), float(last.std())
    assert facts["tokens"]["normalize_mean"] == pytest.approx(mean, abs=3 * deviation)
    assert [facts[name]["replicas"] for name in ("scorer", "labels", "tokens")] == [1, 2, 1]


def of(samples: list[dict[str, Any]], source: str) -> list[float]:
    return [sample[f"value_{source}"] for sample in samples]


def read(kind: Any, path: Path, shown: str, pairs: list[tuple[str, str]]) -> torch.Tensor:
    """All logits of each text alone, of tokens those of the last: (samples, labels)."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), kind.from_pretrained(path).eval()
    rows = [tokenizer(shown.format(*pair))["input_ids"] for pair in pairs]
    with torch.inference_mode():
        found = [model(input_ids=torch.tensor([row])).logits[0] for row in rows]
    return torch.stack([logits if logits.ndim == 1 else logits[-1] for logits in found])
