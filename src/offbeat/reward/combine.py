"""From the sources' outcomes to one number for a sample (pure).

A failed, abstained or non-finite reward is absent: it enters no sum and is never 0. The total of
what is present keeps the size that it would have with all sources: the weighted sum divided by the
present weights and multiplied by all weights. With signed weights their absolute values count.

Two roles are gates. A source of role "multiply" multiplies what the others add by its value (0 to
1). One of role "veto" whose value is under its `veto_below` leaves nothing of it: the total is 0,
or the lowest total of the group's other samples that are kept if that is below 0, so that a vetoed
sample is never better than one that was not. A gate without a value does nothing (what a failure
does to the sample is `on_failure`'s to say).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from offbeat.config import RewardSourceSection
from offbeat.records import Reward

Decision = Literal["keep", "drop_sample", "drop_group"]
Sections = Mapping[str, RewardSourceSection]
LARGEST = 1e30
"""Totals beyond it are none: their squares and differences would be no float32 any more."""


@dataclass(frozen=True, slots=True)
class Combined:
    """A sample's total (None if it is dropped), what it consists of (`Sample.parts`), what
    becomes of the sample, and whether a veto left nothing of it."""

    total: float | None
    parts: dict[str, float]
    verdict: Decision
    vetoed: bool = False


def present(reward: Reward) -> bool:
    """Whether the reward is a finite number."""
    return reward.status == "scored" and reward.value is not None and math.isfinite(reward.value)


def combine_group(rewards: Sequence[Mapping[str, Reward]], config: Sections) -> list[Combined]:
    """One `Combined` a sample of a group; the keys of `rewards` are the sources that score it."""
    alone = [_alone(of_sample, config) for of_sample in rewards]
    vetoes = {
        name: section.veto_below for name, section in config.items() if section.role == "veto"
    }
    vetoed = [bool(vetoes) and _vetoed(of_sample, vetoes) for of_sample in rewards]
    found = [
        _decided(one, "keep" if veto else decide(of_sample, config, one.total))
        for one, veto, of_sample in zip(alone, vetoed, rewards, strict=True)
    ]
    free = [one for one, veto in zip(found, vetoed, strict=True) if not veto and one.parts]
    lowest = min([0.0, *(one.total for one in free if one.total is not None)])
    for place, veto in enumerate(vetoed):
        if veto:
            names = [name for name in rewards[place] if config[name].role == "add"]
            there = [name for name in names if name in alone[place].parts] or names
            parts = {name: _worst(name, config[name].weight, free) for name in there}
            verdict = decide(rewards[place], config, lowest)
            found[place] = _decided(Combined(lowest, parts, "keep", vetoed=True), verdict)
    return found


def combine(rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> float | None:
    """The weighted sum over present sources, renormalised; None where nothing is present."""
    return weighted_sum(_values(rewards), weights)


def weighted_sum(values: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    """The same over values that are present; `weights` are those of all."""
    if not values:
        return None
    try:
        total = math.fsum(weights[name] * value for name, value in values.items())
        if len(values) < len(weights):
            there = math.fsum(abs(weights[name]) for name in values)
            if there == 0:
                return None
            total = total / there * math.fsum(abs(weight) for weight in weights.values())
    except (OverflowError, ValueError):
        return None
    return total if abs(total) < LARGEST else None


def decide(rewards: Mapping[str, Reward], config: Sections, total: float | None) -> Decision:
    """What becomes of the sample: the strictest `on_failure` among the sources that failed.

    A sample without a total (every source abstained) cannot be trained: it is dropped.
    """
    policies = {config[name].on_failure for name, r in rewards.items() if r.status == "failed"}
    if "drop_group" in policies:
        return "drop_group"
    if "retry_then_drop_sample" in policies or total is None:
        return "drop_sample"
    return "keep"


def _alone(rewards: Mapping[str, Reward], config: Sections) -> Combined:
    """What the sources add, times the gates that multiply; vetoes left out."""
    values = _values(rewards)
    factor = math.prod(value for n, value in values.items() if config[n].role == "multiply")
    weights = {n: s.weight for n, s in config.items() if n in rewards and s.role == "add"}
    parts = {
        name: part
        for name, value in values.items()
        if name in weights and math.isfinite(part := value * factor)
    }
    return Combined(weighted_sum(parts, weights), parts, "keep")


def _vetoed(rewards: Mapping[str, Reward], vetoes: Mapping[str, float]) -> bool:
    """`vetoes`: each veto's own bound."""
    return any(value < vetoes[n] for n, value in _values(rewards).items() if n in vetoes)


def _worst(name: str, weight: float, free: Sequence[Combined]) -> float:
    """What a source brings to a vetoed sample: nothing, or the least good of what others have."""
    values = [0.0, *(one.parts[name] for one in free if name in one.parts)]
    return max(values) if weight < 0 else min(values)


def _values(rewards: Mapping[str, Reward]) -> dict[str, float]:
    """The values that are there."""
    return {n: r.value for n, r in rewards.items() if present(r) and r.value is not None}


def _decided(combined: Combined, verdict: Decision) -> Combined:
    if verdict == "keep":
        return combined
    return Combined(None, {}, verdict)
