"""Small parts of the rollouter: where prompts come from, and numbers to read off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from offbeat.records import Prompt, Sample


class PromptSource(Protocol):
    """Where prompts come from: `total` ordinals, each always the same prompt."""

    @property
    def total(self) -> int:
        """Ordinals there are: epochs x rows."""
        ...

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt of an ordinal in [0, total)."""
        ...


@dataclass(slots=True)
class Tally:
    """Numbers since they were last read."""

    generated_tokens: int = 0
    loop_lag_seconds: float = 0.0


def too_few(samples: Sequence[Sample]) -> str:
    """The reason to discard a group below `train.min_scored`, with the sources' own causes."""
    causes = {
        f"{name} {reward.cause}"
        for sample in samples
        for name, reward in sample.rewards.items()
        if reward.cause is not None
    }
    return f"min_scored: {', '.join(sorted(causes))}" if causes else "min_scored"
