"""The engine against the trainer: how far their log-probs of the same tokens lie apart, and why.

A token's two log-probs agree, but for rounding, if both are computed under the weights of the
version that made it. What is left then is the engine's error, and is told apart from what training
changed since. Pure: numbers in, numbers and a sentence out.

What it misses: a fault that moves log-probs by less than the limits below; an engine stuck on
weights older than all that the trainer still has is found but not named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

RATIO_BAND = (0.9, 1.1)
MIN_TOKENS = 16
"""Fewer compared tokens give no diagnosis."""

EXACT_LIMITS = (2e-3, 0.01)
ROUGH_LIMITS = (0.02, 0.1)
"""Mean |difference| in nats and share of ratios outside 0.9 to 1.1: beyond either is drift. The
second pair where engine or trainer computes in less than float32."""

POLICY_OUTSIDE = 0.3
"""Share of all trained tokens with a ratio outside 0.9 to 1.1, beyond which the policy has changed
too much since they were made."""

FITS_BETTER = 0.5
"""A cause is named if it leaves at most this share of the difference."""

SLOPE_BAND = (0.92, 1.08)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DriftContext:
    """The settings that a diagnosis names."""

    engine_dtype: str
    trainer_dtype: str
    on_update: str
    temperature: float


@dataclass(frozen=True, slots=True)
class DriftStats:
    """Over tokens with both log-probs; differences are |trainer - engine| in nats.

    `exact`: the trainer's are under each token's own version; else under its newest weights, so
    that the policy's change is in them. `outside`: share of exp(trainer - engine) outside 0.9 to
    1.1. `slope` of the line trainer = a + slope x engine, and the mean difference that the line
    `left`. `mixed`, `unmixed`: mean differences of tokens in samples that an earlier version began,
    and of all others (None: no such tokens). `by_lag`: mean difference under the newest weights by
    steps since the token's version; `ratio_outside`: share of those outside. `fits`, only where
    engine and trainer differ: mean difference of the tokens that `version` made (the unmixed ones
    if there are any) under each version's weights, its own among them; `like_engine` the same under
    its own, computed in the engine's type (None: that is the trainer's).
    """

    tokens: int
    exact: bool
    mean: float
    p99: float
    max: float
    outside: float
    slope: float = 1.0
    left: float = 0.0
    mixed: float | None = None
    unmixed: float | None = None
    version: int = -1
    fits: Mapping[int, float] = field(default_factory=dict)
    like_engine: float | None = None
    by_lag: Mapping[int, float] = field(default_factory=dict)
    ratio_outside: float = 0.0


def compare(
    engine: Floats, trainer: Floats, mixed: NDArray[np.bool_], *, exact: bool
) -> DriftStats:
    """Statistics of (T,) log-probs; pairs that are not finite are left out. NaN of nothing."""
    finite = np.isfinite(engine) & np.isfinite(trainer)
    engine, trainer, mixed = engine[finite], trainer[finite], mixed[finite]
    if not len(engine):
        nan = float("nan")
        return DriftStats(0, exact, nan, nan, nan, nan)
    off = np.abs(trainer - engine)
    slope, left = _line(engine, trainer)
    return DriftStats(
        tokens=len(off),
        exact=exact,
        mean=float(off.mean()),
        p99=float(np.quantile(off, 0.99)),
        max=float(off.max()),
        outside=outside_band(trainer - engine),
        slope=slope,
        left=left,
        mixed=float(off[mixed].mean()) if mixed.any() else None,
        unmixed=float(off[~mixed].mean()) if not mixed.all() else None,
    )


def outside_band(log_ratios: Floats) -> float:
    """Share of ratios outside 0.9 to 1.1; NaN of nothing."""
    low, high = np.log(RATIO_BAND)
    outside = (log_ratios < low) | (log_ratios > high)
    return float(outside.mean()) if len(outside) else float("nan")


def beyond(stats: DriftStats, context: DriftContext) -> bool:
    """Engine and trainer differ by more than rounding explains."""
    mean, outside = _limits(context)
    return stats.exact and stats.tokens >= MIN_TOKENS and (
        stats.mean > mean or stats.outside > outside
    )  # fmt: skip


def diagnose(stats: DriftStats, context: DriftContext) -> str | None:
    """The likely cause in words, "cause: evidence; what to do"; None while all is well."""
    if not beyond(stats, context):
        return _policy_change(stats, context)
    size = f"mean difference {stats.mean:.2g} nats, {stats.outside:.0%} of ratios outside 0.9-1.1"
    if _types_explain(stats):
        return _numerics(context, size)
    if (step := _better_version(stats)) is not None:
        return (
            f"weights not loaded: tokens of version {stats.version} fit version {step} better "
            f"({stats.fits[step]:.2g} instead of {stats.fits[stats.version]:.2g} nats); {size}"
        )
    if _stale_cache(stats, context):
        return (
            f"stale KV cache: samples that cross an update differ by {stats.mixed:.2g} nats, "
            f"others by {stats.unmixed or 0:.2g}; {size}; rollout.on_update = "
            f'"{context.on_update}" ' + (
                'keeps old keys and values, "recompute" does not'
                if context.on_update == "keep_kv"
                else "should have computed them anew"
            )
        )  # fmt: skip
    low, high = SLOPE_BAND
    if not low <= stats.slope <= high and stats.left <= FITS_BETTER * stats.mean:
        return (
            f"temperature: the trainer's log-probs are {stats.slope:.2g} times the engine's, as if "
            f"it recorded another distribution than that of rollout.temperature = "
            f"{context.temperature:g}; {size}"
        )
    if _is_rough(context):
        return _numerics(context, size)
    return (
        f"unexplained: engine and trainer differ under the same weights; {size}; check that every "
        "tensor is loaded (tied embeddings) and that no cache outlives an update"
    )


def cause_of(diagnosis: str) -> str:
    """The cause alone: the words before the colon."""
    return diagnosis.partition(":")[0]


def _policy_change(stats: DriftStats, context: DriftContext) -> str | None:
    lags = sorted(lag for lag in stats.by_lag if lag > 0)
    if not lags or not stats.exact or not stats.ratio_outside > POLICY_OUTSIDE:
        return None
    oldest = stats.by_lag[lags[-1]]
    if stats.tokens < MIN_TOKENS or oldest <= max(stats.mean, _limits(context)[0]):
        return None
    return (
        f"policy change: the engine agrees (mean difference {stats.mean:.2g} nats), but tokens "
        f"{lags[-1]} steps old differ by {oldest:.2g}, and {stats.ratio_outside:.0%} of all ratios "
        "are outside 0.9-1.1; lower train.learning_rate or train.max_staleness"
    )


def _numerics(context: DriftContext, size: str) -> str:
    engine, trainer = context.engine_dtype, context.trainer_dtype
    if engine == trainer:
        mend = 'model.dtype and rollout.dtype "float32" are exact'
    else:
        mend = 'rollout.dtype = "auto" computes in the trainer\'s'
    return (
        f"engine numerics: the engine computes in {engine}, the trainer in {trainer}; {size}; "
        f"{mend}"
    )


def _types_explain(stats: DriftStats) -> bool:
    """Computed in the engine's type the trainer agrees, better than under any other weights.

    Weights that are rounded move in other steps than those that are not: between versions that lie
    near one another the types can make more of a difference than the versions.
    """
    own, like = stats.fits.get(stats.version), stats.like_engine
    return own is not None and like is not None and like <= FITS_BETTER * own and all(
        like <= fit for fit in stats.fits.values()
    )  # fmt: skip


def _better_version(stats: DriftStats) -> int | None:
    """Another version whose weights fit the tokens far better than those of their own."""
    own = stats.fits.get(stats.version)
    if own is None:
        return None
    step = min(stats.fits, key=lambda s: stats.fits[s])
    return step if stats.fits[step] <= FITS_BETTER * own else None


def _stale_cache(stats: DriftStats, context: DriftContext) -> bool:
    """Mixed samples carry the difference: others are within the limit, or far below them."""
    if stats.mixed is None or stats.mixed <= _limits(context)[0]:
        return False
    if stats.unmixed is None:
        return context.on_update == "keep_kv"
    return stats.unmixed <= FITS_BETTER * stats.mixed


def _is_rough(context: DriftContext) -> bool:
    return (context.engine_dtype, context.trainer_dtype) != ("float32", "float32")


def _limits(context: DriftContext) -> tuple[float, float]:
    return ROUGH_LIMITS if _is_rough(context) else EXACT_LIMITS


def _line(engine: Floats, trainer: Floats) -> tuple[float, float]:
    """Slope of the least-squares line, and the mean |difference| that is left around it."""
    x, y = engine - engine.mean(), trainer - trainer.mean()
    spread = float((x * x).sum())
    if spread <= 1e-12:
        return 1.0, float(np.abs(trainer - engine).mean())
    slope = float((x * y).sum()) / spread
    return slope, float(np.abs(y - slope * x).mean())
