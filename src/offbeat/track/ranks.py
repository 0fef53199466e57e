"""Spearman's correlation, pooled over parts (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LEAST = 3
"""Pairs that a correlation needs to be told."""


def ranks_within(values: Floats, parts: Ints) -> Floats:
    """Ranks among the members of the same part, less their mean, divided by the part's size.

    Equal values share the mean of their ranks. `parts` are numbers from 0.
    """
    order = np.lexsort((values, parts))
    sorted_parts, sorted_values = parts[order], values[order]
    apart = np.ones(len(values), dtype=bool)
    apart[1:] = sorted_parts[1:] != sorted_parts[:-1]
    apart[1:] |= sorted_values[1:] != sorted_values[:-1]
    first = np.flatnonzero(apart)
    runs = np.cumsum(apart) - 1
    place = (first + (np.bincount(runs) - 1) / 2)[runs]
    sizes = np.bincount(parts)
    starts = np.cumsum(sizes) - sizes
    ranks = np.empty(len(values))
    ranks[order] = place - starts[sorted_parts] - (sizes[sorted_parts] - 1) / 2
    result: Floats = ranks / sizes[parts]
    return result


@dataclass(slots=True)
class RankCorrelation:
    """Spearman's correlation pooled over parts (steps, groups): ranks are those within a part.

    What differs between parts (a later step's longer answers, an easier prompt) does not count. A
    part in which one of the two never changes says nothing and is left out. `n` counts pairs.
    """

    n: int = 0
    parts: int = 0
    both: float = 0.0
    one: float = 0.0
    other: float = 0.0

    def add(self, one: Floats, other: Floats, parts: Ints | None = None) -> None:
        """Takes pairs of finite numbers, each in the part of that number; by default all in one."""
        if len(one) == 0:
            return
        if parts is None:
            parts = np.zeros(len(one), dtype=np.int64)
        left, right = ranks_within(one, parts), ranks_within(other, parts)
        ones, others = np.bincount(parts, left * left), np.bincount(parts, right * right)
        tells = (ones > 0) & (others > 0)
        self.n += int(np.bincount(parts)[tells].sum())
        self.parts += int(tells.sum())
        self.both += float(np.bincount(parts, left * right)[tells].sum())
        self.one += float(ones[tells].sum())
        self.other += float(others[tells].sum())

    def merge(self, more: RankCorrelation) -> None:
        """Takes the parts of another one too."""
        self.n += more.n
        self.parts += more.parts
        self.both += more.both
        self.one += more.one
        self.other += more.other

    @property
    def value(self) -> float | None:
        """From -1 to 1; None where there is nothing to compare."""
        if self.parts == 0 or self.n < LEAST:
            return None
        return max(-1.0, min(1.0, self.both / math.sqrt(self.one * self.other)))


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's correlation; None of fewer than three pairs or where one never changes."""
    pooled = RankCorrelation()
    pooled.add(np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64))
    return pooled.value
