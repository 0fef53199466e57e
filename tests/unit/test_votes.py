"""Several verdicts on one text: what they come to, and when they come to nothing."""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from judge_fakes import StubJudge, item, judged, section

from offbeat.records import Reward
from offbeat.reward.genrm import GenRM
from offbeat.reward.judge import Verdict
from offbeat.reward.pool import CallFailed
from offbeat.reward.turns import KEPT, Turns
from offbeat.reward.votes import count_votes

VOTES = st.lists(
    st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0])), min_size=1, max_size=9
)


@given(VOTES, st.sampled_from(["mean", "median", "majority"]))
def test_more_than_half_must_be_read(votes: list[float | None], how: str) -> None:
    read = [vote for vote in votes if vote is not None]
    causes = ["timeout" for vote in votes if vote is None]
    found = count_votes(votes, causes, how)  # type: ignore[arg-type]
    if 2 * len(read) <= len(votes):
        assert (found.value, found.cause) == (None, "timeout")
    elif how == "mean":
        assert found.value == pytest.approx(statistics.fmean(read))
    elif how == "median":
        assert found.value == statistics.median(read)
    elif found.value is None:
        most = [read.count(vote) for vote in set(read)]
        assert found.cause == "no_majority"
        assert most.count(max(most)) > 1
    else:
        assert all(read.count(found.value) > read.count(vote) for vote in set(read) - {found.value})
    spread = statistics.pstdev(read) if read and len(votes) > 1 else None
    assert found.spread == (None if spread is None else pytest.approx(spread))


def test_the_commonest_cause() -> None:
    causes = ["timeout", "unparseable", "unparseable"]
    assert count_votes([None, None, None, 1.0], causes, "mean").cause == "unparseable"
    assert count_votes([None, 1.0], ["timeout"], "mean").cause == "timeout"  # half is not more
    assert count_votes([None], [], "mean").cause == "unparseable"


def test_values_of_any_size() -> None:
    huge = count_votes([1.7e308, -1.7e308, 1.7e308], [], "mean")
    assert huge.value is not None
    assert math.isfinite(huge.value)
    assert huge.spread is not None
    assert math.isfinite(huge.spread)


def test_the_votes_of_a_judge() -> None:
    said = ["10", "10", "1", "who knows", "4"]
    judge = StubJudge(lambda text, vote: said[vote])
    (reward,), facts = judged(judge, [item()], votes=5, temperature=1.0)
    assert sorted(judge.votes) == [0, 1, 2, 3, 4]
    assert reward.value == pytest.approx((1 + 1 + 0 + 1 / 3) / 4)
    assert reward.spread == pytest.approx(statistics.pstdev([1, 1, 0, 1 / 3]))
    assert facts["spread"] == reward.spread
    assert reward.raw == "10\n---\n10\n---\n1\n---\nwho knows\n---\n4"
    assert [call.value for call in reward.transcripts] == [1, 1, 0, None, pytest.approx(1 / 3)]
    assert [call.cause for call in reward.transcripts] == [None, None, None, "unparseable", None]
    (reward,), _ = judged(judge, [item()], votes=5, temperature=1.0, vote="majority")
    assert reward.value == 1.0
    (reward,), _ = judged(judge, [item()], votes=5, temperature=1.0, vote="median")
    assert reward.value == pytest.approx(2 / 3)


def test_votes_without_a_majority() -> None:
    judge = StubJudge(lambda text, vote: ["1", "10"][vote % 2])
    (reward,), _ = judged(judge, [item()], votes=2, temperature=1.0, vote="majority")
    assert (reward.status, reward.cause, reward.value) == ("failed", "no_majority", None)
    assert reward.spread == 0.5
    assert len(reward.transcripts) == 2


def test_votes_that_mostly_fail() -> None:
    def reply(text: str, vote: int) -> str | CallFailed:
        return "10" if vote == 0 else CallFailed("timeout", "too slow", retries=2)

    (reward,), _ = judged(StubJudge(reply), [item()], votes=3, temperature=1.0)
    assert (reward.status, reward.cause, reward.value) == ("failed", "timeout", None)
    assert (reward.reason, reward.retries) == ("too slow", 4)
    assert [call.cause for call in reward.transcripts] == [None, "timeout", "timeout"]


def test_who_asks_again_gets_other_draws() -> None:
    """A server with seeds says the same to the same draw: a retry must not be one of those."""
    said = {0: "hm", 1: "1", 2: "10", 3: "1", 4: "10", 5: "10"}
    judge = StubJudge(lambda text, vote: said[vote])

    async def main() -> list[Reward]:
        source = GenRM("judge", section(votes=2, temperature=1.0, vote="majority"), judge)
        return [(await source.score([item()]))[0] for _ in range(4)]

    rewards = asyncio.run(main())
    assert judge.votes == [0, 1, 2, 3, 4, 5, 0, 1]  # and what was read begins anew
    causes = [reward.cause for reward in rewards]
    assert causes == ["unparseable", "no_majority", None, "unparseable"]
    assert rewards[2].value == 1.0


def test_turns_forget_the_oldest() -> None:
    turns = Turns()
    for number in range(KEPT + 1):
        turns.came_to(str(number), None)
    assert (turns.of("0"), turns.of("1"), turns.of(str(KEPT))) == (0, 1, 1)
    turns.came_to("1", None)
    turns.came_to("2", 0.0)
    assert (turns.of("1"), turns.of("2")) == (2, 0)


def test_one_verdict_has_no_spread() -> None:
    (reward,), facts = judged(StubJudge("8"), [item()], temperature=1.0)
    assert reward.spread is None
    assert "spread" not in facts


def test_a_vote_that_was_cut_is_a_failed_one() -> None:
    judge = StubJudge(lambda text, vote: Verdict("1", "length") if vote else Verdict("8"))
    (reward,), _ = judged(judge, [item()], votes=3, temperature=1.0)
    assert reward.cause == "unparseable"
    assert "max_tokens" in reward.reason


def test_votes_that_would_all_be_the_same() -> None:
    with pytest.raises(ValidationError, match=r"votes = 3 with temperature = 0"):
        section(votes=3)
    with pytest.raises(ValidationError, match=r'votes = 3 with parser = "expected"'):
        section(votes=3, temperature=1.0, parser="expected")
