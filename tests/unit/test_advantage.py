"""Group statistics: missing rewards shift nobody, and nothing is ever NaN."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.advantage import (
    Advantages,
    Algorithm,
    batch_scaled,
    gdpo_advantages,
    group_advantages,
)
from offbeat.config import TrainSection
from offbeat.records import Batch, Completion, Group, Prompt, Reward, Sample
from offbeat.train.step import batch_advantages

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
algorithms = st.sampled_from(ALGORITHMS)
numbers = st.floats(-1e3, 1e3).map(lambda x: round(x, 3))
rewards_lists = st.lists(st.none() | numbers, max_size=12)
permuted_lists = rewards_lists.flatmap(
    lambda rewards: st.tuples(st.just(rewards), st.permutations(range(len(rewards))))
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_g1_group_of_one(algorithm: Algorithm) -> None:
    for min_scored in (1, 2):
        result = group_advantages([0.7], algorithm=algorithm, min_scored=min_scored)
        assert result.values.tolist() == [0.0]
        assert not result.signal
        assert result.enough == (min_scored == 1)
        assert (result.mean, result.std) == (0.7, 0.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("reward", [1.0, 0.1, -3.3])
def test_g2_all_equal(algorithm: Algorithm, reward: float) -> None:
    result = group_advantages([reward] * 4, algorithm=algorithm)
    assert result.values.tolist() == [0.0] * 4
    assert result.enough
    assert not result.signal
    assert (result.mean, result.std) == (reward, 0.0)


def test_g3_one_missing() -> None:
    result = group_advantages([0.2, None, 0.8, 0.5], algorithm="grpo", eps=0.0)
    assert result.values == pytest.approx([-1.0, 0.0, 1.0, 0.0], abs=1e-12)
    assert result.mask.tolist() == [True, False, True, True]
    assert (result.mean, result.std) == pytest.approx((0.5, 0.3))
    assert result.signal


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_g5_dropped_samples_shift_nobody(algorithm: Algorithm) -> None:
    rewards = [None, 1.0, None, 0.0, 0.25, None, 1.0, 0.5]
    result = group_advantages(rewards, algorithm=algorithm)
    alone = group_advantages([r for r in rewards if r is not None], algorithm=algorithm)
    assert result.values[result.mask].tolist() == alone.values.tolist()
    assert result.values[~result.mask].tolist() == [0.0] * 3
    assert result.scored == 5


def test_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0]
    std = math.sqrt(1 / 3)
    grpo = group_advantages(rewards, algorithm="grpo").values
    assert grpo == pytest.approx([0.5 / (std + 1e-4) * sign for sign in (1, -1, -1, 1)])
    assert group_advantages(rewards, algorithm="dr_grpo").values.tolist() == [0.5, -0.5, -0.5, 0.5]
    rloo = group_advantages([1.0, 0.0, 0.5], algorithm="rloo").values
    assert rloo == pytest.approx([0.75, -0.75, 0.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_failure_is_not_a_number(bad: float) -> None:
    with pytest.raises(ValueError, match="reward 1 is"):
        group_advantages([0.0, bad], algorithm="grpo")


def test_limits() -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.7e308, -1.7e308, -1.7e308], algorithm="dr_grpo")
    with pytest.raises(ValueError, match="algorithm"):
        group_advantages([0.0], algorithm="gpro")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eps"):
        group_advantages([0.0], algorithm="grpo", eps=-1.0)
    empty = group_advantages([None, None], algorithm="grpo")
    assert empty.values.tolist() == [0.0, 0.0]
    assert math.isnan(empty.mean)
    few = group_advantages([0.0, 1.0, None], algorithm="rloo", min_scored=3)
    assert not few.enough
    assert few.values.tolist() == [0.0, 0.0, 0.0]


@settings(deadline=None)
@given(rewards_lists, algorithms)
def test_finite_zero_mean_and_aligned(rewards: list[float | None], algorithm: Algorithm) -> None:
    result = group_advantages(rewards, algorithm=algorithm)
    assert np.isfinite(result.values).all()
    assert result.values.shape == result.mask.shape == (len(rewards),)
    assert result.mask.tolist() == [r is not None for r in rewards]
    assert abs(result.values.sum()) <= 1e-9 * (1 + np.abs(result.values).sum())
    assert result.signal == bool(result.values.any())


@settings(deadline=None)
@given(rewards_lists, algorithms, st.integers(-1000, 1000))
def test_shift_changes_nothing(
    rewards: list[float | None], algorithm: Algorithm, shift: int
) -> None:
    moved = [None if r is None else r + shift for r in rewards]
    values = group_advantages(rewards, algorithm=algorithm).values
    assert group_advantages(moved, algorithm=algorithm).values == pytest.approx(values, abs=1e-7)


@settings(deadline=None)
@given(permuted_lists, algorithms)
def test_permutation_permutes(
    case: tuple[list[float | None], list[int]], algorithm: Algorithm
) -> None:
    rewards, order = case
    values = group_advantages(rewards, algorithm=algorithm).values
    permuted = group_advantages([rewards[i] for i in order], algorithm=algorithm).values
    assert permuted.tolist() == values[order].tolist() if order else permuted.size == 0


@settings(deadline=None)
@given(st.lists(numbers, min_size=2, max_size=12))
def test_rloo_leaves_one_out(rewards: list[float]) -> None:
    values = group_advantages(rewards, algorithm="rloo").values
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    assert values == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)], abs=1e-8)


def gdpo(*parts: dict[str, float] | None, **weights: float) -> Advantages:
    return gdpo_advantages(list(parts), weights or {"a": 1.0, "b": 1.0}, eps=0.0)


def test_gdpo_sources_of_any_size_weigh_the_same() -> None:
    """What a plain sum loses: with sums 1 and 100 apart, source b alone would decide."""
    found = gdpo({"a": 0.0, "b": 100.0}, {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0})
    assert found.signal
    assert found.values[0] == pytest.approx(found.values[1])
    assert found.values.sum() == pytest.approx(0.0, abs=1e-12)


def test_gdpo_tells_apart_what_a_sum_makes_equal() -> None:
    """arXiv 2601.05242: totals (0, 2) and (0, 1) have equal advantages under a normalised sum."""
    both = gdpo({"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 1.0})
    one = gdpo({"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 0.0})
    assert abs(both.values[1]) == pytest.approx(2 * abs(one.values[1]))


def test_gdpo_what_is_absent_is_no_zero() -> None:
    found = gdpo({"a": 1.0, "b": 5.0}, {"a": 0.0}, None, {"a": 0.5, "b": 5.0})
    assert found.mask.tolist() == [True, True, False, True]
    # a gives 1, -1, 0; b nothing; the second sample has only a, at the size of both; then centred.
    assert found.values == pytest.approx(np.array([4, -5, 0, 1]) / 3)


def test_gdpo_equal_values_are_no_signal() -> None:
    found = gdpo({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0}, {"a": 1.0})
    assert (found.signal, found.enough, found.scored) == (False, True, 3)
    assert not found.values.any()


def test_gdpo_scale_is_the_batches() -> None:
    groups = [np.array([1.0, -1.0]), np.zeros(2), np.array([3.0, -3.0])]
    scaled = batch_scaled(groups, eps=0.0)
    flat = np.concatenate(scaled)
    assert flat.std(ddof=1) == pytest.approx(1.0)
    assert not scaled[1].any(), "a group without signal stays without"
    assert scaled[2][0] == pytest.approx(3 * scaled[0][0])


def test_gdpo_weighs_only_the_sources_that_a_row_picks() -> None:
    """As a sum does: what a row does not pick is not missing."""
    weights = {"helpful": 0.5, "correct": 1.0}
    train = TrainSection.model_validate({"advantage_eps": 1e-9})

    def sample(index: int, name: str, value: float | None) -> Sample:
        done = Completion("r", index, "x", 1, 0, 0, "stop", None)
        if value is None:
            return Sample(done, {name: Reward.failed(name, "timeout")}, None)
        return Sample(done, {name: Reward.scored(name, value)}, value, {name: value})

    def group(ordinal: int, name: str) -> Group:
        values = (0.0, 1.0, None, 0.0, 1.0)
        samples = tuple(sample(i, name, value) for i, value in enumerate(values))
        return Group(Prompt(ordinal, np.array([1], np.int32), "q", "q"), 0, 9, samples)

    batch = Batch(0, (group(0, "helpful"), group(1, "correct")))
    half, whole = (one.values for one in batch_advantages(batch, train, weights))
    assert whole[1] > 0 > whole[0]
    assert half == pytest.approx(whole / 2)
