"""How a group's samples get their totals: each rated as it ends, all combined at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.faults import apoint
from offbeat.records import Completion, Prompt, Sample, ScoreItem
from offbeat.reward.loop import RewardLoop, Rewards
from offbeat.rollout.parts import GroupFailed, too_few


@dataclass(frozen=True, slots=True)
class Rated:
    """A sample that has ended, with the outcomes of all sources that need no other sample."""

    completion: Completion
    item: ScoreItem
    rewards: Rewards


async def rate(loop: RewardLoop, prompt: Prompt, completion: Completion, attempt: int) -> Rated:
    """Scores one sample from the moment it ends; raises `GroupFailed` where that drops them all."""
    item = ScoreItem(
        prompt, completion.text, completion.finish_reason, completion.tokens, completion.index
    )
    await apoint("reward.rate")
    rewards = await loop.rate(item, attempt=attempt)
    if spoilers := loop.spoils(rewards):
        raise GroupFailed(f"reward failed: {', '.join(spoilers)}")
    return Rated(completion, item, rewards)


async def combine(
    loop: RewardLoop, rated: Sequence[Rated], attempt: int, min_scored: int
) -> list[Sample]:
    """The group's samples with their totals, in their order.

    Raises `GroupFailed` where a failure drops the group, or fewer than `min_scored` have a total.
    """
    rated = sorted(rated, key=lambda one: one.completion.index)
    scored = await loop.finish(
        [one.item for one in rated], [one.rewards for one in rated], attempt=attempt
    )
    for found in scored:
        if found.verdict == "drop_group":
            raise GroupFailed(f"reward failed: {', '.join(loop.spoils(found.rewards))}")
    samples = [
        Sample(one.completion, found.rewards, found.total, found.parts, found.vetoed)
        for one, found in zip(rated, scored, strict=True)
    ]
    if sum(sample.total is not None for sample in samples) < min_scored:
        raise GroupFailed(too_few(samples))
    return samples
