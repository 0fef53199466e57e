"""Named points at which a test can break a process; free of cost while nothing is injected.

`offbeat.testing.faults` plans what happens where. The roles call `point(name)` in threads, and
`await apoint(name)` on an event loop, which may hang there without stopping the loop. A point that
has just written something names it by `path`, so that a test can damage it.

Processes started with the variable OFFBEAT_FAULTS read their plan there, at their first point.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

VARIABLES: Final = ("OFFBEAT_FAULTS", "OFFBEAT_FAULTS_LOG")
"""Of the environment: the plan as JSON, and the folder that remembers what fired."""

POINTS: Final[dict[str, str]] = {
    "ledger.admitted": "a group is admitted, its row not yet committed",
    "ledger.generated": "all samples have ended, their tokens not yet committed",
    "ledger.ready": "all rewards are there, not yet committed",
    "ledger.batched": "a batch is chosen, not yet committed",
    "ledger.batch_committed": "a batch is committed, not yet handed to the trainer",
    "ledger.trained": "the trainer has done a step, not yet booked",
    "ledger.discarded": "a group is discarded, not yet committed",
    "ledger.retried": "a group starts again as another attempt",
    "ledger.checkpointed": "a checkpoint is visible, its steps not yet final in the ledger",
    "ledger.copied": "the ledger's copy for a checkpoint is written",
    "store.before_commit": "rows are gathered, not yet written",
    "store.in_commit": "rows are written, not yet committed",
    "store.after_commit": "rows are committed, nobody has been told",
    "store.before_release": "payloads of final steps are about to be removed",
    "rollout.generate": "an engine is asked for a group",
    "rollout.completion": "a sample has ended",
    "rollout.restored": "the rollouter has been restored from the ledger",
    "reward.rate": "a sample is about to be scored",
    "engine.load": "an engine is about to load a version",
    "engine.loaded": "an engine holds a version, not yet acknowledged",
    "weights.before_publish": "the trainer is about to write a version",
    "weights.published": "a version is written, no engine knows of it",
    "weights.acknowledged": "an engine has acknowledged, the floor has not risen",
    "weights.floor": "all engines have acknowledged",
    "trainer.setup": "the trainer has loaded model or checkpoint",
    "trainer.before_step": "a batch has come, nothing is computed",
    "trainer.before_update": "the gradient is there, the weights are as before",
    "trainer.after_update": "the weights are new, the loop does not know",
    "checkpoint.begin": "the folder beside the checkpoint's name is made",
    "checkpoint.model": "the model is written there",
    "checkpoint.optimizer": "the optimizer is written there",
    "checkpoint.before_rename": "all is on disk, the name is not there",
    "checkpoint.renamed": "the checkpoint is visible",
    "checkpoint.pruned": "an old checkpoint has lost its name, its files are there",
    "driver.started": "all roles have started, the loop has not begun",
    "driver.step": "the driver has booked a step",
    "driver.saved": "a checkpoint is saved and booked",
}
"""What each point means: what has happened, and what has not."""

Hook = Callable[[str, Path | None], None]
AsyncHook = Callable[[str, Path | None], Awaitable[None]]


def install(hook: Hook | None, ahook: AsyncHook | None) -> None:
    """Sets what points call; None ends it. For `offbeat.testing.faults`."""
    global _hook, _ahook
    _hook, _ahook = hook, ahook


def environment() -> dict[str, str]:
    """The variables of a plan that this process was started with: for those that it starts."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def point(name: str, path: Path | None = None) -> None:
    """A point in a thread that may block."""
    if _hook is not None:
        _hook(name, path)


async def apoint(name: str, path: Path | None = None) -> None:
    """A point on an event loop."""
    if _ahook is not None:
        await _ahook(name, path)


def _first(name: str, path: Path | None) -> None:
    _read_environment()
    point(name, path)


async def _afirst(name: str, path: Path | None) -> None:
    _read_environment()
    await apoint(name, path)


def _read_environment() -> None:
    from offbeat.testing.faults import FaultPlan

    FaultPlan.from_environment().install()


_hook: Hook | None = _first if VARIABLES[0] in os.environ else None
_ahook: AsyncHook | None = _afirst if VARIABLES[0] in os.environ else None
