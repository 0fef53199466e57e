"""The state machine of groups: no calls unbalance it, lose a group or end it twice."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offbeat.ledger import Flag, Intervals, Ledger, LedgerError, Row

NEXT = {"admitted": "generated", "generated": "scored", "scored": "ready"}


def grown(ledger: Ledger, ordinals: range, upto: str = "ready") -> Ledger:
    """Admits `ordinals` with deadline 9 and takes them to a state before `batched`."""
    for ordinal in ordinals:
        ledger.admit(ordinal, 9, 0)
        state = "admitted"
        while state != upto:
            state = NEXT[state]
            assert getattr(ledger, state)(ordinal, 0)
    return ledger


class LedgerMachine(RuleBasedStateMachine):
    """Random calls, legal or not, against a plain dict of ordinal -> (state, attempt, step)."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.model: dict[int, tuple[str, int, int | None]] = {}
        self.table: dict[int, Row] = {}  # what a store would hold
        self.next_step = self.version = 0

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)))

    @rule()
    def admit(self) -> None:
        ordinal = len(self.model)
        self.ledger.admit(ordinal, 5, 3)
        self.model[ordinal] = ("admitted", 0, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), arrow=st.sampled_from(["generated", "scored", "ready"]))
    def advance(self, data: st.DataObject, arrow: str) -> None:
        ordinal = self.some(data)
        state, attempt, _ = self.model[ordinal]
        told = data.draw(st.integers(0, attempt + 1))
        final = state in ("discarded", "final")
        call = getattr(self.ledger, arrow)
        if final or told < attempt:
            assert call(ordinal, told) is False
        elif told == attempt and NEXT.get(state) == arrow:
            assert call(ordinal, told) is True
            self.model[ordinal] = (arrow, attempt, None)
        else:
            with pytest.raises(LedgerError, match=f"group {ordinal} is {state}.*{arrow}"):
                call(ordinal, told)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        ordinal = self.some(data)
        state, attempt, _ = self.model[ordinal]
        if state in ("admitted", "generated", "scored", "ready"):
            assert self.ledger.retried(ordinal, 8) == attempt + 1
            self.model[ordinal] = ("admitted", attempt + 1, None)
        else:
            with pytest.raises(LedgerError, match=f"group {ordinal} is .*retried"):
                self.ledger.retried(ordinal)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), reason=st.sampled_from(["timeout", "straggler"]))
    def discard(self, data: st.DataObject, reason: str) -> None:
        ordinal = self.some(data)
        state, attempt, _ = self.model[ordinal]
        if state in ("trained", "final", "discarded"):
            with pytest.raises(LedgerError, match=f"group {ordinal} is .*discarded"):
                self.ledger.discarded(ordinal, reason)
        else:
            assert attempt == 0 or not self.ledger.discarded(ordinal, reason, attempt - 1)
            assert self.ledger.discarded(ordinal, reason, attempt)
            self.model[ordinal] = ("discarded", attempt, None)

    @rule(data=st.data())
    def batch(self, data: st.DataObject) -> None:
        ready = sorted(o for o, (state, _, _) in self.model.items() if state == "ready")
        chosen = ready[: data.draw(st.integers(0, 3))]
        self.ledger.batched(chosen, self.next_step)
        for ordinal in chosen:
            self.model[ordinal] = ("batched", self.model[ordinal][1], self.next_step)
        self.next_step += 1

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(0, self.next_step))
        members = {o: v for o, v in self.model.items() if v[2] == step and v[0] != "final"}
        flags: dict[int, Flag] = dict.fromkeys(members, "no_signal")
        if step not in self.ledger.batches() or any(v[0] == "trained" for v in members.values()):
            with pytest.raises(LedgerError):
                self.ledger.trained(step, flags)
            return
        self.ledger.trained(step, flags)
        for ordinal, (_, attempt, _) in members.items():
            self.model[ordinal] = ("trained", attempt, step)

    @rule(data=st.data())
    def checkpoint_or_redo(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(0, self.next_step))
        below = [o for o, v in self.model.items() if v[2] is not None and v[2] < version]
        if any(self.model[o][0] == "batched" for o in below):
            with pytest.raises(LedgerError, match="checkpointed"):
                self.ledger.checkpointed(version)
            return
        new = {o for o in below if self.model[o][0] == "trained"}
        assert set(self.ledger.checkpointed(version)) == new
        for ordinal in new:
            self.model[ordinal] = ("final", *self.model[ordinal][1:])
        self.version = max(self.version, version)
        self.ledger.redo(self.version)
        for ordinal, (state, attempt, step) in self.model.items():
            if state == "trained":
                self.model[ordinal] = ("batched", attempt, step)

    @invariant()
    def balanced(self) -> None:
        counts = self.ledger.counts()
        assert counts["admitted"] == len(self.model)
        ended = counts["trained"] + sum(counts["discarded"].values())
        assert counts["admitted"] == ended + counts["live"]
        states = Counter(state for state, _, _ in self.model.values())
        assert counts["trained"] == states["trained"] + states["final"] == counts["no_signal"]
        assert len(self.ledger.live_rows()) == counts["live"]

    @invariant()
    def rows_tell_the_same(self) -> None:
        self.table.update((row.ordinal, row) for row in self.ledger.drain())
        for ordinal, (state, attempt, step) in self.model.items():
            row = self.table[ordinal]
            shown = "trained" if state == "final" else state
            assert (row.state, row.attempt, row.step) == (shown, attempt, step)

    def teardown(self) -> None:
        again = Ledger.restore(self.table.values(), self.version)
        self.table.update((row.ordinal, row) for row in again.drain())
        self.ledger.redo(self.version)
        assert again.counts() == self.ledger.counts()
        assert again.live_rows() == self.ledger.live_rows()
        assert again.finished() == self.ledger.finished()


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


@settings(deadline=None)
@given(st.lists(st.integers(-20, 20)))
def test_intervals_are_a_set(values: list[int]) -> None:
    intervals = Intervals()
    for value in values:
        intervals.add(value)
    assert [v for v in range(-21, 22) if v in intervals] == sorted(set(values))
    spans = intervals.spans()
    assert all(a[1] + 1 < b[0] for a, b in pairwise(spans))


def test_memory_is_that_of_the_live_groups() -> None:
    ledger = Ledger()
    for step in range(500):
        grown(ledger, range(step * 4, step * 4 + 4))
        ledger.batched(range(step * 4, step * 4 + 4), step)
        ledger.trained(step, dict.fromkeys(range(step * 4, step * 4 + 4), "signal"))
        ledger.checkpointed(step + 1)
        ledger.drain()
    assert ledger.finished() == [(0, 1999)]
    assert ledger.row(1999) is None
    assert not ledger.live_rows()
    with pytest.raises(LedgerError, match="group 7 is finished: no arrow to admit"):
        ledger.admit(7, 9, 9)


def test_every_arrow_leaves_a_row() -> None:
    ledger = grown(Ledger(), range(1))
    ledger.retried(0, 11)
    ledger.discarded(0, "timeout")
    states = ["admitted", "generated", "scored", "ready", "admitted", "discarded"]
    rows = ledger.drain()
    assert [row.state for row in rows] == states
    assert rows[-1] == Row(0, 1, "discarded", None, "timeout", 11)
    assert ledger.drain() == []


def test_trained_is_final_only_with_a_checkpoint() -> None:
    ledger = grown(Ledger(), range(4))
    ledger.batched([2, 0], 0)
    ledger.trained(0, {0: "signal", 2: "no_signal"})
    ledger.batched([1, 3], 1)
    ledger.trained(1, {1: "signal", 3: "signal"})
    assert ledger.checkpointed(1) == [2, 0]
    assert ledger.redo(1) == {1: [1, 3]}
    assert ledger.counts()["trained"] == 2
    ledger.discarded(3, "payload lost")
    ledger.trained(1, {1: "signal"})
    with pytest.raises(LedgerError, match="steps before 1 are final"):
        ledger.redo(0)


def test_restore_reads_rows_against_the_checkpoint() -> None:
    """A checkpoint of version 1 holds step 0, even if the crash swallowed the row that says so."""
    rows = [
        Row(0, 0, "batched", 0, None, 2),
        Row(1, 1, "trained", 1, "signal", 3),
        Row(2, 0, "scored", None, None, 3),
        Row(3, 0, "discarded", None, "timeout", 3),
    ]
    ledger = Ledger.restore(rows, 1)
    assert ledger.batches() == {1: [1]}
    assert ledger.finished() == [(0, 0), (3, 3)]
    assert [row.state for row in ledger.drain()] == ["trained", "batched"]
    assert ledger.counts() == {
        "admitted": 4,
        "trained": 1,
        "no_signal": 0,
        "discarded": {"timeout": 1},
        "live": 2,
    }


@pytest.mark.parametrize(
    "call",
    [
        lambda ledger: ledger.batched([0, 0], 0),
        lambda ledger: ledger.batched([0, 5], 0),
        lambda ledger: ledger.trained(0, {}),
        lambda ledger: ledger.generated(0, 0),
        lambda ledger: ledger.generated(77, 0),
        lambda ledger: ledger.ready(0, 1),
        lambda ledger: ledger.discarded(77, "x"),
        lambda ledger: ledger.admit(0, 9, 0),
        lambda ledger: ledger.admit(1, 1, 2),
    ],
)
def test_illegal_arrows_raise_and_change_nothing(call: object) -> None:
    ledger = grown(Ledger(), range(1))
    before = ledger.counts(), ledger.row(0), ledger.drain()
    with pytest.raises(LedgerError, match=r"0|77|1"):
        call(ledger)  # type: ignore[operator]
    assert (ledger.counts(), ledger.row(0)) == before[:2]
    assert ledger.drain() == []


@pytest.mark.parametrize("named", [(0,), (0, 1, 2), (0, 2), ()])
def test_a_step_is_trained_for_its_whole_batch_and_nobody_else(named: tuple[int, ...]) -> None:
    ledger = Ledger()
    for ordinal in range(3):
        ledger.admit(ordinal, 2, 0)
        ledger.generated(ordinal, 0)
        ledger.scored(ordinal, 0)
        ledger.ready(ordinal, 0)
    ledger.batched([0, 1], 0)
    before = ledger.counts()
    with pytest.raises(LedgerError, match=r"trained\(0\) names groups"):
        ledger.trained(0, dict.fromkeys(named, "signal"))
    assert ledger.counts() == before
