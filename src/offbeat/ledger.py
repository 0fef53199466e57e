"""The state machine of groups: each admitted ordinal ends in exactly one of trained and discarded.

    admitted -> generated -> scored -> ready -> batched(step) -> trained(step)
    admitted | generated | scored | ready -> admitted(attempt + 1)      retried
    admitted | generated | scored | ready | batched -> discarded(reason)
    trained(step) -> batched(step)      redo, until a checkpoint holds the step

The invariant: `admitted = trained + discarded + live`, always. Every arrow leaves an immutable
`Row` behind, which the caller drains and passes to the store. Pure: no clock, no I/O, no task.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

State = Literal["admitted", "generated", "scored", "ready", "batched", "trained", "discarded"]
Flag = Literal["signal", "no_signal"]
LEFT_OVER = "left over"  # admitted beyond the steps that the run came to have
REASON_CHARS = 200  # a reason names a kind of cause, is counted by kind, and is cut at this length


class LedgerError(ValueError):
    """An arrow that the state machine does not have; names the ordinal, its state and the arrow."""


@dataclass(frozen=True, slots=True)
class Row:
    """One group's state after an arrow.

    `step` is the trainer step for `batched` and `trained`, else None. `reason` says why a group
    was discarded; for `trained` it is the flag `signal` or `no_signal` (None: the crash came
    between the checkpoint and the row). `deadline` is the last step that may consume the group.
    """

    ordinal: int
    attempt: int
    state: State
    step: int | None
    reason: str | None
    deadline: int


class Counts(TypedDict):
    """Groups so far. `admitted = trained + sum(discarded.values()) + live`; `no_signal` of the
    `trained` were flagged so."""

    admitted: int
    trained: int
    no_signal: int
    discarded: dict[str, int]
    live: int


class Intervals:
    """A set of integers as disjoint intervals: memory grows with its gaps, not with its size."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []  # exclusive

    def __contains__(self, value: int) -> bool:
        i = bisect_right(self._starts, value) - 1
        return i >= 0 and value < self._ends[i]

    def add(self, value: int) -> None:
        """Adds one value; adding it twice changes nothing."""
        i = bisect_right(self._starts, value)
        if i > 0 and value < self._ends[i - 1]:
            return
        left = i > 0 and self._ends[i - 1] == value
        right = i < len(self._starts) and self._starts[i] == value + 1
        if left and right:
            self._ends[i - 1] = self._ends.pop(i)
            del self._starts[i]
        elif left:
            self._ends[i - 1] = value + 1
        elif right:
            self._starts[i] = value
        else:
            self._starts.insert(i, value)
            self._ends.insert(i, value + 1)

    def spans(self) -> list[tuple[int, int]]:
        """The intervals as (first, last), ascending."""
        return [(a, b - 1) for a, b in zip(self._starts, self._ends, strict=True)]


class Ledger:
    """Where every group stands. Finished groups are kept only as counts and intervals."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}  # live groups, and trained ones that are not final yet
        self._batches: dict[int, list[int]] = {}  # step -> ordinals, until the step is final
        self._finished = Intervals()
        self._admitted = 0
        self._trained = 0
        self._no_signal = 0
        self._discarded: Counter[str] = Counter()
        self._version = 0  # steps before this one are final
        self._outbox: list[Row] = []

    @classmethod
    def restore(cls, rows: Iterable[Row], version: int, done: int | None = None) -> Ledger:
        """The ledger after a crash: the store's rows read against the newest valid checkpoint.

        Steps below `version` (the checkpoint's: weights after that many steps) are final. Later
        trained groups are batched again, to be redone, unless a trainer that lives has `done` that
        many steps; `batches()` lists them. Live groups stand where their rows say; the caller
        retries or discards those whose payload is lost.
        """
        ledger = cls()
        ledger._version = version
        redo_from = version if done is None else max(done, version)
        for row in sorted(rows, key=lambda row: (row.deadline, row.ordinal)):
            ledger._admitted += 1
            if row.state == "discarded":
                ledger._discarded[row.reason or "unknown"] += 1
                ledger._finished.add(row.ordinal)
            elif row.step is None:
                ledger._rows[row.ordinal] = row
            elif row.step < version:
                ledger._trained += 1
                ledger._no_signal += row.reason == "no_signal"
                ledger._finished.add(row.ordinal)
                if row.state != "trained":
                    ledger._outbox.append(replace(row, state="trained"))
            else:
                ledger._batches.setdefault(row.step, []).append(row.ordinal)
                ledger._rows[row.ordinal] = row
                if row.state == "trained" and row.step >= redo_from:
                    ledger._record(replace(row, state="batched", reason=None))
                elif row.state == "trained":
                    ledger._trained += 1
                    ledger._no_signal += row.reason == "no_signal"
        ledger._batches = dict(sorted(ledger._batches.items()))
        return ledger

    def admit(self, ordinal: int, deadline: int, floor: int) -> None:
        """A new ordinal becomes `admitted`, attempt 0, to be trained at or before `deadline`.

        Raises:
            LedgerError: the ordinal was admitted before, or `deadline < floor` (steps).
        """
        known = self._rows.get(ordinal)
        if known is not None or ordinal in self._finished:
            raise self._illegal(ordinal, known.state if known else "finished", "admit")
        if deadline < floor:
            raise LedgerError(f"group {ordinal}: admit with deadline {deadline} < floor {floor}")
        self._admitted += 1
        self._record(Row(ordinal, 0, "admitted", None, None, deadline))

    def generated(self, ordinal: int, attempt: int) -> bool:
        """`admitted -> generated`: all samples are there.

        Returns:
            False, and nothing changes, if `attempt` is an older one or the group is finished.

        Raises:
            LedgerError: the group is in another state, unknown, or has not come to this attempt.
        """
        return self._advance(ordinal, attempt, "admitted", "generated")

    def scored(self, ordinal: int, attempt: int) -> bool:
        """`generated -> scored`: every reward has its outcome. Returns and raises: `generated`."""
        return self._advance(ordinal, attempt, "generated", "scored")

    def ready(self, ordinal: int, attempt: int) -> bool:
        """`scored -> ready`: the group may be batched. Returns and raises: see `generated`."""
        return self._advance(ordinal, attempt, "scored", "ready")

    def batched(self, ordinals: Sequence[int], step: int) -> None:
        """`ready -> batched(step)` for all of `ordinals`, or for none of them.

        Raises:
            LedgerError: one is not ready or named twice; the step has a batch or is final.
        """
        if step in self._batches or step < self._version:
            raise LedgerError(f"step {step} has its batch already; groups {list(ordinals)}: batch")
        if len(set(ordinals)) != len(ordinals):
            raise LedgerError(f"groups {list(ordinals)}: batch {step} names one twice")
        rows = [self._expect(ordinal, ("ready",), f"batched({step})") for ordinal in ordinals]
        self._batches[step] = list(ordinals)
        for row in rows:
            self._record(Row(row.ordinal, row.attempt, "batched", step, None, row.deadline))

    def trained(self, step: int, flags: Mapping[int, Flag]) -> None:
        """`batched(step) -> trained(step)` for the whole batch; `flags` says who had signal.

        Raises:
            LedgerError: `step` has no batch, `flags` names other groups than the batch, or one of
                them is not `batched` (trained already).
        """
        batch = self._batches.get(step)
        if batch is None or set(batch) != set(flags):
            raise LedgerError(
                f"trained({step}) names groups {sorted(flags)}, its batch has "
                f"{'nobody' if batch is None else sorted(batch)}"
            )
        rows = [self._expect(ordinal, ("batched",), f"trained({step})") for ordinal in batch]
        for row in rows:
            self._trained += 1
            self._no_signal += flags[row.ordinal] == "no_signal"
            flag = flags[row.ordinal]
            self._record(Row(row.ordinal, row.attempt, "trained", step, flag, row.deadline))

    def discarded(self, ordinal: int, reason: str, attempt: int | None = None) -> bool:
        """Any live state `-> discarded(reason)`, which is final at once.

        Returns:
            False, and nothing changes, if `attempt` is given and is an older one, or is given and
            the group is finished.

        Raises:
            LedgerError: the group is not live, unknown, or has not come to this attempt.
        """
        if attempt is not None and self._late(ordinal, attempt, "discarded"):
            return False
        reason = reason[:REASON_CHARS].encode("utf-8", "backslashreplace").decode()
        live: tuple[State, ...] = ("admitted", "generated", "scored", "ready", "batched")
        row = self._expect(ordinal, live, f"discarded({reason})")
        if row.step is not None:
            self._batches[row.step].remove(ordinal)
        self._discarded[reason] += 1
        self._record(replace(row, state="discarded", step=None, reason=reason))
        self._finish(ordinal)
        return True

    def retried(self, ordinal: int, deadline: int | None = None) -> int:
        """Any live state before `batched` `-> admitted(attempt + 1)`; returns the new attempt.

        `deadline` is the new attempt's, as `Buffer.retry` returned it; None keeps the old one.

        Raises:
            LedgerError: the group is not in such a state. (The payload of a batched group is
                lost: discard it; its place in the buffer is gone.)
        """
        row = self._expect(ordinal, ("admitted", "generated", "scored", "ready"), "retried")
        due = row.deadline if deadline is None else deadline
        self._record(Row(ordinal, row.attempt + 1, "admitted", None, None, due))
        return row.attempt + 1

    def checkpointed(self, version: int) -> list[int]:
        """A checkpoint of `version` is visible: `trained(step)` with step < version is final.

        Returns the ordinals that became final; their payload may go.

        Raises:
            LedgerError: a batch of an earlier step is not trained.
        """
        steps = [step for step in self._batches if step < version]
        for step in steps:
            for ordinal in self._batches[step]:
                self._expect(ordinal, ("trained",), f"checkpointed({version})")
        final = [ordinal for step in steps for ordinal in self._batches.pop(step)]
        for ordinal in final:
            self._finish(ordinal)
        self._version = max(self._version, version)
        return final

    def redo(self, version: int) -> dict[int, list[int]]:
        """The trainer restarts from the checkpoint of `version`: `trained -> batched` from there.

        Returns the batches to train again, step -> ordinals, in order.

        Raises:
            LedgerError: a newer checkpoint has made steps from `version` on final.
        """
        if version < self._version:
            raise LedgerError(f"redo from {version}: steps before {self._version} are final")
        again = {step: list(batch) for step, batch in self._batches.items() if step >= version}
        for ordinal in (ordinal for batch in again.values() for ordinal in batch):
            row = self._rows[ordinal]
            if row.state == "trained":
                self._trained -= 1
                self._no_signal -= row.reason == "no_signal"
                self._record(replace(row, state="batched", reason=None))
        return again

    def batches(self) -> dict[int, list[int]]:
        """The recorded batches that no checkpoint holds yet: step -> ordinals, in order."""
        return {step: list(batch) for step, batch in self._batches.items()}

    def batch(self, step: int) -> list[int] | None:
        """The recorded batch of one step, None if it has none or is final."""
        batch = self._batches.get(step)
        return None if batch is None else list(batch)

    def row(self, ordinal: int) -> Row | None:
        """The newest row of a group that is live, or trained and not final; else None."""
        return self._rows.get(ordinal)

    def is_current(self, ordinal: int, attempt: int) -> bool:
        """Whether the group is live (batched included) as this very attempt."""
        row = self._rows.get(ordinal)
        return row is not None and row.state != "trained" and row.attempt == attempt

    def live_rows(self) -> list[Row]:
        """The newest row of every live group, by (deadline, ordinal)."""
        live = (row for row in self._rows.values() if row.state != "trained")
        return sorted(live, key=lambda row: (row.deadline, row.ordinal))

    def drain(self) -> list[Row]:
        """The rows recorded since the last call, in order: for the store."""
        rows, self._outbox = self._outbox, []
        return rows

    def counts(self) -> Counts:
        """Groups so far; they always balance."""
        return Counts(
            admitted=self._admitted,
            trained=self._trained,
            no_signal=self._no_signal,
            discarded=dict(self._discarded),
            live=sum(row.state != "trained" for row in self._rows.values()),
        )

    def finished(self) -> list[tuple[int, int]]:
        """The ordinals that are finished for good, as intervals (first, last)."""
        return self._finished.spans()

    def _record(self, row: Row) -> None:
        self._rows[row.ordinal] = row
        self._outbox.append(row)

    def _finish(self, ordinal: int) -> None:
        del self._rows[ordinal]
        self._finished.add(ordinal)

    def _advance(self, ordinal: int, attempt: int, source: State, target: State) -> bool:
        if self._late(ordinal, attempt, target):
            return False
        row = self._expect(ordinal, (source,), target)
        self._record(Row(ordinal, attempt, target, None, None, row.deadline))
        return True

    def _late(self, ordinal: int, attempt: int, arrow: str) -> bool:
        """Whether news of this attempt comes too late to matter."""
        row = self._rows.get(ordinal)
        if row is None:
            if ordinal in self._finished:
                return True
            raise self._illegal(ordinal, "unknown", arrow)
        if attempt > row.attempt:
            raise self._illegal(ordinal, f"{row.state}, attempt {row.attempt}", arrow)
        return attempt < row.attempt

    def _expect(self, ordinal: int, states: tuple[State, ...], arrow: str) -> Row:
        row = self._rows.get(ordinal)
        if row is None:
            state = "finished" if ordinal in self._finished else "unknown"
            raise self._illegal(ordinal, state, arrow)
        if row.state not in states:
            raise self._illegal(ordinal, row.state, arrow)
        return row

    @staticmethod
    def _illegal(ordinal: int, state: str, arrow: str) -> LedgerError:
        return LedgerError(f"group {ordinal} is {state}: no arrow to {arrow}")
