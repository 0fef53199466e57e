"""What a reward source did, counted: outcomes, retries, what its judge's calls cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from offbeat.records import Reward


@dataclass(frozen=True, slots=True)
class SourceStats:
    """What a source did: counts of outcomes, failures by cause, retries, mean of scored values.

    `calls` are those of a judge, `cached` the ones that the verdict cache answered;
    `prompt_tokens` and `completion_tokens` are what the others cost, `seconds` their mean latency.
    `spread` is the mean deviation of several votes. `facts` are the source's own numbers.
    """

    scored: int = 0
    abstained: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    retries: int = 0
    mean: float | None = None
    calls: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float | None = None
    spread: float | None = None
    facts: Mapping[str, float] = field(default_factory=dict)


class Counters:
    """Running counts of one source."""

    def __init__(self) -> None:
        self._scored = self._abstained = self._retries = 0
        self._failed: Counter[str] = Counter()
        self._mean = self._seconds = self._spread = 0.0
        self._spreads = self._calls = self._cached = 0
        self._prompt_tokens = self._completion_tokens = 0

    def add(self, reward: Reward) -> None:
        """Counts one outcome with the calls that it took."""
        self._retries += reward.retries
        if reward.status == "scored" and reward.value is not None:
            self._scored += 1
            self._mean += (reward.value - self._mean) / self._scored
        elif reward.status == "abstained":
            self._abstained += 1
        else:
            self._failed[reward.cause or "unknown"] += 1
        if reward.spread is not None:
            self._spreads += 1
            self._spread += (reward.spread - self._spread) / self._spreads
        for call in reward.transcripts:
            if not call.first:  # of a comparison: it is with the other sample, too
                continue
            self._calls += 1
            self._cached += call.cached
            self._prompt_tokens += call.prompt_tokens
            self._completion_tokens += call.completion_tokens
            asked = self._calls - self._cached
            if not call.cached:
                self._seconds += (call.seconds - self._seconds) / asked

    def snapshot(self, facts: Mapping[str, float] | None = None) -> SourceStats:
        """The counts so far."""
        return SourceStats(
            scored=self._scored,
            abstained=self._abstained,
            failed=dict(self._failed),
            retries=self._retries,
            mean=self._mean if self._scored else None,
            calls=self._calls,
            cached=self._cached,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            seconds=self._seconds if self._calls > self._cached else None,
            spread=self._spread if self._spreads else None,
            facts=dict(facts or {}),
        )
