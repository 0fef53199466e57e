"""Whether the judges can still be trusted, from what they said of each step (pure).

Of every reward source, over the last `WINDOW` steps: whether it pays for length, how much of what
it gives lies at the ends of its scale, how far its votes spread, whether it agrees with the other
sources. `truth.py` compares what they pay with the true check. Correlations are Spearman's: of
ranks, so that no source's scale matters.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from offbeat.config import RewardSourceSection
from offbeat.records import Batch, Sample
from offbeat.track.ranks import Floats, RankCorrelation

WINDOW = 10
"""Steps that the numbers of one step's record are of: a single step's are mostly noise."""
TOTAL = "total"
Ends = tuple[float, float]
Pair = tuple[str, str]


def scale_ends(section: RewardSourceSection) -> Ends | None:
    """Lowest and highest value that a source can give; None where its section does not say."""
    if section.kind != "genrm" or section.normalize != "none":
        return None
    if section.choices and section.parser in {"choice", "expected"} and section.pairwise is None:
        return min(section.choices.values()), max(section.choices.values())
    return 0.0, 1.0


@dataclass(slots=True)
class Values:
    """What some samples say of one source: of `n` values the mean, the sum of squares about it,
    how many lie at the scale's ends, the votes' spreads, and how they go with length."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: int = 0
    high: int = 0
    spreads: int = 0
    spread: float = 0.0
    length: RankCorrelation = field(default_factory=RankCorrelation)

    @classmethod
    def of(cls, values: Floats, tokens: Floats, ends: Ends) -> Values:
        """From values and the tokens of their completions, one step's."""
        if len(values) == 0:
            return cls()
        with np.errstate(all="ignore"):  # values near the largest float have infinite squares
            mean = float(values.mean())
            squares = float(np.square(values - mean).sum())
        low, high = ends
        found = cls(len(values), mean, squares, int((values <= low).sum()))
        found.high = int((values >= high).sum())
        found.length.add(values, tokens)
        return found

    def merge(self, more: Values) -> None:
        """Takes another's values too."""
        n = self.n + more.n
        if more.n:
            apart = more.mean - self.mean
            self.squares += more.squares + apart * apart * self.n * more.n / n
            self.mean += apart * more.n / n
        self.n = n
        self.low += more.low
        self.high += more.high
        self.spreads += more.spreads
        self.spread += more.spread
        self.length.merge(more.length)

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the values; None of fewer than two."""
        return math.sqrt(self.squares / (self.n - 1)) if self.n > 1 else None

    def record(self, *, ends: bool) -> dict[str, Any]:
        """The numbers as they are recorded."""
        found: dict[str, Any] = {"n": self.n, "length": self.length.value}
        if ends and self.n:
            found |= {"low": self.low / self.n, "high": self.high / self.n}
        if self.spreads:
            found["spread"] = self.spread / self.spreads
        return found


@dataclass(slots=True)
class Told:
    """What one or several steps say: values by source and total, and two sources' agreement."""

    sources: dict[str, Values] = field(default_factory=dict)
    pairs: dict[Pair, RankCorrelation] = field(default_factory=dict)

    def merge(self, more: Told) -> None:
        """Takes another step too."""
        for name, values in more.sources.items():
            self.sources.setdefault(name, Values()).merge(values)
        for pair, correlation in more.pairs.items():
            self.pairs.setdefault(pair, RankCorrelation()).merge(correlation)


class Health:
    """Collects steps; `step` gives the record of the newest."""

    def __init__(self, sources: Mapping[str, RewardSourceSection] | None = None) -> None:
        """`sources` tell the scales; of others the ends are the extremes that they gave so far."""
        self._ends = {name: scale_ends(section) for name, section in (sources or {}).items()}
        self._seen: dict[str, Ends] = {}
        self._steps: deque[Told] = deque(maxlen=WINDOW)

    def step(self, batch: Batch) -> dict[str, Any]:
        """Takes a step's batch; the numbers over the last `WINDOW` steps.

        `sources`: of each source and of the total, `n` values, the correlation of value and
        completion tokens within steps `length`, the shares `low` and `high` of values at the
        scale's ends, and the mean `spread` of several votes. `agreement`: of each two sources,
        within groups. What cannot be told is None.
        """
        self._steps.append(self._read(batch))
        pooled = self._pooled()
        return {
            "steps": len(self._steps),
            "sources": {
                name: values.record(ends=name != TOTAL and self._ends_differ(name))
                for name, values in pooled.sources.items()
            },
            "agreement": {f"{one}~{other}": of.value for (one, other), of in pooled.pairs.items()},
        }

    def deviation(self, source: str) -> float | None:
        """Standard deviation of a source's (or the total's) values over the last steps."""
        found = self._pooled().sources.get(source)
        return None if found is None else found.deviation

    def _pooled(self) -> Told:
        pooled = Told()
        for step in self._steps:
            pooled.merge(step)
        return pooled

    def _read(self, batch: Batch) -> Told:
        samples = [sample for group in batch.groups for sample in group.samples]
        groups = np.repeat(np.arange(len(batch.groups)), [len(g.samples) for g in batch.groups])
        tokens = np.array([sample.completion.tokens for sample in samples], dtype=np.float64)
        names = list(dict.fromkeys(name for sample in samples for name in sample.rewards))
        told = Told()
        columns = {name: _column(value_of(sample, name) for sample in samples) for name in names}
        for name, column in columns.items():
            there = np.isfinite(column)
            ends = self._ends_with(name, column[there])
            told.sources[name] = values = Values.of(column[there], tokens[there], ends)
            spreads = [r.spread for s in samples if (r := s.rewards.get(name)) is not None]
            known = [spread for spread in spreads if spread is not None]
            values.spreads, values.spread = len(known), sum(known)
        totals = _column(sample.total for sample in samples)
        there = np.isfinite(totals)
        told.sources[TOTAL] = Values.of(totals[there], tokens[there], (-math.inf, math.inf))
        for one, other in combinations(names, 2):
            there = np.isfinite(columns[one]) & np.isfinite(columns[other])
            told.pairs[one, other] = correlation = RankCorrelation()
            correlation.add(columns[one][there], columns[other][there], groups[there])
        return told

    def _ends_with(self, name: str, values: Floats) -> Ends:
        known = self._ends.get(name)
        if known is not None:
            return known
        low, high = self._seen.get(name, (math.inf, -math.inf))
        self._seen[name] = min([low, *values.tolist()]), max([high, *values.tolist()])
        return self._seen[name]

    def _ends_differ(self, name: str) -> bool:
        """Of a source that gave one value only nobody knows which end that is."""
        low, high = self._ends.get(name) or self._seen[name]
        return low < high


def value_of(sample: Sample, source: str) -> float | None:
    """What a source gave a sample; None where it did not score it."""
    reward = sample.rewards.get(source)
    return None if reward is None or reward.status != "scored" else reward.value


def _column(values: Any) -> Floats:
    """Numbers as an array, nan where there is none."""
    found = [math.nan if value is None else float(value) for value in values]
    return np.array(found, dtype=np.float64)
