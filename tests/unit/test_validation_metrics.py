"""A validation's numbers: pass@k, data sources, and that a failure enters no mean."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.records import Reward
from offbeat.rollout.validation_metrics import MOST_SOURCES, Answer, ks, pass_at_k, summarise


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(right: list[bool], k: int) -> None:
    k = min(k, len(right))
    choices = list(combinations(right, k))
    expected = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(expected)


def test_pass_at_k_of_many_samples_is_exact_and_bounded() -> None:
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(5, 5, 1) == 1.0
    with pytest.raises(ValueError, match="k = 6"):
        pass_at_k(5, 1, 6)


def test_the_k_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [ks(n) for n in (1, 2, 3, 4, 6, 8)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8],
    ]  # fmt: skip


def scored(value: float) -> dict[str, Reward]:
    return {"judge": Reward.scored("judge", value)}


def failed(cause: str) -> dict[str, Reward]:
    return {"judge": Reward.failed("judge", cause)}


def test_every_number_by_hand() -> None:
    answers = [
        Answer(0, 4, "stop", 1.0, scored(0.9), 0.9),
        Answer(0, 6, "length", 0.0, scored(0.1), 0.1),
        Answer(1, 2, "stop", 0.4, failed("timeout"), None),
        Answer(1, 4, "stop", None, {"judge": Reward("judge", "abstained", cause="refused")}, None),
    ]
    found = summarise(answers, samples=2, sources=["maths", "code", None], rewards=["judge"])
    agreement = found.pop("agreement/judge")
    assert math.isnan(agreement), "two pairs are too few"
    assert found == {
        "accuracy": pytest.approx(1.4 / 3),
        "n": 3.0,
        "mean_tokens": 4.0,
        "truncated": 0.25,
        "unscored": 3.0,  # one without an opinion, and both of the refused prompt
        "pass@1": pytest.approx((0.5 + 0.0) / 2),  # of 1 and 0 right; a score of 0.4 is not right
        "pass@2": 1.0,  # only prompt 0 has two scores
        "accuracy/code": 0.4,
        "n/code": 1.0,
        "accuracy/maths": 0.5,
        "n/maths": 1.0,
        "reward": 0.5,
        "reward/judge": 0.5,
        "failed/judge": 2.0,
    }


def test_without_answers_means_are_nan_and_not_zero() -> None:
    found = summarise([], samples=1, sources=[None, None], rewards=["judge"])
    for name in ("accuracy", "mean_tokens", "truncated", "reward", "reward/judge"):
        assert math.isnan(found[name]), name
    assert (found["n"], found["unscored"], found["failed/judge"]) == (2.0, 2.0, 0.0)
    assert not any(name.startswith("pass@") for name in found)


def test_agreement_is_of_the_answers_that_have_both() -> None:
    pairs = [(0.9, 1.0), (0.2, 0.0), (0.7, 1.0), (0.1, 0.0)]
    answers = [Answer(i, 1, "stop", truth, scored(v), v) for i, (v, truth) in enumerate(pairs)]
    answers.append(Answer(4, 1, "stop", 1.0, failed("timeout"), None))
    answers.append(Answer(5, 1, "stop", None, scored(0.0), 0.0))
    found = summarise(answers, samples=1, sources=[None] * 6, rewards=["judge"])
    assert found["agreement/judge"] == pytest.approx(0.894, abs=0.01)  # ties among the truths
    unchecked = [Answer(0, 1, "stop", None, scored(0.5), 0.5)]
    assert "agreement/judge" not in summarise(
        unchecked, samples=1, sources=[None], rewards=["judge"]
    )


def test_a_column_that_differs_in_every_row_is_no_data_source() -> None:
    names = [f"row {i}" for i in range(MOST_SOURCES + 1)]
    answers = [Answer(i, 1, "stop", 1.0) for i in range(len(names))]
    assert not any("/" in name for name in summarise(answers, samples=1, sources=names))


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.none() | st.floats(0, 1), st.none() | st.floats(-1, 1)),
        max_size=20,
    )
)
def test_failures_change_no_mean(rows: list[tuple[int, float | None, float | None]]) -> None:
    def answer(place: int, score: float | None, value: float | None) -> Answer:
        reward = failed("timeout") if value is None else scored(value)
        return Answer(place, 1, "stop", score, reward, value)

    whole = summarise(
        [answer(*row) for row in rows], samples=5, sources=[None] * 4, rewards=["judge"]
    )
    kept = [row for row in rows if row[2] is not None]
    without = summarise(
        [answer(*row) for row in kept], samples=5, sources=[None] * 4, rewards=["judge"]
    )
    for name in ("reward", "reward/judge"):
        assert whole[name] == without[name] or math.isnan(whole[name])
    assert whole["failed/judge"] == len(rows) - len(kept)
