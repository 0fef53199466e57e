"""From the sources' outcomes to one number for a sample (pure).

A failed, abstained or non-finite reward is absent: it enters no sum and is never 0. The total of
what is present keeps the size that it would have with all sources: the weighted sum divided by the
present weights and multiplied by all weights. With signed weights their absolute values count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from offbeat.config import RewardSourceSection
from offbeat.records import Reward

Decision = Literal["keep", "drop_sample", "drop_group"]


def present(reward: Reward) -> bool:
    """Whether the reward is a finite number."""
    return reward.status == "scored" and reward.value is not None and math.isfinite(reward.value)


def combine(rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> float | None:
    """The weighted sum over present sources, renormalised; None where nothing is present."""
    values = {
        name: reward.value
        for name, reward in rewards.items()
        if present(reward) and reward.value is not None
    }
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
    return total if math.isfinite(total) else None


def decide(
    rewards: Mapping[str, Reward],
    config: Mapping[str, RewardSourceSection],
    total: float | None,
) -> Decision:
    """What becomes of the sample: the strictest `on_failure` among the sources that failed.

    A sample without a total (every source abstained) cannot be trained: it is dropped.
    """
    policies = {config[name].on_failure for name, r in rewards.items() if r.status == "failed"}
    if "drop_group" in policies:
        return "drop_group"
    if "retry_then_drop_sample" in policies or total is None:
        return "drop_sample"
    return "keep"
