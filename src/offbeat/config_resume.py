"""Which settings may change when a run is resumed, and why the others may not (pure).

Harmless is what decides how fast, where and how patiently the run goes on. All else decides what an
ordinal, a reward or a step is: with it changed, the batches after the newest checkpoint would be
redone as other weights, or one step would mix groups of two kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from offbeat.config import Config, Section
from offbeat.errors import UserError

Why = Mapping[str, str | None]
"""By setting: why it may not change; None: it may."""

_PLACE = "the run is the directory that is resumed"
_ORDER = "it decides which prompt an ordinal is"
_START = "the run began with it, and what was generated was tokenised and weighted by it"
_KIND = "groups that are generated already were sampled otherwise, and one step would mix both"
_RATIO = "the ratios of policy and behaviour of recorded groups reckon with it"
_BOUND = "the deadlines of the groups that are live were set with it"
_REDO = "the recorded batches after the newest checkpoint would be redone as other weights"
_WORTH = "groups that are scored already were scored otherwise, and one step would mix both"
_SCHEDULE = "the rate of every step was planned with it; change train.learning_rate instead"

REWARD: Final[Why] = {
    "kind": _WORTH,
    "engine": None,
    "engine_args": None,
    "memory_share": None,
    "weight": _WORTH,
    "role": _WORTH,
    "veto_below": _WORTH,
    "when": _WORTH,
    "placement": None,
    "on_failure": _WORTH,
    "retries": None,
    "deadline_seconds": None,
    "concurrency": None,
    "max_failed_share": None,
    "patience_seconds": None,
    "anchors": None,
    "anchors_every": None,
    "function": _WORTH,
    "workers": None,
    "style": _WORTH,
    "arguments": _WORTH,
    "model": _WORTH,
    "replicas": None,
    "devices_per_replica": None,
    "pool": None,
    "device_share": None,
    "template": _WORTH,
    "chat": _WORTH,
    "dtype": _WORTH,
    "threads": None,
    "seats": None,
    "max_context": _WORTH,
    "base_url": None,
    "api_key_env": None,
    "requests_per_minute": None,
    "tokens_per_minute": None,
    "parser": _WORTH,
    "choices": _WORTH,
    "rubric": _WORTH,
    "votes": _WORTH,
    "vote": _WORTH,
    "pairwise": _WORTH,
    "cache": None,
    "seed": _WORTH,
    "scale": _WORTH,
    "max_tokens": _WORTH,
    "structured": _WORTH,
    "temperature": _WORTH,
    "stop": _WORTH,
    "over_length": _WORTH,
    "label": _WORTH,
    "label_values": _WORTH,
    "normalize": _WORTH,
    "affine": _WORTH,
}
"""Of every reward source."""

SETTINGS: Final[Why] = {
    "run": _PLACE,
    "base_dir": "the reward functions of the run are looked up there",
    "runs_dir": _PLACE,
    "ledger_dir": "the ledger lies there",
    "seed": "order and sampling of the run come from it",
    "use_rewards": _WORTH,
    "combine": _WORTH,
    "model.path": _START,
    "model.tokenizer": _START,
    "model.dtype": _REDO,
    "data.train": _ORDER,
    "data.validation": "the curve of accuracy would be of two sets of prompts",
    "data.prompt_column": _ORDER,
    "data.reference_column": _WORTH,
    "data.question_column": _WORTH,
    "data.reward_column": _WORTH,
    "data.source_column": "the curves of accuracy are told apart by it",
    "data.epochs": _ORDER,
    "data.shuffle": _ORDER,
    "data.limit": _ORDER,
    "data.on_overlong": _ORDER,
    "rollout.engine": None,
    "rollout.engine_args": None,
    "rollout.memory_share": None,
    "rollout.replicas": None,
    "rollout.devices_per_replica": None,
    "rollout.group_size": _KIND,
    "rollout.max_tokens": "it decides which prompts are too long, and so what an ordinal is",
    "rollout.max_context": "it decides which prompts are too long, and so what an ordinal is",
    "rollout.temperature": _RATIO,
    "rollout.top_p": _RATIO,
    "rollout.top_k": _RATIO,
    "rollout.stop": _KIND,
    "rollout.seats": None,
    "rollout.dtype": _RATIO,
    "rollout.on_update": None,
    "rollout.threads": None,
    "rollout.max_attempts": None,
    "rollout.deadline_seconds": None,
    "rollout.snapshot_tokens": None,
    "train.devices": _REDO,
    "train.algorithm": _REDO,
    "train.groups_per_step": _BOUND,
    "train.max_staleness": _BOUND,
    "train.steps": None,  # with schedule = "constant" alone
    "train.learning_rate": None,
    "train.warmup_steps": _SCHEDULE,
    "train.schedule": _SCHEDULE,
    "train.betas": _REDO,
    "train.weight_decay": _REDO,
    "train.max_grad_norm": _REDO,
    "train.clip_low": _REDO,
    "train.clip_high": _REDO,
    "train.advantage_eps": _REDO,
    "train.min_scored": _KIND,
    "train.tokens_per_micro_batch": _REDO,
    "train.prefix_sharing": _REDO,
    "train.on_no_signal": _REDO,
    "train.max_no_signal_steps": None,
    "train.max_bad_steps": None,
    "train.checkpoint_every": None,
    "train.keep_checkpoints": None,
    "train.keep_every": None,
    "train.keep_batches": None,
    "train.straggler_patience_seconds": None,
    "train.batch_deadline_seconds": None,
    "train.deadline_seconds": None,
    "train.threads": None,
    "weights.folder": None,
    "weights.deadline_seconds": None,
    "weights.transport": None,
    "weights.loads_at_once": None,
    "validate.on": None,
    "validate.samples": None,
    "validate.temperature": None,
    "validate.rewards": None,
    "validate.replicas": None,
    "validate.devices_per_replica": None,
    "validate.every": None,
    "validate.function": None,
    "validate.limit": None,
    "validate.deadline_seconds": None,
    "cluster.backend": None,
    "cluster.device": None,
    "cluster.single_device": None,
    "cluster.slots": None,
    "cluster.placement_deadline_seconds": None,
    "cluster.start_deadline_seconds": None,
    "cluster.max_restarts": None,
    "cluster.heartbeat_seconds": None,
    "cluster.grace_seconds": None,
}
"""Of all sections but the reward sources."""


def why_not(key: str) -> str | None:
    """Why a setting may not change; None: it may. Of one that is not known: it may not."""
    if key.startswith("reward."):
        return REWARD.get(key.rpartition(".")[2], _WORTH)
    return SETTINGS.get(key, "it is not known to be harmless")


def check_changes(before: Config, after: Config) -> list[str]:
    """The changed settings, as `key: old -> new`; `UserError` for the first that may not change."""
    if set(before.reward) != set(after.reward):
        name = sorted(set(before.reward) ^ set(after.reward))[0]
        raise UserError(_refused(f"reward.{name}", name in before.reward, _WORTH))
    old, new = dict(settings(before)), dict(settings(after))
    changed = [key for key in new if old[key] != new[key]]
    for key in changed:
        reason = why_not(key)
        if key == "train.steps" and after.train.schedule != "constant":
            reason = f'with train.schedule = "{after.train.schedule}" every rate depends on it'
        if reason is not None:
            raise UserError(_refused(key, True, reason, _shown(old[key])))
    return [f"{key}: {_shown(old[key])} -> {_shown(new[key])}" for key in changed]


def _refused(key: str, had: bool, reason: str, was: str | None = None) -> str:
    keep = f"leave it at {was}" if was is not None else "keep it" if had else "leave it out"
    return f"{key} cannot change when a run is resumed: {reason}; {keep}, or begin another run"


def settings(config: Config) -> Iterator[tuple[str, Any]]:
    """Every setting by its full name, as in `train.steps` and `reward.judge.weight`."""
    yield from _of(config, "")
    for name, source in config.reward.items():
        yield from _of(source, f"reward.{name}.")


def _of(section: Section, place: str) -> Iterator[tuple[str, Any]]:
    for name, value in section:
        key = type(section).model_fields[name].alias or name
        if isinstance(value, Section):
            yield from _of(value, f"{place}{key}.")
        elif place or key != "reward":
            yield f"{place}{key}", value


def _shown(value: Any) -> str:
    if isinstance(value, (str, Path)):
        return f'"{value}"'
    return "none" if value is None else str(list(value) if isinstance(value, tuple) else value)
