"""The roles as the loop sees them, wherever they run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from offbeat.errors import DeadlinePassed, RoleDied
from offbeat.ledger import Counts, Flag
from offbeat.records import Batch, Completion, GenerateRequest, Manifest, PolicyVersion, Span

if TYPE_CHECKING:
    from offbeat.reward.anchors import AnchorReport
    from offbeat.reward.loop import SourceStats
    from offbeat.rollout.parts import Tally
    from offbeat.train.step import StepResult
    from offbeat.weights.sync import SyncReport

T = TypeVar("T")
GRACE_SECONDS = 120.0  # for a role to answer, beyond what it waits for by a setting of its own


class RollouterRole(Protocol):
    """The rollouter. Calls raise `RoleDied` when its process has ended."""

    async def batch(self, step: int) -> Batch: ...
    async def trained(self, step: int, flags: Mapping[int, Flag]) -> Counts: ...
    async def published(self, manifest: Manifest) -> int: ...
    async def checkpointed(self, step: int) -> None: ...
    async def validate(self) -> tuple[int, dict[str, float]]: ...
    async def held_out(self) -> list[GenerateRequest]: ...
    async def assess(self, answers: Sequence[Completion]) -> dict[str, float]: ...
    async def counts(self) -> Counts: ...
    async def finish(self) -> Counts: ...
    async def reward_stats(self) -> Mapping[str, SourceStats]: ...
    async def notices(self) -> list[str]: ...
    async def looks(self, wait_seconds: float = 0.0) -> list[AnchorReport]: ...
    async def drain(self) -> tuple[list[Span], list[SyncReport], Tally]: ...
    async def next_step(self) -> int: ...
    async def redo(self, version: int) -> None: ...
    async def new_lineage(self) -> int: ...
    async def copy_ledger(self, path: Path) -> None: ...
    async def ping(self) -> None: ...
    async def stop(self) -> None: ...

    async def restart(self, version: int, done: int) -> None:
        """Ends what is left of it and begins again from the ledger, read against the checkpoint of
        `version` and a trainer that has `done` so many steps."""
        ...


class TrainerRole(Protocol):
    """The trainer; calls are collective over its ranks, and raise `RoleDied` when one has ended."""

    async def step(self, batch: Batch) -> StepResult: ...
    async def publish(self) -> Manifest: ...
    async def answer(
        self, requests: Sequence[GenerateRequest]
    ) -> tuple[PolicyVersion, list[Completion]]: ...
    async def save(
        self, path: Path, extra: Mapping[str, Any], files: Mapping[str, Path]
    ) -> None: ...
    async def drain_spans(self) -> list[Span]: ...
    async def ping(self) -> None: ...

    async def restart(self, lineage: int, checkpoint: Path | None) -> PolicyVersion:
        """Ends what is left of it and begins again from a checkpoint (None: from the model), in a
        new lineage; returns the version it holds."""
        ...


class Asking:
    """Calls of roles, each within a deadline: a role that does not keep it has died."""

    def __init__(self, trainer_seconds: float) -> None:
        """`trainer_seconds`: the setting `train.deadline_seconds`."""
        self.trainer_is_well = True
        self._seconds = trainer_seconds

    async def trainer(self, what: str, call: Awaitable[T], seconds: float | None = None) -> T:
        """What the trainer answers; while it is asked, and after a failure, it is not well."""
        whom = f"the trainer's {what}"
        if seconds is None:
            seconds, whom = self._seconds, f"{whom} (train.deadline_seconds)"
        self.trainer_is_well = False
        found = await _asked("trainer", seconds, whom, call)
        self.trainer_is_well = True
        return found

    async def ping(self, trainer: Awaitable[None], seconds: float) -> None:
        """Asks the trainer for a heartbeat, which it gives beside its work: that says nothing of
        how the work goes."""
        await _asked("trainer", seconds, "the trainer's heartbeat", trainer)

    async def rollouter(self, what: str, call: Awaitable[T], seconds: float | None = None) -> T:
        """What the rollouter answers."""
        whom = f"the rollouter's {what}"
        return await _asked("rollouter", seconds or GRACE_SECONDS, whom, call)


async def _asked(role: str, seconds: float, whom: str, call: Awaitable[T]) -> T:
    try:
        return await within(seconds, whom, call)
    except DeadlinePassed as late:
        raise RoleDied(role, f"the {role} hangs: {late}") from late


async def within(seconds: float, whom: str, call: Awaitable[T]) -> T:
    """Awaits a role's answer; `DeadlinePassed` says whom it waited for."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call
    except TimeoutError as late:
        if not limit.expired():
            raise
        raise DeadlinePassed(f"{whom} did not come within {seconds:g} s") from late
