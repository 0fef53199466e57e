"""Normalised scores: against numpy, finite whatever comes, and never another order in a group."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config import RewardSourceSection
from offbeat.reward.normalise import Normalizer, Running

SCORE = st.floats(allow_nan=False, allow_infinity=False)
TAME = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))
GROUP = st.lists(TAME, max_size=6)


def normalizer(**settings: Any) -> Normalizer:
    base = {"kind": "disrm", "model": "m"}
    return Normalizer(RewardSourceSection.model_validate(base | settings))


def running() -> Normalizer:
    return normalizer(normalize="running")


@given(st.lists(TAME, min_size=1, max_size=200))
def test_running_numbers_are_numpys(values: list[float]) -> None:
    seen = Running()
    for value in values:
        seen.add(value)
    size = max(map(abs, values))
    assert seen.n == len(values)
    assert seen.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9 * size)
    assert seen.deviation == pytest.approx(np.std(values), rel=1e-6, abs=1e-9 * size)


@given(st.lists(GROUP, min_size=1, max_size=10))
def test_a_group_is_normalised_with_all_that_was_learnt_its_own_included(
    groups: list[list[float]],
) -> None:
    scores = running()
    seen: list[float] = []
    for group in groups:
        seen += group
        found = scores.group(group, learn=True)
        if not seen:
            assert found == []
            continue
        mean, deviation = float(np.mean(seen)), float(np.std(seen))
        if deviation > 1e-6 * max(1.0, abs(mean)):
            wanted = [(value - mean) / deviation for value in group]
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        facts = scores.facts()
        assert facts["normalize_n"] == len(seen)
        assert facts["normalize_mean"] == pytest.approx(mean, rel=1e-9, abs=1e-6)


@given(st.lists(GROUP, max_size=4), GROUP, st.booleans())
def test_order_and_ratios_of_differences_are_kept(
    before: list[list[float]], group: list[float], learn: bool
) -> None:
    scores = running()
    for earlier in before:
        scores.group(earlier, learn=True)
    found = scores.group(group, learn=learn)
    pairs = [(a, b) for a in range(len(group)) for b in range(len(group)) if group[a] < group[b]]
    assert all(found[a] < found[b] for a, b in pairs)
    if pairs:
        steps = [(found[b] - found[a]) / (group[b] - group[a]) for a, b in pairs]
        size = max(abs(x) for x in found) / min(abs(group[b] - group[a]) for a, b in pairs)
        assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-6, abs=1e-12 * size)


@given(st.lists(st.tuples(st.lists(SCORE, max_size=6), st.booleans()), max_size=8))
def test_nothing_overflows_and_no_order_is_turned(
    groups: list[tuple[list[float], bool]],
) -> None:
    scores = running()
    for group, learn in groups:
        found = scores.group(group, learn=learn)
        assert all(map(math.isfinite, found))
        order = sorted(range(len(group)), key=lambda i: group[i])
        assert [found[i] for i in order] == sorted(found)
        assert all(map(math.isfinite, scores.facts().values()))


def test_the_largest_numbers() -> None:
    most = sys.float_info.max
    scores = running()
    assert scores.group([most, -most], learn=True) == [1.0, -1.0]
    assert normalizer(normalize="affine", affine=(10, 0)).group([most, -most], learn=True) == [
        most,
        -most,
    ]
    tiny = running()
    tiny.group([0.0, 5e-324], learn=True)
    assert tiny.group([most, -most], learn=False) == [most, -most]


def test_before_there_is_a_deviation_only_the_mean_goes() -> None:
    scores = running()
    assert scores.group([3.0], learn=True) == [0.0]
    assert scores.group([3.0, 3.0], learn=True) == [0.0, 0.0]
    assert scores.group([4.0], learn=False) == [1.0]
    assert scores.facts() == {"normalize_mean": 3.0, "normalize_std": 0.0, "normalize_n": 3.0}
    assert running().group([7.0, 8.0], learn=False) == [7.0, 8.0]


def test_a_validation_is_normalised_and_teaches_nothing() -> None:
    scores = running()
    scores.group([1.0, 3.0], learn=True)
    before = scores.facts()
    assert scores.group([5.0, 2.0], learn=False) == [3.0, 0.0]
    assert scores.facts() == before


@given(GROUP)
def test_affine_and_none(group: list[float]) -> None:
    affine = normalizer(normalize="affine", affine=(-0.5, 2))
    assert affine.group(group, learn=True) == [-0.5 * value + 2 for value in group]
    assert affine.facts() == {}
    assert normalizer().group(group, learn=True) == group
    assert normalizer().facts() == {}


@pytest.mark.parametrize("kind", ["none", "running"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_a_bug_and_change_nothing(kind: str, bad: float) -> None:
    scores = normalizer(normalize=kind)
    with pytest.raises(ValueError, match="not finite"):
        scores.group([1.0, bad], learn=True)
    assert scores.group([1.0], learn=False) == [1.0]
