"""The failure budget: it trips on a share, not on a streak, and heals by what comes after."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.reward.budget import RECOVERY_MINIMUM, RECOVERY_WINDOW, FailureBudget

OUTCOMES = st.lists(st.sampled_from([None, "timeout", "unparseable"]), max_size=200)


def recorded(budget: FailureBudget, outcomes: list[str | None]) -> FailureBudget:
    for outcome in outcomes:
        budget.record(outcome)
    return budget


def share(outcomes: list[str | None]) -> float:
    return sum(o is not None for o in outcomes) / len(outcomes)


def test_it_needs_a_minimum_and_more_than_the_share() -> None:
    budget = recorded(FailureBudget(0.5), ["timeout"] * 15)
    assert not budget.over
    assert budget.share == 1.0
    budget.record(None)
    assert budget.over
    assert budget.causes() == "timeout 15"
    half = recorded(FailureBudget(0.5), [None, "timeout"] * 32)
    assert (half.over, half.share) == (False, 0.5)
    half.record("timeout")  # and a None leaves the window
    assert half.over


def test_old_outcomes_are_forgotten() -> None:
    budget = recorded(FailureBudget(0.5), [None] * 1000)
    recorded(budget, ["timeout"] * 32)
    assert (budget.over, budget.share) == (False, 0.5)
    budget.record("timeout")
    assert budget.over


def test_it_recovers_by_what_comes_after() -> None:
    budget = recorded(FailureBudget(0.5), ["timeout"] * 16)
    recorded(budget, [None, None, None])
    assert (budget.over, budget.share) == (True, 1.0)
    budget.record("timeout")
    assert (budget.over, budget.share) == (False, 0.25)
    assert budget.causes() == "timeout 1"
    recorded(budget, ["timeout"] * 11)
    assert not budget.over, "the minimum holds again: 15 are known"
    budget.record("timeout")
    assert budget.over


def test_in_recovery_only_the_last_eight_count() -> None:
    budget = recorded(FailureBudget(0.5), ["timeout"] * 116)
    assert (budget.over, budget.share) == (True, 1.0)
    recorded(budget, [None] * 3)
    assert (budget.over, budget.share) == (True, 0.625)
    budget.record(None)
    assert not budget.over


def test_causes_are_the_commonest_first() -> None:
    outcomes = ["a", "b", "b", "c", "c", "c", "d", None, "d", "d", "d"]
    assert recorded(FailureBudget(1.0), outcomes).causes() == "d 4, c 3, b 2"
    assert FailureBudget(0.5).causes() == ""
    assert FailureBudget(0.5).share == 0.0


def test_what_is_no_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="max_failed_share"):
        FailureBudget(1.5)
    with pytest.raises(ValueError, match="minimum"):
        FailureBudget(0.5, window=8, minimum=9)


@given(OUTCOMES)
def test_a_share_of_one_never_trips(outcomes: list[str | None]) -> None:
    budget = FailureBudget(1.0, minimum=1)
    for outcome in outcomes:
        budget.record(outcome)
        assert not budget.over


@given(OUTCOMES, st.floats(0, 1), st.integers(1, 20), st.integers(0, 30))
def test_it_agrees_with_its_definition(
    outcomes: list[str | None], most: float, minimum: int, more: int
) -> None:
    window = minimum + more
    budget = FailureBudget(most, window=window, minimum=minimum)
    seen: list[str | None] = []
    over = False
    for outcome in outcomes:
        budget.record(outcome)
        seen.append(outcome)
        last = seen[-(RECOVERY_WINDOW if over else window) :]
        enough = len(last) >= (RECOVERY_MINIMUM if over else minimum)
        if over and enough and share(last) <= most:
            over, seen = False, last
        elif not over and enough and share(last) > most:
            over, seen = True, []
        assert budget.over == over
        assert 0 <= budget.share <= 1


@given(OUTCOMES, st.floats(0, 1))
def test_good_outcomes_always_heal_it(outcomes: list[str | None], most: float) -> None:
    budget = recorded(FailureBudget(most), outcomes)
    recorded(budget, [None] * 64)
    assert not budget.over
