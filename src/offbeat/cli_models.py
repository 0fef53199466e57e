"""The part of `check` about model directories: all that a replica would refuse, before it starts.

Reads the weights' headers, config.json and the tokenizer; never a weight. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path

from offbeat.config import Config, RewardSourceSection
from offbeat.errors import UserError
from offbeat.model_files import architectures, check_weights

CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
HEADS = ("score", "classif")
"""What the tensors of a head that classifies are called, in a model that writes otherwise."""


def check_models(config: Config, *, assumed: bool) -> None:
    """Raises `UserError` for a model that cannot play its role; on an assumed cluster a directory
    may be missing here, and is not looked at then."""
    for name, source in config.active_rewards.items():
        if source.has_pool and not _elsewhere(Path(source.model or ""), assumed):
            check_reward_model(name, source)
    if not _elsewhere(config.model.path, assumed):
        check_policy_model(config.model.path, "model.path")
        if config.validation.on == "train" and config.data.validation is not None:
            _check_answers_by_trainer(config.model.path)


def _elsewhere(model: Path, assumed: bool) -> bool:
    return assumed and not model.exists()


def check_policy_model(model: Path, key: str) -> None:
    """Refuses a directory that holds no whole model which writes text."""
    _check_generates(model, key)
    check_weights(model, key)


def _check_generates(model: Path, key: str) -> None:
    names = architectures(model, key)
    if names and all(name.endswith(CLASSIFIERS) for name in names):
        raise UserError(
            f"{key}: the model in {model} classifies ({', '.join(names)}) and writes no text; give "
            "a causal language model"
        )


def _check_answers_by_trainer(model: Path) -> None:
    """What the trainer's own engine would refuse at the first validation."""
    from offbeat.rollout.refusals import check_architecture

    try:
        from transformers import AutoConfig

        described = AutoConfig.from_pretrained(model, local_files_only=True)
    except (ImportError, OSError, ValueError):
        return  # said where the model or its tokenizer is read
    try:
        check_architecture(str(model), described)
    except UserError as refused:
        raise UserError(
            f'validate.on = "train" answers with an engine of the trainer\'s own, and {refused}; '
            'set it to "rollout" or "dedicated", with rollout.engine = "vllm"'
        ) from None


def _check_classifies(model: Path, key: str) -> None:
    """Refuses a model that writes, unless its files have a head beside the one for text."""
    names = architectures(model, key)
    files = sorted(model.glob("*.safetensors"))
    if not names or not files or not all(name.endswith(WRITERS) for name in names):
        return
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "np") as opened:
            if any(head in tensor for tensor in opened.keys() for head in HEADS):  # noqa: SIM118
                return
    raise UserError(
        f"{key}: the model in {model} writes text ({', '.join(names)}) and has no head that "
        "scores; give a model that was trained to classify sequences or tokens"
    )


def check_reward_model(name: str, source: RewardSourceSection) -> None:
    """The tokenizer is loaded as the replica loads it, so that both refuse the same."""
    key, model = f"reward.{name}.model", Path(source.model or "")
    if source.kind == "genrm":
        _check_generates(model, key)
    check_weights(model, key)
    if source.kind == "disrm":
        _check_classifies(model, key)
    from offbeat.reward.classifier import read_config
    from offbeat.reward.structure import check_spelling, structure_of
    from offbeat.reward.template import load_tokenizer

    try:
        if source.kind == "disrm":
            read_config(name, source)
        tokenizer = load_tokenizer(model, key, chat=source.chat)
    except ImportError:
        return  # said where the prompts are not tokenised
    if source.kind == "genrm":
        check_spelling(structure_of(source), tokenizer, name)
