"""`offbeat eval`: validation of a model directory, in this process and without reward models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbeat.cli_models import check_policy_model
from offbeat.cluster.plan import device_kind
from offbeat.config import Config
from offbeat.data import load_prompts, load_tokenizer
from offbeat.errors import UserError


async def evaluate(
    config: Config, model: Path | None, say: Callable[[str], None]
) -> dict[str, float]:
    """Answers the held-out prompts as [validate] says, checks them with its function, says what
    came of it.

    `model` replaces [model].path and tokenizer: it holds a tokenizer of its own.
    """
    spec = config.validation.function
    if spec is None:
        raise UserError('validate.function is not set; set it to the checker, "file.py:name"')
    config = _with_model(config, model)
    check_policy_model(config.model.path, "model.path" if model is None else "--model")
    prompts = load_prompts(config, load_tokenizer(config), "validation")

    import torch

    from offbeat.rollout.checker import Checker
    from offbeat.rollout.transformers_engine import TransformersEngine
    from offbeat.rollout.validation import Validator

    torch.set_num_threads(config.rollout.threads)
    rollout = config.rollout
    engine = TransformersEngine(
        str(config.model.path),
        tokenizer_path=None if config.model.tokenizer is None else str(config.model.tokenizer),
        role="validate",
        replica=0,
        seats=rollout.seats,
        max_context=rollout.max_context,
        seed=config.seed,
        dtype=config.rollout_dtype,
        device=device_kind(config),
        threads=rollout.threads,
        load_manifest=_no_weights,
    )
    checker = Checker(spec, config.base_dir)
    await checker.start()
    try:
        await engine.start()
        found = await Validator(config, list(prompts), checker=checker).through(engine.generate)
    finally:
        await engine.stop()
        await checker.stop()
    say(f"{config.model.path}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()))
    return found


def _with_model(config: Config, model: Path | None) -> Config:
    """The configuration with the model directory to evaluate, which must be one."""
    path = config.model.path if model is None else model.resolve()
    if not (path / "config.json").is_file() and (path / "model" / "config.json").is_file():
        path = path / "model"
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is no Hugging Face model directory; set --model to one")
    tokenizer = config.model.tokenizer if model is None else None
    section = config.model.model_copy(update={"path": path, "tokenizer": tokenizer})
    return config.model_copy(update={"model": section})


def _no_weights(*_: Any) -> Any:
    raise UserError("an engine that evaluates is never given other weights")
