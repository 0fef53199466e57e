"""Whether the judges can still be trusted, from what they said of each step (pure).

Of every reward source, over the last `WINDOW` steps: whether it pays for length, how much of what
it gives lies at the ends of its scale, how far its votes spread, whether it agrees with the other
sources. `truth.py` compares what they pay with the true check. Correlations are Spearman's: of
ranks, so that no source's scale matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any, TypeVar

import numpy as np

from offbeat.config import RewardSourceSection
from offbeat.records import Batch, Sample
from offbeat.track.moments import Moments
from offbeat.track.ranks import Floats, RankCorrelation

WINDOW = 10
"""Steps that the numbers of one step's record are of: a single step's are mostly noise."""
KEPT = 1000
"""Steps that are kept, for a trainer that goes back behind some and redoes them."""
TOTAL = "total"
Ends = tuple[float, float]
Pair = tuple[str, str]
T = TypeVar("T")


def scale_ends(section: RewardSourceSection) -> Ends | None:
    """Lowest and highest value that a source can give; None where its section does not say."""
    if section.kind != "genrm" or section.normalize != "none":
        return None
    if section.choices and section.parser in {"choice", "expected"} and section.pairwise is None:
        return min(section.choices.values()), max(section.choices.values())
    return 0.0, 1.0


@dataclass(slots=True)
class Values(Moments):
    """What some samples say of one source: besides the moments of its values how many of them lie
    at the scale's ends, the votes' spreads, and how they go with length."""

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
        self.pool(more)
        self.low += more.low
        self.high += more.high
        self.spreads += more.spreads
        self.spread += more.spread
        self.length.merge(more.length)

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
    """What one or several steps say: values by source and total, and two sources' agreement; `seen`
    are the extremes so far of sources whose scale nobody knows."""

    sources: dict[str, Values] = field(default_factory=dict)
    pairs: dict[Pair, RankCorrelation] = field(default_factory=dict)
    seen: dict[str, Ends] = field(default_factory=dict)

    @classmethod
    def recalled(cls, record: Mapping[str, Any]) -> Told:
        """From its `record`, also as a file has it, where an infinite number is None."""
        sources, pairs = {}, {}
        for name, kept in record["sources"].items():
            kept = {key: math.inf if value is None else value for key, value in kept.items()}
            sources[name] = Values(**kept | {"length": RankCorrelation(**kept["length"])})
        for one, other, kept in record["pairs"]:
            pairs[one, other] = RankCorrelation(**kept)
        seen = {name: (low, high) for name, (low, high) in record["seen"].items()}
        return cls(sources, pairs, {name: of for name, of in seen.items() if None not in of})

    def record(self) -> dict[str, Any]:
        """All of it, in plain values."""
        return {
            "sources": {name: asdict(values) for name, values in self.sources.items()},
            "pairs": [[*pair, asdict(found)] for pair, found in self.pairs.items()],
            "seen": dict(self.seen),
        }

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
        self._steps: dict[int, Told] = {}

    def step(self, batch: Batch) -> dict[str, Any]:
        """Takes a step's batch; the numbers over the last `WINDOW` steps.

        `sources`: of each source and of the total, `n` values, the correlation of value and
        completion tokens within steps `length`, the shares `low` and `high` of values at the
        scale's ends, and the mean `spread` of several votes. `agreement`: of each two sources,
        within groups. What cannot be told is None. A step that is done again replaces itself, and
        those after it, which follow.
        """
        self._steps = before(self._steps, batch.step)
        self._steps[batch.step] = self._read(batch)
        pooled = self._pooled()
        return {
            "steps": len(self._window()),
            "sources": {
                name: values.record(ends=name != TOTAL and self._ends_differ(name))
                for name, values in pooled.sources.items()
            },
            "agreement": {f"{one}~{other}": of.value for (one, other), of in pooled.pairs.items()},
        }

    def evidence(self) -> dict[str, Any]:
        """What the newest step says by itself: enough for `recall`."""
        return self._steps[max(self._steps)].record()

    def recall(self, step: int, evidence: Mapping[str, Any]) -> None:
        """Takes a step of an earlier start."""
        self._steps = before(self._steps, step) | {step: Told.recalled(evidence)}

    def deviation(self, source: str) -> float | None:
        """Standard deviation of a source's (or the total's) values over the last steps."""
        found = self._pooled().sources.get(source)
        return None if found is None else found.deviation

    def _pooled(self) -> Told:
        pooled = Told()
        for step in self._window():
            pooled.merge(self._steps[step])
        return pooled

    @property
    def _seen(self) -> Mapping[str, Ends]:
        """After the newest step."""
        return self._steps[max(self._steps)].seen if self._steps else {}

    def _window(self) -> list[int]:
        return sorted(self._steps)[-WINDOW:]

    def _read(self, batch: Batch) -> Told:
        samples = [sample for group in batch.groups for sample in group.samples]
        groups = np.repeat(np.arange(len(batch.groups)), [len(g.samples) for g in batch.groups])
        tokens = np.array([sample.completion.tokens for sample in samples], dtype=np.float64)
        names = list(dict.fromkeys(name for sample in samples for name in sample.rewards))
        told = Told(seen=dict(self._seen))
        columns = {name: _column(value_of(sample, name) for sample in samples) for name in names}
        for name, column in columns.items():
            there = np.isfinite(column)
            ends = self._ends_with(name, column[there], told.seen)
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

    def _ends_with(self, name: str, values: Floats, seen: dict[str, Ends]) -> Ends:
        known = self._ends.get(name)
        if known is not None:
            return known
        low, high = seen.get(name, (math.inf, -math.inf))
        seen[name] = min([low, *values.tolist()]), max([high, *values.tolist()])
        return seen[name]

    def _ends_differ(self, name: str) -> bool:
        """Of a source that gave one value only nobody knows which end that is."""
        low, high = self._ends.get(name) or self._seen.get(name, (math.inf, -math.inf))
        return low < high


def before(steps: Mapping[int, T], step: int) -> dict[int, T]:
    """What is kept of steps when `step` is done: those before it, the newest `KEPT`."""
    return {number: of for number, of in steps.items() if step - KEPT < number < step}


def value_of(sample: Sample, source: str) -> float | None:
    """What a source gave a sample; None where it did not score it."""
    reward = sample.rewards.get(source)
    return None if reward is None or reward.status != "scored" else reward.value


def _column(values: Any) -> Floats:
    """Numbers as an array, nan where there is none."""
    found = [math.nan if value is None else float(value) for value in values]
    return np.array(found, dtype=np.float64)
