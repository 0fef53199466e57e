"""A server's breaker and its adaptive limit, without a server and without a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.reward.breaker import FAILURES_ON_END, AdaptiveLimit, Breaker


def broken(now: float = 10.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_ON_END):
        breaker.failed(False, now, now)
    return breaker


# -- the breaker ---------------------------------------------------------------------------------


def test_it_opens_after_failures_on_end_only() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(FAILURES_ON_END - 1):
            breaker.failed(False, 2.0, 2.0)
        assert (breaker.state, breaker.passes) == ("closed", True)
        breaker.succeeded(False, 2.0)
    breaker = broken()
    assert (breaker.state, breaker.since, breaker.passes) == ("open", 10.0, False)


def test_calls_that_are_lost_singly_do_not_open_it_though_they_fail_together() -> None:
    breaker = Breaker()
    breaker.succeeded(False, 1.0)  # of a burst that began at 0
    for _ in range(20):
        breaker.failed(False, 0.0, 5.0)
    assert breaker.state == "closed"
    for _ in range(FAILURES_ON_END):
        breaker.failed(False, 2.0, 7.0)  # nothing was answered since
    assert breaker.state == "open"


def test_one_trial_passes_and_decides() -> None:
    breaker = broken()
    breaker.half_open()
    assert breaker.passes
    assert breaker.began()
    assert not breaker.passes, "one at a time"
    breaker.failed(True, 20.0, 21.0)
    assert (breaker.state, breaker.since) == ("open", 10.0), "it was never well in between"
    breaker.half_open()
    assert breaker.began()
    breaker.succeeded(True, 30.0)
    assert (breaker.state, breaker.since, breaker.passes) == ("closed", None, True)
    assert not breaker.began()


def test_a_trial_that_is_given_up_lets_another_one_pass() -> None:
    breaker = broken()
    breaker.half_open()
    breaker.let_go(breaker.began())
    assert breaker.passes
    breaker.let_go(False)
    assert breaker.state == "half_open"


def test_calls_from_before_say_nothing_of_now() -> None:
    breaker = broken()
    breaker.succeeded(False, 11.0)  # it was under way when the server went
    assert breaker.state == "open"
    breaker.half_open()
    breaker.began()
    breaker.failed(False, 5.0, 12.0)  # as is this one
    assert breaker.state == "half_open"
    breaker.succeeded(True, 13.0)
    for _ in range(FAILURES_ON_END):
        assert breaker.excuses(9.0), "an outage lay between"
        breaker.failed(False, 9.0, 40.0)
    assert breaker.state == "closed"
    assert not breaker.excuses(13.5)


@given(st.lists(st.sampled_from(["begin", "succeed", "fail", "let_go", "open", "half", "close"])))
def test_never_two_trials_and_since_while_not_closed(steps: list[str]) -> None:
    breaker, now, running = Breaker(), 0.0, []
    for step in steps:
        now += 1
        if step == "begin" and breaker.passes:
            state = breaker.state
            trial = breaker.began()
            assert trial == (state == "half_open")
            running.append((trial, now))
            assert not (trial and breaker.passes)
        elif step in {"succeed", "fail", "let_go"} and running:
            trial, began = running.pop(0)
            if step == "succeed":
                breaker.succeeded(trial, now)
            elif step == "fail":
                breaker.failed(trial, began, now)
            else:
                breaker.let_go(trial)
        elif step == "open":
            breaker.open(now)
        elif step == "half":
            breaker.half_open()
        elif step == "close":
            breaker.close(now)
        assert (breaker.since is None) == (breaker.state == "closed")
        assert breaker.passes or breaker.state != "closed"


# -- the limit -----------------------------------------------------------------------------------


def test_calls_refused_together_halve_it_once() -> None:
    adaptive = AdaptiveLimit(64)
    assert adaptive.limit == 64
    for _ in range(64):
        adaptive.overloaded(1.0, 2.0)
    assert adaptive.limit == 32
    adaptive.overloaded(3.0, 4.0)
    assert adaptive.limit == 16
    for second in range(5, 20):
        adaptive.overloaded(second, second)
    assert adaptive.limit == 1


@pytest.mark.parametrize("most", [1, 3, 64, 1000])
def test_it_grows_back_within_rounds_that_do_not_depend_on_its_size(most: int) -> None:
    adaptive = AdaptiveLimit(most)
    for second in range(20):
        adaptive.overloaded(second, second)
    rounds = 0
    while adaptive.limit < most:
        for _ in range(adaptive.limit):
            adaptive.succeeded(30.0, 31.0)
        rounds += 1
        assert adaptive.limit <= most
    assert rounds <= 32
    assert rounds >= min(most - 1, 5), "it does not jump"


def test_a_hang_among_quick_calls_is_no_overload() -> None:
    adaptive = AdaptiveLimit(64)
    for second in range(60):
        adaptive.succeeded(second, second + 1.0)
    adaptive.timed_out(0.0, 60.0)
    assert adaptive.limit == 64
    adaptive.timed_out(61.0, 121.0)  # nothing succeeded meanwhile
    assert adaptive.limit == 32
    slow = AdaptiveLimit(64)
    for second in range(60):
        slow.succeeded(second, second + 40.0)
    slow.timed_out(20.0, 80.0)
    assert slow.limit == 32


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.sampled_from(["ok", "busy", "late"]), st.floats(0, 100))),
)
def test_it_stays_within_one_and_most(most: int, events: list[tuple[str, float]]) -> None:
    adaptive, now = AdaptiveLimit(most), 0.0
    for kind, took in events:
        now += 0.5
        tell = {
            "ok": adaptive.succeeded, "busy": adaptive.overloaded, "late": adaptive.timed_out
        }[kind]  # fmt: skip
        before = adaptive.limit
        tell(now - took, now)
        assert 1 <= adaptive.limit <= most
        assert adaptive.limit >= before // 2


def test_after_an_outage_it_begins_with_one_and_doubles() -> None:
    adaptive = AdaptiveLimit(64)
    adaptive.restart(10.0)
    sizes = []
    for _ in range(7):
        sizes.append(adaptive.limit)
        for _ in range(adaptive.limit):
            adaptive.succeeded(11.0, 12.0)
    assert sizes == [1, 2, 4, 8, 16, 32, 64]
    adaptive.overloaded(9.0, 13.0)
    assert adaptive.limit == 64, "a call from before the outage says nothing"
    adaptive.restart(20.0)
    adaptive.succeeded(21.0, 22.0)
    adaptive.overloaded(21.5, 23.0)
    assert adaptive.limit == 1
    for _ in range(8):
        adaptive.succeeded(24.0, 25.0)
    assert adaptive.limit < 9, "it was too much: from here on in steps"
