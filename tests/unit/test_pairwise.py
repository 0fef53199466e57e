"""Comparisons within a group: both orders, scores, and a lean that cancels."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from judge_fakes import StubJudge, group, item, judged, section

from offbeat.reward.genrm import GenRM
from offbeat.reward.pairwise import PositionBias, pairs, shares_won
from offbeat.reward.pool import CallFailed
from offbeat.reward.stats import Counters

SHOWN = re.compile(r"Answer A:\n(=+ \w+ =+)\n(.*)\n\1\n\nAnswer B:\n\1\n(.*)\n\1\n", re.DOTALL)


def answers(text: str) -> tuple[str, str]:
    """The two answers of a rendered comparison."""
    found = SHOWN.search(text)
    assert found is not None
    return found[2], found[3]


def longer(text: str, vote: int = 0) -> str:
    one, other = answers(text)
    return "tie" if len(one) == len(other) else "A" if len(one) > len(other) else "B"


@given(st.integers(0, 9))
def test_who_meets_whom(count: int) -> None:
    everyone = set(itertools.combinations(range(count), 2))
    assert set(pairs(count, "all")) == everyone
    ring = pairs(count, "circular")
    assert {tuple(sorted(pair)) for pair in ring} <= everyone
    assert len(ring) == (count if count > 2 else max(0, count - 1))
    if count > 2:
        met = [place for pair in ring for place in pair]
        assert all(met.count(place) == 2 for place in range(count))


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=7),
    st.sampled_from(["circular", "all"]),
    st.floats(-0.5, 0.5),
)
def test_a_lean_cancels(strength: list[float], how: Any, lean: float) -> None:
    """Whatever a judge adds to the answer that it sees first, the scores are the same."""
    met = pairs(len(strength), how)
    both = [order for one, other in met for order in ((one, other), (other, one))]

    def scores(added: float) -> list[float | None]:
        orders = {(a, b): 0.5 + (strength[a] - strength[b]) / 4 + added / 2 for a, b in both}
        return shares_won(len(strength), met, orders)

    assert scores(lean) == pytest.approx(scores(0.0))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=7), st.data())
def test_failed_comparisons_enter_nothing(strength: list[int], data: st.DataObject) -> None:
    met = pairs(len(strength), "all")
    orders: dict[tuple[int, int], float | None] = {}
    for one, other in met:
        share = 0.5 if strength[one] == strength[other] else float(strength[one] > strength[other])
        orders[one, other], orders[other, one] = share, 1 - share
    lost = data.draw(st.sets(st.sampled_from(sorted(orders))))
    found = shares_won(len(strength), met, orders | dict.fromkeys(lost))
    for place, share in enumerate(found):
        read = [
            orders[place, other]
            for other in range(len(strength))
            if other != place and not {(place, other), (other, place)} & lost
        ]
        assert share == (pytest.approx(sum(read) / len(read)) if read else None)  # type: ignore[arg-type]


def test_the_size_of_a_lean() -> None:
    bias = PositionBias()
    assert bias.facts() == {"comparisons": 0.0}
    for share in (1.0, 1.0, 1.0, 0.0, 0.5, 0.5):
        bias.add(share)
    assert bias.facts() == {"comparisons": 6.0, "position_bias": 0.25}


def test_a_judge_that_prefers_the_longer() -> None:
    judge = StubJudge(longer)
    rewards, facts = judged(judge, group("a", "bb", "ccc", "dddd"), pairwise="all")
    assert [reward.value for reward in rewards] == [
        0.0,
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
        1.0,
    ]
    assert facts == {"limit": 7.0, "comparisons": 12.0, "position_bias": 0.0}
    assert len(judge.asked) == 12
    rewards, _ = judged(StubJudge(longer), group("a", "bb", "ccc", "dddd"), pairwise="circular")
    assert [reward.value for reward in rewards] == [0.0, 0.5, 0.5, 1.0]


def test_a_judge_that_always_takes_the_first_says_nothing() -> None:
    rewards, facts = judged(StubJudge("A"), group("a", "bb", "ccc"), pairwise="all")
    assert [reward.value for reward in rewards] == [0.5, 0.5, 0.5]
    assert facts["position_bias"] == 0.5
    rewards, facts = judged(StubJudge("B"), group("a", "bb", "ccc"), pairwise="circular")
    assert [reward.value for reward in rewards] == [0.5, 0.5, 0.5]
    assert facts["position_bias"] == -0.5


def test_the_calls_are_in_both_samples_transcripts() -> None:
    rewards, _ = judged(StubJudge(longer), group("a", "bb"), pairwise="circular")
    short, long = rewards
    assert [(c.other, c.first, c.value, c.raw) for c in short.transcripts] == [
        (1, True, 0.0, "B"), (1, False, 0.0, "A"),
    ]  # fmt: skip
    assert [(c.other, c.first, c.value, c.raw) for c in long.transcripts] == [
        (0, False, 1.0, "B"), (0, True, 1.0, "A"),
    ]  # fmt: skip
    assert [call.prompt for call in short.transcripts] == [call.prompt for call in long.transcripts]
    # What a call cost is counted once: with the sample that was shown first.
    cost = [c.prompt_tokens + c.completion_tokens for r in rewards for c in r.transcripts]
    assert sorted(cost) == [0, 0, 14, 14]
    assert all(c.first == bool(c.prompt_tokens) for r in rewards for c in r.transcripts)
    counters = Counters()
    for reward in rewards:
        counters.add(reward)
    counted = counters.snapshot()
    assert (counted.calls, counted.prompt_tokens, counted.completion_tokens) == (2, 22, 6)


def test_equal_answers_tie_without_asking() -> None:
    judge = StubJudge("A")
    rewards, facts = judged(judge, group("x", "x"), pairwise="all")
    assert [reward.value for reward in rewards] == [0.5, 0.5]
    assert (judge.asked, facts["comparisons"]) == ([], 0.0)
    rewards, _ = judged(StubJudge(longer), group("x", "x", "yy"), pairwise="all")
    assert [reward.value for reward in rewards] == [0.25, 0.25, 1.0]


def test_a_group_of_one_abstains() -> None:
    (reward,), _ = judged(StubJudge("A"), group("x"), pairwise="all")
    assert (reward.status, reward.value) == ("abstained", None)


def test_failed_comparisons() -> None:
    def reply(text: str, vote: int) -> str | CallFailed:
        one, other = answers(text)
        if "ccc" in (one, other):
            return CallFailed("timeout", "too slow", retries=1)
        return "hm" if one == "bb" and other == "dddd" else longer(text)

    rewards, facts = judged(StubJudge(reply), group("a", "bb", "ccc", "dddd"), pairwise="all")
    a, bb, ccc, dddd = rewards
    assert (a.value, dddd.value) == (0.0, 1.0)
    assert (
        bb.value == 1.0
    )  # its comparison with dddd was read in one order only, and counts nothing
    assert (ccc.status, ccc.cause, ccc.reason) == ("failed", "timeout", "too slow")
    assert ccc.retries == 3  # of the calls that showed it first
    assert facts["comparisons"] == 4.0
    assert {call.cause for call in bb.transcripts} == {None, "timeout", "unparseable"}


def test_what_is_no_preference() -> None:
    for said in ("", "C", "both", "A or B", "neither A nor B", "10", "a"):
        rewards, _ = judged(StubJudge(said), group("x", "y"), pairwise="all")
        alone = said == "a"
        assert {reward.status for reward in rewards} == {"scored" if alone else "failed"}, said
    rewards, _ = judged(StubJudge("Neither wins: tie"), group("x", "y"), pairwise="all")
    assert [reward.value for reward in rewards] == [0.5, 0.5]


def test_preferences_in_words_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "compare.jinja"
    path.write_text("{{ answer_a }}|{{ answer_b }}|{{ choices | join('/') }}|{{ fence }}")
    judge = StubJudge(lambda text, vote: "first" if text.startswith("good") else "second")
    rewards, _ = judged(
        judge, group("good", "bad"), pairwise="all", template=path,
        choices={"first": 1, "second": 0, "equal": 0.5},
    )  # fmt: skip
    assert [reward.value for reward in rewards] == [1.0, 0.0]
    assert judge.asked[0].startswith("good|bad|first/second/equal|=")
    path.write_text("{{ answer }}")
    rewards, _ = judged(judge, group("good", "bad"), pairwise="all", template=path)
    assert {reward.cause for reward in rewards} == {"template_error"}
    assert rewards[0].transcripts == ()


def test_expected_preferences() -> None:
    """A judge that gives the longer one 0.8, and the one shown first 0.1 more."""

    def shares(text: str, verdicts: Any) -> list[float]:
        assert tuple(verdicts) == ("A", "B")
        one, other = answers(text)
        first = (0.8 if len(one) > len(other) else 0.2) + 0.1
        return [0.9 * first, 0.9 * (1 - first)]

    judge = StubJudge(shares=shares)
    rewards, facts = judged(judge, group("a", "bb"), pairwise="all", parser="expected")
    assert [reward.value for reward in rewards] == [pytest.approx(0.2), pytest.approx(0.8)]
    assert facts["position_bias"] == pytest.approx(0.1)
    assert "A or B" in judge.asked[0]


def test_votes_on_comparisons() -> None:
    judge = StubJudge(lambda text, vote: "A" if vote == 0 else longer(text))
    rewards, facts = judged(
        judge, group("a", "bb"), pairwise="all", votes=3, temperature=1.0, vote="majority"
    )
    assert [reward.value for reward in rewards] == [0.0, 1.0]
    assert len(judge.asked) == 6
    assert rewards[0].spread == pytest.approx(facts["spread"])
    assert facts["spread"] > 0


def test_groups_are_told_apart_by_their_prompts() -> None:
    items = [item("a", 0, 1), item("x", 0, 2), item("bb", 1, 1), item("yy", 1, 2)]
    judge = StubJudge(longer)
    rewards, _ = judged(judge, items, pairwise="all")
    assert [reward.value for reward in rewards] == [0.0, 0.0, 1.0, 1.0]
    assert len(judge.asked) == 4
    assert not any(set(answers(text)) & {"a", "bb"} and "x" in text[-60:] for text in judge.asked)


def test_a_large_group_is_judged_at_once() -> None:
    class Slow(StubJudge):
        now = most = 0

        async def verdict(self, text_prompt: str, *, vote: int = 0, criteria: int = 0) -> Any:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.2)
            self.now -= 1
            return await super().verdict(text_prompt, vote=vote, criteria=criteria)

    judge = Slow(longer)
    words = ["w" * length for length in range(1, 13)]
    rewards, _ = judged(judge, group(*words), pairwise="all")
    assert [reward.value for reward in rewards] == [pytest.approx(i / 11) for i in range(12)]
    assert judge.most > 66


def test_what_a_comparison_cannot_be() -> None:
    with pytest.raises(
        ValidationError, match=r"choices\.A = 2 with pairwise must be within 0 to 1"
    ):
        section(pairwise="all", choices={"A": 2, "B": 0})
    with pytest.raises(ValidationError, match=r'parser = "json" reads no preference'):
        section(pairwise="all", parser="json")
    with pytest.raises(ValidationError, match=r'template = "grade" shows one answer'):
        section(pairwise="all", template="grade")
    with pytest.raises(ValidationError, match=r'set pairwise = "circular" or "all"'):
        section(template="pairwise")
    assert GenRM("judge", section(pairwise="all", template="pairwise"), StubJudge()).name == "judge"
