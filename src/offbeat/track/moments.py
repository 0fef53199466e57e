"""Mean and deviation of values that come in parts (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def mean(values: Sequence[float]) -> float:
    """The mean, of an exact sum: whoever takes it of the same values has the same bits. NaN of
    nothing."""
    return math.fsum(values) / len(values) if values else math.nan


@dataclass(slots=True)
class Moments:
    """Of `n` values the mean, and the sum of squares about it."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Takes one value."""
        self.pool(Moments(1, value))

    def pool(self, more: Moments) -> None:
        """Takes another's values too."""
        n = self.n + more.n
        if more.n:
            apart = more.mean - self.mean
            self.squares += more.squares + apart * apart * self.n * more.n / n
            self.mean += apart * more.n / n
        self.n = n

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the values; None of fewer than two."""
        return math.sqrt(self.squares / (self.n - 1)) if self.n > 1 else None
