"""Requests and tokens a minute: no 60 seconds see more, and sources that share take turns."""

from __future__ import annotations

import gc
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.reward.limiter import Limiter, shared_limiter


def nothing() -> None:
    """To be woken for nothing."""


def joined(requests: int | None = None, tokens: int | None = None, *, now: float = 0.0) -> Limiter:
    limiter = Limiter()
    limiter.join("a", requests, tokens, nothing, now)
    return limiter


def go(limiter: Limiter, who: str, cost: float, now: float) -> float:
    """When a call that came at `now` went."""
    for _ in range(100):
        at = limiter.ready_at(who, cost, now)
        if at <= now:
            limiter.take(who, cost, now)
            return now
        now = at
    raise AssertionError("it never goes")


def most_in_a_minute(went: list[tuple[float, float]]) -> float:
    """The largest sum of costs in any 60 seconds, the last moment not among them."""
    return max(sum(c for t, c in went if start <= t < start + 59.999) for start, _ in went)


def test_without_limits_all_go_at_once() -> None:
    limiter = joined()
    assert [go(limiter, "a", 1e9, 1.0) for _ in range(100)] == [1.0] * 100


@pytest.mark.parametrize("requests", [1, 2, 3, 60, 300])
def test_requests_a_minute_are_reached_and_never_passed(requests: int) -> None:
    limiter, now, went = joined(requests), 0.0, []
    for _ in range(5 * requests + 5):
        now = go(limiter, "a", 10, now)
        went.append((now, 1.0))
    assert most_in_a_minute(went) <= requests
    assert len(went) / (went[-1][0] / 60) >= 0.9 * requests


@settings(max_examples=60, deadline=None)
@given(st.integers(100, 10_000), st.integers(0, 2**32))
def test_no_minute_sees_more_tokens(tokens: int, seed: int) -> None:
    dice = random.Random(seed)
    limiter, now, went = joined(None, tokens), 0.0, []
    for _ in range(150):
        now += dice.choice([0.0, 0.0, dice.uniform(0, 5)])
        cost = dice.uniform(0, tokens / 2) ** dice.choice([0.5, 1.0])
        now = go(limiter, "a", cost, now)
        went.append((now, cost))
    assert most_in_a_minute(went) <= tokens * 1.0001


def test_tokens_are_corrected_by_what_a_call_took() -> None:
    limiter = joined(None, 6000)
    assert go(limiter, "a", 300, 0.0) == 0.0
    assert limiter.ready_at("a", 300, 0.0) > 2.0
    limiter.settle(300, 0, 0.0)
    assert limiter.ready_at("a", 300, 0.0) == 0.0
    limiter.settle(300, 1300, 0.0)
    assert limiter.ready_at("a", 300, 0.0) == pytest.approx(1000 / 95)


def test_a_call_of_more_than_a_minute_goes_all_the_same() -> None:
    limiter = joined(None, 100)
    first = go(limiter, "a", 1000, 0.0)
    second = go(limiter, "a", 10, first)
    assert first <= 60
    assert second - first >= 900, "and is paid for"


def test_what_was_never_sent_is_given_back() -> None:
    limiter = joined(1, 100)
    go(limiter, "a", 50, 0.0)
    assert limiter.ready_at("a", 50, 0.0) > 30
    limiter.unsent(50, 0.0)
    assert limiter.ready_at("a", 50, 0.0) == 0.0


def test_a_closed_server_is_asked_by_nobody() -> None:
    limiter = joined()
    limiter.close_until(7.0)
    limiter.close_until(3.0)
    assert limiter.ready_at("a", 1, 1.0) == 7.0
    assert limiter.ready_at("b", 1, 8.0) == 8.0


def test_the_smallest_setting_holds_and_leaves_with_its_source() -> None:
    limiter = joined(600, None)
    limiter.join("b", 60, 1000, nothing, 0.0)
    went, now = [], 0.0
    for i in range(120):
        now = go(limiter, "ab"[i % 2], 1, now)
        went.append((now, 1.0))
    assert most_in_a_minute(went) <= 60
    limiter.leave("b", now)
    went = []
    for _ in range(600):
        now = go(limiter, "a", 1, now)
        went.append((now, 1.0))
    assert 500 <= most_in_a_minute(went) <= 600


def test_sources_take_turns_whatever_their_calls_cost() -> None:
    limiter = joined(None, 6000)
    limiter.join("b", None, None, nothing, 0.0)
    counts, wakes, now = {"a": 0, "b": 0}, {"a": 0.0, "b": 0.0}, 0.0
    costs = {"a": 10.0, "b": 290.0}
    while now < 300:
        now = min(wakes.values())
        for who in random.Random(int(now * 1000)).sample(["a", "b"], 2):
            if wakes[who] <= now:
                at = limiter.ready_at(who, costs[who], now)
                if at <= now:
                    limiter.take(who, costs[who], now)
                    counts[who] += 1
                wakes[who] = at
    assert 80 <= counts["b"] <= 100, "5,700 a minute of 300 a round"
    assert abs(counts["a"] - counts["b"]) <= 40


def test_a_source_that_lets_its_turn_pass_stops_nobody() -> None:
    limiter = joined(60, None)
    limiter.join("b", None, None, nothing, 0.0)
    while limiter.ready_at("a", 1, 0.0) <= 0.0:
        limiter.take("a", 1, 0.0)
    assert limiter.ready_at("b", 1, 0.0) > limiter.ready_at("a", 1, 0.0)
    assert go(limiter, "b", 1, 0.0) < 4.0


def test_waiting_sources_are_woken_when_tokens_come_back() -> None:
    woken: list[str] = []
    limiter = joined(None, 6000)
    limiter.join("b", None, None, lambda: woken.append("b"), 0.0)
    go(limiter, "a", 300, 0.0)
    limiter.settle(300, 300, 0.0)
    assert woken == [], "nobody waits"
    assert limiter.ready_at("b", 300, 0.0) > 0
    limiter.settle(300, 10, 0.0)
    assert woken == ["b"]


def test_one_limiter_a_server_and_key() -> None:
    first = shared_limiter("http://a/v1", "key")
    assert shared_limiter("http://a/v1", "key") is first
    assert shared_limiter("http://a/v1", "other") is not first
    assert shared_limiter("http://b/v1", "key") is not first
    first.close_until(100.0)
    del first
    gc.collect()
    assert shared_limiter("http://a/v1", "key").closed_until == 0.0


def test_another_loops_clock_begins_anew() -> None:
    limiter = joined(1, None, now=1000.0)
    go(limiter, "a", 1, 1000.0)
    limiter.close_until(2000.0)
    limiter.leave("a", 1000.0)
    limiter.join("a", 1, None, nothing, 1001.0)
    assert limiter.ready_at("a", 1, 1001.0) == 2000.0
    limiter.leave("a", 1001.0)
    limiter.join("a", 1, None, nothing, 0.0)
    assert limiter.ready_at("a", 1, 0.0) == 0.0
