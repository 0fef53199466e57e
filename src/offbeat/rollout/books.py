"""The rollouter's books: buffer, ledger and store move together, so that they cannot disagree.

Every arrow of the ledger goes through here, in the order in which it happens, and into the store in
that order: what is durable is at every instant a state that the run was in. An effect that others
see (a batch that is handed out) waits for its commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from offbeat.buffer import Buffer, BufferStateError
from offbeat.config import TrainSection
from offbeat.errors import OffbeatError
from offbeat.faults import apoint
from offbeat.ledger import LEFT_OVER, Counts, Flag, Ledger, Row
from offbeat.recorded import (
    Generated,
    RecordError,
    pack_rewards,
    pack_tokens,
    unpack_group,
    unpack_tokens,
)
from offbeat.records import Batch, Completion, Group, Payload, Prompt, Sample
from offbeat.store import Recorded
from offbeat.store_work import Bytes

log = logging.getLogger(__name__)
T = TypeVar("T")
PromptOf = Callable[[int], Prompt]
LATE = "late after a restart"


@dataclass(slots=True)
class Restored:
    """What was live before the restart: by ordinal, the attempt of groups that begin again, the
    samples of those that wait for their rewards, and how far admission has come."""

    again: dict[int, int] = field(default_factory=dict)
    unscored: dict[int, tuple[int, Generated]] = field(default_factory=dict)
    next_ordinal: int = 0
    discards: int = 0


class Keeper(Protocol):
    """What the books need of `offbeat.store.Store`, which says what each call does."""

    busy_seconds: float

    def put(
        self,
        rows: Iterable[Row],
        *,
        tokens: tuple[int, int, Bytes] | None = None,
        rewards: tuple[int, int, Bytes] | None = None,
        release: Iterable[int] = (),
        final_before: int | None = None,
    ) -> Future[None]: ...
    def put_meta(self, key: str, value: str) -> Future[None]: ...
    def payloads(self, ordinals: Iterable[int]) -> dict[int, Recorded]: ...
    def read_all(self) -> list[Row]: ...
    def meta(self) -> dict[str, str]: ...
    def copy_to(self, path: Path | str) -> None: ...


class Read(Protocol):
    """Runs a call that waits for the disk."""

    def __call__(self, work: Callable[..., T], /, *args: Any) -> Coroutine[Any, Any, T]: ...


class Books:
    """Where every group stands, in memory and on disk. `prompt_of` gives an ordinal's prompt;
    `read` runs what waits for the disk, by default in a thread."""

    def __init__(
        self,
        store: Keeper,
        train: TrainSection,
        prompt_of: PromptOf,
        read: Read = asyncio.to_thread,
    ) -> None:
        self.store = store
        self._read = read
        self._prompt_of = prompt_of
        self._keep_batches = train.keep_batches
        self.buffer = Buffer(train.max_staleness, train.groups_per_step)
        self.ledger = Ledger()
        self.next_step = 0  # the trainer step whose batch has not been taken yet
        self._groups: dict[int, Group] = {}  # ready, not yet batched
        self._committing = asyncio.Lock()
        self._batch: Batch | None = None  # the newest, so that asking twice gives it twice
        self._saved = 0  # version of the newest checkpoint
        self.discards = 0  # since this object was made: others take their places

    # -- after a restart -------------------------------------------------------------------------

    def restore(self, version: int, done: int | None = None) -> Restored:
        """Stands where the store says, read against the checkpoint of `version`; blocks.

        `done`: steps of a trainer that lives; None: it begins at `version` and redoes the rest.
        Groups that do not fit into the bound any more are discarded by name.
        """
        rows = self.store.read_all()
        self._saved = version
        self.ledger = Ledger.restore(rows, version, done)
        recorded = self.ledger.batches()
        self.next_step = max([version, done or 0, *(step + 1 for step in recorded)])
        found = Restored(next_ordinal=max((row.ordinal + 1 for row in rows), default=0))
        live = [row for row in self.ledger.live_rows() if row.step is None]
        payloads = self.store.payloads(row.ordinal for row in live)
        for row in live:
            self._put_back(row, payloads.get(row.ordinal), found)
        found.discards = sum(self.ledger.counts()["discarded"].values())
        self._record()
        return found

    def _put_back(self, row: Row, payload: Recorded | None, found: Restored) -> None:
        kept = self._kept(row, payload)
        ready = isinstance(kept, Group)
        try:
            self.buffer.restore(row.ordinal, row.attempt, row.deadline, self.next_step, ready=ready)
        except BufferStateError:
            self.ledger.discarded(row.ordinal, LATE)
            return
        if kept is None:
            found.again[row.ordinal] = row.attempt
        elif isinstance(kept, Group):
            self._groups[row.ordinal] = kept
            if row.state == "scored":
                self.ledger.ready(row.ordinal, row.attempt)
        else:
            found.unscored[row.ordinal] = row.attempt, kept

    def _kept(self, row: Row, payload: Recorded | None) -> Group | Generated | None:
        """What a live group has that need not be made again; nothing of what is damaged."""
        if payload is None or payload.attempt != row.attempt:
            return None
        try:
            if row.state in ("scored", "ready") and payload.rewards is not None:
                return self._group(row, payload)
            return unpack_tokens(payload.tokens) if row.state == "generated" else None
        except RecordError as damaged:
            log.warning("group %d begins again: %s", row.ordinal, damaged)
            return None

    def _group(self, row: Row, payload: Recorded) -> Group:
        assert payload.rewards is not None
        prompt = self._prompt_of(row.ordinal)
        return unpack_group(prompt, row.attempt, row.deadline, payload.tokens, payload.rewards)

    # -- arrows ----------------------------------------------------------------------------------

    async def admit(self, ordinal: int, floor: int) -> None:
        """A new group, to be generated by versions from `floor` on."""
        deadline = self.buffer.admit(ordinal, 0, floor, self.next_step)
        self.ledger.admit(ordinal, deadline, floor)
        await apoint("ledger.admitted")
        self._record()

    async def generated(
        self,
        prompt: Prompt,
        attempt: int,
        completions: Sequence[Completion],
        payloads: Sequence[Payload],
    ) -> bool:
        """All samples are there; their tokens become durable. False if the attempt is over."""
        if not self.ledger.generated(prompt.ordinal, attempt):
            return False
        await apoint("ledger.generated")
        pack = partial(pack_tokens, prompt, completions, payloads)
        self.store.put(self.ledger.drain(), tokens=(prompt.ordinal, attempt, pack))
        return True

    async def ready(self, prompt: Prompt, attempt: int, samples: Sequence[Sample]) -> bool:
        """All rewards are there, and become durable; the group may be batched."""
        if not self.buffer.is_live(prompt.ordinal, attempt):
            return False
        await apoint("ledger.ready")
        if not self.buffer.ready(prompt.ordinal, attempt):
            return False  # discarded meanwhile
        deadline = self.buffer.deadline(prompt.ordinal)
        group = Group(prompt, attempt, deadline, tuple(samples))
        self._groups[prompt.ordinal] = group
        self.ledger.scored(prompt.ordinal, attempt)
        self.ledger.ready(prompt.ordinal, attempt)
        pack = partial(pack_rewards, group.samples)
        self.store.put(self.ledger.drain(), rewards=(prompt.ordinal, attempt, pack))
        return True

    async def retry(self, ordinal: int, attempt: int, floor: int) -> int | None:
        """The group begins again; returns its new attempt, None if this one is over.

        After a restart its deadline may be too early now: then it is discarded by name.
        """
        if not self.buffer.is_live(ordinal, attempt):
            return None
        try:
            deadline = self.buffer.retry(ordinal, attempt, floor)
        except BufferStateError:
            await self.discard(ordinal, attempt, LATE)
            return None
        new = self.ledger.retried(ordinal, deadline)
        await apoint("ledger.retried")
        self._record()
        return new

    async def discard(self, ordinal: int, attempt: int, reason: str) -> bool:
        """The group is over, by name. False if this attempt was over before."""
        if not self.buffer.discard(ordinal, attempt):
            return False
        self.ledger.discarded(ordinal, reason, attempt)
        self.discards += 1
        self._groups.pop(ordinal, None)
        await apoint("ledger.discarded")
        self.store.put(self.ledger.drain(), release=(ordinal,))
        return True

    async def close(self) -> Counts:
        """The run has its steps: what is live is not needed, and is discarded by name, durably."""
        left = self.ledger.live_rows()
        for row in left:
            self.buffer.discard(row.ordinal, row.attempt)
            self.ledger.discarded(row.ordinal, LEFT_OVER)
            self._groups.pop(row.ordinal, None)
        if left:
            await apoint("ledger.discarded")
            rows, gone = self.ledger.drain(), [row.ordinal for row in left]
            await asyncio.wrap_future(self.store.put(rows, release=gone))
        return self.ledger.counts()

    async def batch(self, step: int, ordinals: Sequence[int]) -> Batch:
        """The taken groups as the batch of `step`, once that is durable."""
        groups = tuple(self._groups.pop(ordinal) for ordinal in ordinals)
        self._batch = Batch(step, groups)
        self.next_step = step + 1
        if ordinals:
            self.ledger.batched(ordinals, step)
            await apoint("ledger.batched")
            async with self._committing:
                await asyncio.wrap_future(self.store.put(self.ledger.drain()))
            await apoint("ledger.batch_committed")
        return self._batch

    async def recorded(self, step: int) -> Batch | None:
        """The batch that `step` had, if it has had one; from disk unless it is the newest."""
        if (newest := self._batch) is not None and newest.step == step:
            async with self._committing:  # whoever asked first may wait for it still
                return newest
        ordinals = self.ledger.batch(step)
        if ordinals is None:
            if step < self.next_step:
                raise OffbeatError(f"the batch of step {step} is final: it is not kept any more")
            return None
        rows = [row for o in ordinals if (row := self.ledger.row(o)) is not None]
        payloads = await self._read(self.store.payloads, ordinals)
        missing = [o for o in ordinals if o not in payloads or payloads[o].rewards is None]
        if missing:
            raise OffbeatError(f"step {step}: the payload of groups {missing} is lost")
        return Batch(step, tuple(self._group(row, payloads[row.ordinal]) for row in rows))

    async def trained(self, step: int, flags: Mapping[int, Flag]) -> Counts:
        """Books a step; again: nothing happens."""
        await apoint("ledger.trained")
        final = self.ledger.batch(step) is None and step < self.next_step
        rows = [self.ledger.row(ordinal) for ordinal in flags]
        if not final and not all(row is not None and row.state == "trained" for row in rows):
            self.ledger.trained(step, flags)
            self._record()
        return self.ledger.counts()

    async def checkpointed(self, version: int) -> None:
        """A checkpoint of `version` is visible: what the one before it holds is final.

        One behind, so that with the newest damaged the previous one is gone on from.
        """
        await apoint("ledger.checkpointed")
        before, self._saved = self._saved, max(version, self._saved)
        if before == self._saved:
            return
        self.ledger.checkpointed(before)
        self.store.put(self.ledger.drain(), final_before=None if self._keep_batches else before)

    def redo(self, version: int) -> None:
        """The trainer begins again with `version`: later steps are to be trained once more."""
        self.ledger.redo(version)
        self._record()

    async def new_lineage(self) -> int:
        """A lineage that no weights had, durable before any have it."""
        meta = await self._read(self.store.meta)
        lineage = int(meta.get("lineage", "-1")) + 1
        await asyncio.wrap_future(self.store.put_meta("lineage", str(lineage)))
        return lineage

    async def copy_to(self, path: Path) -> None:
        """Writes all that was booked so far to `path`, as one file."""
        await asyncio.wrap_future(self.store.put(self.ledger.drain()))
        await self._read(self.store.copy_to, path)
        await apoint("ledger.copied", path)

    def _record(self) -> None:
        self.store.put(self.ledger.drain())
