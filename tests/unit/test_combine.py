"""Error is not zero: what is absent enters no sum."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.advantage import gdpo_advantages, group_advantages
from offbeat.config import RewardSourceSection
from offbeat.records import Reward
from offbeat.reward.combine import combine, combine_group, decide


def section(on_failure: str = "retry_then_drop_sample", **settings: object) -> RewardSourceSection:
    return RewardSourceSection.model_validate(
        {"kind": "function", "function": "r.py:f", "on_failure": on_failure} | settings
    )


def of(**values: float | str | None) -> dict[str, Reward]:
    """Rewards by source: a number, None for abstained, a text for the cause of a failure."""
    return {
        name: Reward.abstained(name) if value is None
        else Reward.failed(name, value) if isinstance(value, str)
        else Reward.scored(name, value)
        for name, value in values.items()
    }  # fmt: skip


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
    assert combine({"a": Reward.scored("a", 1e31)}, {"a": 1.0}) is None, "no float32 could hold it"


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


ADD = {"right": section(weight=1.0), "style": section(weight=0.5, on_failure="abstain")}


def test_a_gate_that_multiplies() -> None:
    config = ADD | {"format": section(role="multiply")}
    one, half, none = combine_group(
        [of(right=1.0, style=2.0, format=f) for f in (1.0, 0.5, 0.0)], config
    )
    assert (one.total, half.total, none.total) == (2.0, 1.0, 0.0)
    assert half.parts == {"right": 0.5, "style": 1.0}


def test_a_veto_leaves_nothing_and_is_never_the_better_choice() -> None:
    config = {"scorer": section(), "format": section(role="veto", veto_below=1.0)}
    good, vetoed = combine_group([of(scorer=3.0, format=1.0), of(scorer=9.0, format=0.9)], config)
    assert (good.total, vetoed.total, vetoed.parts) == (3.0, 0.0, {"scorer": 0.0})
    negative = [of(scorer=-3.0, format=1.0), of(scorer=-9.0, format=1.0), of(scorer=5.0, format=0)]
    assert [one.total for one in combine_group(negative, config)] == [-3.0, -9.0, -9.0]


def test_a_gate_without_a_value_does_nothing_unless_its_failure_drops_the_sample() -> None:
    for role in ("multiply", "veto"):
        config = {"right": section(), "format": section(role=role, on_failure="abstain")}
        (kept,) = combine_group([of(right=0.5, format=None)], config)
        assert (kept.total, kept.verdict) == (0.5, "keep")
        config["format"] = section(role=role)
        (dropped,) = combine_group([of(right=0.5, format="timeout")], config)
        assert (dropped.total, dropped.parts, dropped.verdict) == (None, {}, "drop_sample")


def test_what_is_absent_is_renormalised_within_the_rows_own_sources() -> None:
    config = ADD | {"other": section(weight=100.0)}
    (found,) = combine_group([of(right=0.4, style=None)], config)
    assert found.total == pytest.approx(0.4 * 1.5), "a source that the row did not pick is no part"
    assert found.parts == {"right": 0.4}


values = st.one_of(st.none(), st.floats(-10, 10), st.just("timeout"))


@given(st.lists(st.tuples(values, values, st.one_of(st.none(), st.floats(0, 1))), min_size=1))
def test_failures_enter_no_total_and_vetoed_samples_are_never_the_best(
    group: list[tuple[float | str | None, float | str | None, float | None]],
) -> None:
    config = ADD | {"format": section(role="veto", on_failure="abstain")}
    rewards = [of(right=r, style=s, format=f) for r, s, f in group]
    found = combine_group(rewards, config)
    assert len(found) == len(group)
    free = [o.total for o, (_, _, f) in zip(found, group, strict=True) if f is None or f >= 0.5]
    lowest = min((t for t in free if t is not None), default=0.0)
    for one, (right, _, gate) in zip(found, group, strict=True):
        if right == "timeout":
            assert (one.total, one.verdict) == (None, "drop_sample")
        elif gate is not None and gate < 0.5:
            assert one.total is not None
            assert one.total <= min(0.0, lowest)


def test_a_dropped_samples_total_is_not_a_vetoed_ones() -> None:
    """What is left of a failed sample, at the size that it would have had, is no one's reward."""
    config = {
        "a": section(weight=0.1),
        "b": section(weight=10.0),
        "format": section(role="veto", on_failure="abstain"),
    }
    failed = of(a=-1.0, b="timeout", format=1.0)
    dropped, vetoed, _ = combine_group(
        [failed, of(a=1.0, b=1.0, format=0.0), of(a=1.0, b=1.0, format=1.0)], config
    )
    assert (dropped.total, vetoed.total, vetoed.vetoed) == (None, 0.0, True)


weights = st.sampled_from([-2.0, -0.5, 1.0, 3.0])


@given(
    st.lists(st.tuples(values, values, st.one_of(st.none(), st.floats(0, 1))), min_size=2),
    st.tuples(weights, weights),
)
def test_no_vetoed_sample_has_a_better_advantage_than_another(
    group: list[tuple[float | str | None, float | str | None, float | None]],
    signed: tuple[float, float],
) -> None:
    """Whatever the weights' signs, and whichever sources failed for whom; by either combination."""
    config = {
        "a": section(weight=signed[0], on_failure="abstain"),
        "b": section(weight=signed[1]),
        "format": section(role="veto", on_failure="abstain"),
    }
    found = combine_group([of(a=a, b=b, format=f) for a, b, f in group], config)
    by_source = gdpo_advantages(
        [None if one.total is None else one.parts for one in found],
        {"a": signed[0], "b": signed[1]},
        vetoed=[one.vetoed for one in found],
    )
    summed = group_advantages([one.total for one in found], algorithm="grpo")
    kept = [i for i, one in enumerate(found) if one.total is not None]
    for advantages in (by_source.values, summed.values):
        free = [advantages[i] for i in kept if not found[i].vetoed]
        for i in kept:
            if found[i].vetoed and free:
                assert advantages[i] <= min(free) + 1e-9
