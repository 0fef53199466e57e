"""Error is not zero: what is absent enters no sum."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config import RewardSourceSection
from offbeat.records import Reward
from offbeat.reward.combine import combine, decide


def section(on_failure: str = "retry_then_drop_sample") -> RewardSourceSection:
    return RewardSourceSection.model_validate(
        {"kind": "function", "function": "r.py:f", "on_failure": on_failure}
    )


def test_weighted_sum() -> None:
    rewards = {"a": Reward.scored("a", 1.0), "b": Reward.scored("b", 0.5)}
    assert combine(rewards, {"a": 1.0, "b": 2.0}) == 2.0


@pytest.mark.parametrize(
    "absent",
    [
        Reward.failed("b", "timeout"),
        Reward.abstained("b"),
        Reward("b", "scored", math.nan),
        Reward("b", "scored", math.inf),
        Reward("b", "scored", None),
    ],
)
def test_absent_is_renormalised_away(absent: Reward) -> None:
    rewards = {"a": Reward.scored("a", 0.4), "b": absent}
    assert combine(rewards, {"a": 1.0, "b": 2.0}) == pytest.approx(0.4 * 3)


def test_nothing_present() -> None:
    assert combine({"a": Reward.abstained("a")}, {"a": 1.0}) is None
    only_weightless = {"a": Reward.scored("a", 1.0), "b": Reward.failed("b", "timeout")}
    assert combine(only_weightless, {"a": 0.0, "b": 1.0}) is None
    huge = {"a": Reward.scored("a", 1e308), "b": Reward.scored("b", 1e308)}
    assert combine(huge, {"a": 1.0, "b": 1.0}) is None


def test_signed_weights() -> None:
    rewards = {"good": Reward.scored("good", 1.0), "penalty": Reward.failed("penalty", "timeout")}
    assert combine(rewards, {"good": 1.0, "penalty": -1.0}) == 2.0


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.tuples(st.floats(0.1, 10), st.one_of(st.none(), st.floats(-5, 5))),
        min_size=1,
    )
)
def test_total_lies_within_what_is_present(parts: dict[str, tuple[float, float | None]]) -> None:
    rewards = {
        name: Reward.abstained(name) if value is None else Reward.scored(name, value)
        for name, (_, value) in parts.items()
    }
    weights = {name: weight for name, (weight, _) in parts.items()}
    total = combine(rewards, weights)
    values = [value for _, value in parts.values() if value is not None]
    if not values:
        assert total is None
        return
    assert total is not None
    mean = total / sum(weights.values())
    assert min(values) - 1e-9 <= mean <= max(values) + 1e-9


def test_decisions() -> None:
    fine, broken = Reward.scored("a", 1.0), Reward.failed("b", "timeout")
    both = {"a": fine, "b": broken}
    drop, group, abstain = section(), section("drop_group"), section("abstain")
    assert decide({"a": fine}, {"a": drop}, 1.0) == "keep"
    assert decide(both, {"a": group, "b": drop}, 1.0) == "drop_sample"
    assert decide(both, {"a": drop, "b": group}, 1.0) == "drop_group"
    assert decide(both, {"a": drop, "b": abstain}, 1.0) == "keep"
    assert decide({"a": Reward.abstained("a")}, {"a": drop}, None) == "drop_sample"
