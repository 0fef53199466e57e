"""The batches that a ledger file has recorded, read without the run: what each step was trained on.

A batch is whole again as the trainer had it, in its order (deadline, ordinal) and bit for bit; of
the prompts only the tokens come back, which is all that training needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import OffbeatError
from offbeat.ledger import Row
from offbeat.rates import META_KEY, Rate, unpack_rates
from offbeat.recorded import RecordError, unpack_group, unpack_tokens
from offbeat.records import Batch, Group, Prompt
from offbeat.store import Recorded, read_meta, read_payloads, read_rows


@dataclass(frozen=True, slots=True)
class RedoLog:
    """Steps with the rows of their batches, and the rates that they were trained with."""

    path: Path
    steps: Mapping[int, Sequence[Row]]
    rates: Sequence[Rate]

    @classmethod
    def read(cls, path: Path) -> RedoLog:
        """Of a ledger file, which may be a run's that goes on. Raises `sqlite3.Error`."""
        steps: dict[int, list[Row]] = {}
        for row in sorted(read_rows(path), key=lambda row: (row.deadline, row.ordinal)):
            if row.step is not None and row.state in ("batched", "trained"):
                steps.setdefault(row.step, []).append(row)
        return cls(path, steps, unpack_rates(read_meta(path).get(META_KEY, "[]")))

    @property
    def end(self) -> int:
        """The step after the last one that has a batch."""
        return max(self.steps, default=-1) + 1

    def lost(self, first: int) -> int | None:
        """The last step from `first` on whose batch is not kept; None: all are there."""
        for step in range(self.end - 1, first - 1, -1):
            rows = self.steps.get(step, [])
            kept = read_payloads(self.path, [row.ordinal for row in rows])
            if not rows or not all(_whole(row, kept) for row in rows):
                return step
        return None

    def batch(self, step: int) -> Batch:
        """The batch of a step. Raises `OffbeatError` if it is not kept, or damaged."""
        rows = self.steps.get(step, [])
        kept = read_payloads(self.path, [row.ordinal for row in rows])
        if not rows or not all(_whole(row, kept) for row in rows):
            raise OffbeatError(f"{self.path} has not kept the batch of step {step}")
        return Batch(step, tuple(_group(row, kept[row.ordinal]) for row in rows))


def _whole(row: Row, kept: Mapping[int, Recorded]) -> bool:
    found = kept.get(row.ordinal)
    return found is not None and found.attempt == row.attempt and found.rewards is not None


def _group(row: Row, payload: Recorded) -> Group:
    assert payload.rewards is not None
    try:
        ids = unpack_tokens(payload.tokens).prompt_ids
        prompt = Prompt(row.ordinal, ids, text="", question="")
        return unpack_group(prompt, row.attempt, row.deadline, payload.tokens, payload.rewards)
    except RecordError as damaged:
        raise OffbeatError(f"step {row.step}, group {row.ordinal}: {damaged}") from damaged
