"""Group statistics: rewards of one group become advantages.

The invariant: only rewards that are there count. A missing reward (None: failed or abstained)
enters no mean and no deviation, gets advantage 0 and a False in the mask, and shifts nobody.
Pure numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Algorithm = Literal["grpo", "dr_grpo", "rloo"]


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of one group, aligned with its rewards.

    `values` (float64) are finite, and 0.0 where `mask` is False: no reward was there. `scored` is
    how many were. `enough` says whether these are at least `min_scored`; if not, the group is to
    be discarded. `signal` is False if all values are 0: too few rewards, or all equal. `mean` is
    that of the present rewards, NaN if there are none; `std` is their sample deviation (divisor
    n - 1), 0.0 for fewer than two.
    """

    values: NDArray[np.float64]
    mask: NDArray[np.bool_]
    scored: int
    enough: bool
    signal: bool
    mean: float
    std: float


def group_advantages(
    rewards: Sequence[float | None],
    *,
    algorithm: Algorithm,
    eps: float = 1e-4,
    min_scored: int = 2,
) -> Advantages:
    """The advantages of one group's samples.

    Args:
        rewards: one per sample, None where a sample has none.
        algorithm: `grpo`: (r - mean) / (std + eps), arXiv 2402.03300, with the sample deviation;
            `dr_grpo`: r - mean, arXiv 2503.20783; `rloo`: r - mean of the others,
            arXiv 2402.14740.
        eps: in the rewards' unit, >= 0; only `grpo` uses it.
        min_scored: with fewer rewards than this (and always with fewer than two), all
            advantages are 0.

    Raises:
        ValueError: a reward is not finite (by now a failure must be None) or so large that the
            result is not; an argument is out of range.
    """
    if algorithm not in get_args(Algorithm):
        raise ValueError(f"algorithm must be one of {get_args(Algorithm)}, got {algorithm!r}")
    if not 0.0 <= eps < math.inf or min_scored < 1:
        raise ValueError(f"eps must be >= 0 and min_scored >= 1, got {eps} and {min_scored}")
    for i, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"reward {i} is {reward}: a failure must be None, not a number")
    mask = np.array([reward is not None for reward in rewards], dtype=np.bool_)
    present = [float(reward) for reward in rewards if reward is not None]
    n = len(present)
    mean, std, centred = _moments(present)
    values = np.zeros(len(rewards), dtype=np.float64)
    enough = n >= min_scored
    signal = enough and n >= 2 and min(present) < max(present)
    if signal:
        values[mask] = _scaled(centred, algorithm, std + eps)
    if not (np.isfinite(values).all() and math.isfinite(std)):
        raise ValueError(f"rewards {present} give advantages that are not finite")
    return Advantages(values, mask, n, enough, signal, mean, std)


def gdpo_advantages(
    parts: Sequence[Mapping[str, float] | None],
    weights: Mapping[str, float],
    *,
    eps: float = 1e-4,
    min_scored: int = 2,
    vetoed: Sequence[bool] = (),
) -> Advantages:
    """The advantages of one group, each source normalised on its own (GDPO, arXiv 2601.05242).

    A source's advantages are (value - mean) / (std + eps) over the samples that have its value;
    a sample's is their weighted sum, over the sources that it has a value of and at the size that
    all would give it, then centred within the group. The batch's scale is `batch_scaled`'s.

    Args:
        parts: one a sample: values by source; None where the sample was dropped.
        weights: of all sources that add to this group's row; with signed weights absolute values
            count.
        vetoed: one a sample, or none at all: no vetoed sample is better than any other, also where
            one of them lacks a source.

    Raises:
        ValueError: as `group_advantages`.
    """
    mask = np.array([values is not None for values in parts], dtype=np.bool_)
    n = int(mask.sum())
    by_source = {
        name: group_advantages(
            [None if values is None else values.get(name) for values in parts],
            algorithm="grpo",
            eps=eps,
        )
        for name in weights
    }
    whole = math.fsum(abs(weight) for weight in weights.values())
    found = np.zeros(len(parts), dtype=np.float64)
    enough = n >= min_scored
    for i, values in enumerate(parts):
        there = [name for name in weights if values is not None and name in values]
        size = math.fsum(abs(weights[name]) for name in there)
        if enough and size > 0:
            total = math.fsum(weights[name] * by_source[name].values[i] for name in there)
            found[i] = total / size * whole
    out = np.array([*vetoed] or [False] * len(parts), dtype=np.bool_) & mask
    if out.any() and (mask & ~out).any():
        found[out] = np.minimum(found[out], found[mask & ~out].min())
    if found.any():
        found[mask] -= math.fsum(found[mask]) / n
    return Advantages(found, mask, n, enough, bool(found.any()), 0.0, _moments([*found[mask]])[1])


def batch_scaled(
    advantages: Sequence[NDArray[np.float64]], *, eps: float = 1e-4
) -> list[NDArray[np.float64]]:
    """GDPO's second step: divided by the deviation over all samples of the batch, plus eps.

    The mean is 0 already, group by group, so groups without signal stay at 0.
    """
    flat = [float(value) for of_group in advantages for value in of_group]
    spread = _moments(flat)[1] + eps
    return [of_group / spread for of_group in advantages]


def _moments(present: list[float]) -> tuple[float, float, NDArray[np.float64]]:
    """Mean, sample deviation and centred rewards; exact sums, so that order does not matter."""
    n = len(present)
    if n == 0:
        return math.nan, 0.0, np.zeros(0)
    if min(present) == max(present):
        return present[0], 0.0, np.zeros(n)
    largest = max(abs(reward) for reward in present)
    scale = math.ldexp(1.0, math.frexp(largest)[1] - 1)  # a power of two: exact, no overflow
    mean = math.fsum(reward / scale for reward in present) / n
    centred = [reward / scale - mean for reward in present]
    std = math.sqrt(math.fsum(c * c for c in centred) / (n - 1))
    with np.errstate(over="ignore"):
        return mean * scale, std * scale, np.array(centred) * scale


def _scaled(
    centred: NDArray[np.float64], algorithm: Algorithm, spread: float
) -> NDArray[np.float64]:
    if algorithm == "grpo":
        return centred / spread
    if algorithm == "rloo":  # r - mean of the others = (r - mean) * n / (n - 1)
        return centred * (len(centred) / (len(centred) - 1))
    return centred
