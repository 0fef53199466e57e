"""Tiny models and recorded samples for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import LlamaConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from offbeat.config import Config
from offbeat.records import Batch, Completion, Group, Payload, Prompt, Sample
from offbeat.train.trainer import Trainer

VOCABULARY = 64
EOS = 2
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}

Recorded = list[tuple[list[int], list[tuple[list[int], list[float], float | None]]]]


def make_model(path: Path, family: str = "llama", tied: bool = True, seed: int = 0) -> Path:
    """A random model directory, with a file that stands for its tokenizer."""
    torch.manual_seed(seed)
    config = CONFIGS[family](
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=EOS,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    (path / "tokenizer.json").write_text('{"a": "tokenizer"}')
    return path


def make_config(model: Path, **train: Any) -> Config:
    """The defaults with quick learning; `train` are settings of [train], temperature and dtype."""
    temperature, dtype = train.pop("temperature", 1.0), train.pop("dtype", "float32")
    return Config.model_validate(
        {
            "run": "trainer-test",
            "runs_dir": model.parent / "runs",
            "model": {"path": model, "dtype": dtype},
            "data": {"train": model / "none.jsonl"},
            "rollout": {"temperature": temperature, "max_tokens": 8, "max_context": 64},
            "train": {"learning_rate": 1e-3, "warmup_steps": 2} | train,
            "reward": {"right": {"kind": "function", "function": "rewards.py:right"}},
            "cluster": {"device": "cpu", "backend": "local"},
        }
    )


def make_trainer(model: Path, *, total_steps: int = 10, lineage: int = 0, **train: Any) -> Trainer:
    """A trainer that publishes beside the model; not set up."""
    return Trainer(
        make_config(model, **train),
        total_steps=total_steps,
        lineage=lineage,
        publish_folder=model.parent / "weights",
        run_id="trainer-test",
    )


def record_steps(steps: int, groups: int = 4, size: int = 4, seed: int = 0) -> list[Recorded]:
    """Random recorded samples: common prefixes, equal answers, answers that end in eos, missing
    rewards, and a group without signal in every step."""
    rng = np.random.default_rng(seed)
    head = rng.integers(3, VOCABULARY, 5).tolist()
    made = []
    for _ in range(steps):
        step: Recorded = []
        for g in range(groups):
            prompt = head + rng.integers(3, VOCABULARY, rng.integers(1, 5)).tolist()
            samples: list[tuple[list[int], list[float], float | None]] = []
            for j in range(size):
                answer = [*rng.integers(3, 6, rng.integers(0, 9)).tolist(), EOS]
                if j == 1:
                    answer = samples[0][0]
                guess = (-np.log(VOCABULARY) + rng.normal(0, 1.5, len(answer))).tolist()
                reward = 1.0 if g == groups - 1 else float(rng.normal())
                samples.append((answer, [float(np.float32(x)) for x in guess], reward))
            if g == 0:
                samples[2] = (*samples[2][:2], None)
            step.append((prompt, samples))
        made.append(step)
    return made


def to_batch(
    step: int, recorded: Recorded, version: int | None = None
) -> tuple[Batch, list[list[Payload]]]:
    """Recorded samples as a batch with payloads, made by `version` (default: the current one)."""
    version = step if version is None else version
    groups, payloads = [], []
    for g, (prompt, samples) in enumerate(recorded):
        ids = np.array(prompt, dtype=np.int32)
        ordinal = step * len(recorded) + g
        notes = [
            Sample(
                Completion(f"r{ordinal}", j, "", len(answer), version, version, "stop", None),
                {},
                reward,
            )
            for j, (answer, _, reward) in enumerate(samples)
        ]
        groups.append(Group(Prompt(ordinal, ids, "", ""), 0, step + 2, tuple(notes)))
        payloads.append(
            [
                Payload(
                    np.array(answer, dtype=np.int32),
                    np.array(logprobs, dtype=np.float32),
                    np.full(len(answer), version, dtype=np.int32),
                )
                for answer, logprobs, _ in samples
            ]
        )
    return Batch(step, tuple(groups)), payloads


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of the trainer's weights."""
    return {name: t.clone() for name, t in trainer.model.tensors()[0].items()}


def gradient_of(trainer: Trainer, batch: Batch, payloads: Sequence[Sequence[Payload]]) -> Any:
    """The flat gradient that a step would apply, with the step's result; no update."""
    caught: list[torch.Tensor] = []

    def catch(rate: float, norm: float) -> None:
        caught.append(torch.cat([p.grad.reshape(-1) for p in trainer.model.parameters()]))

    trainer._update = catch  # type: ignore[method-assign]
    result = trainer.step(batch, payloads)
    return caught[0], result
