"""Scores brought to a common scale: by constants that are set, or by their own mean and deviation.

Invariant: all scores of a group are changed by one and the same rising (or, with a negative
factor, falling) straight line, so that their order and the ratios of their differences are kept;
what comes out is finite whatever finite goes in.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from offbeat.config import RewardSourceSection

LARGEST = sys.float_info.max
ROUNDING = 1e-12
"""A deviation below this share of the mean is the rounding of values that are all alike."""


class Running:
    """Mean and deviation (population's) of all values so far, by Welford's update.

    It keeps the deviation and not the sum of squares, which would overflow long before the values.
    """

    def __init__(self) -> None:
        self.n = 0
        self.mean = 0.0
        self.deviation = 0.0

    def add(self, value: float) -> None:
        """Takes one finite value into account."""
        self.n = n = self.n + 1
        share = math.sqrt(n - 1) / n
        # Divided before they are subtracted: the difference of two floats may be no float.
        apart = value * share - self.mean * share
        kept = self.deviation * math.sqrt((n - 1) / n)
        self.deviation = min(math.hypot(kept, apart), LARGEST)
        self.mean += value / n - self.mean / n


class Normalizer:
    """What `normalize` of a source does to a group's scores."""

    def __init__(self, section: RewardSourceSection) -> None:
        self._kind = section.normalize
        self._factor, self._term = section.affine
        self._seen = Running()

    def group(self, values: Sequence[float], *, learn: bool) -> list[float]:
        """The normalised scores of one group, in order; raises `ValueError` for one not finite.

        affine: factor * value + term. running: (value - mean) / deviation over all values learnt
        so far, with `learn` (not in a validation) this group's own among them; value - mean as
        long as all were alike. What is too large for a float becomes the largest one.
        """
        if not all(map(math.isfinite, values)):
            raise ValueError(f"scores that are not finite cannot be normalised: {list(values)}")
        if self._kind == "none":
            return [float(value) for value in values]
        if self._kind == "affine":
            return [_finite(self._factor * value + self._term) for value in values]
        for value in values if learn else ():
            self._seen.add(value)
        return [_finite(self._standard(value)) for value in values]

    def facts(self) -> dict[str, float]:
        """The constants of the running kind as they are now, for the metrics."""
        if self._kind != "running":
            return {}
        return {
            "normalize_mean": self._seen.mean,
            "normalize_std": self._seen.deviation,
            "normalize_n": float(self._seen.n),
        }

    def _standard(self, value: float) -> float:
        mean, deviation = self._seen.mean, self._seen.deviation
        apart = value - mean
        if deviation <= ROUNDING * abs(mean):
            return apart
        if math.isinf(apart):
            return value / deviation - mean / deviation
        return apart / deviation


def _finite(value: float) -> float:
    return max(-LARGEST, min(LARGEST, value))
