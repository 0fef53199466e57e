"""Where the matrices break a run, and which time: in the middle of four steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offbeat.testing.faults import Fault


@dataclass(frozen=True, slots=True)
class Case:
    """A kill at a point, with what must go wrong before, and settings that bring a run there."""

    point: str
    nth: int
    before: tuple[Fault, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What makes a run get there, and the kill."""
        return (*self.before, Fault(self.point, "kill", nth=self.nth))


_LOST = (Fault("rollout.generate", "raise", nth=4),)  # tried again; with one attempt: discarded
_ONCE = {"rollout__max_attempts": 1}

CASES = (
    Case("ledger.admitted", 5),
    Case("ledger.generated", 4),
    Case("ledger.ready", 4),
    Case("ledger.batched", 2),
    Case("ledger.batch_committed", 2),
    Case("ledger.trained", 2),
    Case("ledger.discarded", 1, _LOST, _ONCE),
    Case("ledger.retried", 1, _LOST),
    Case("ledger.checkpointed", 2),
    Case("ledger.copied", 2),
    Case("store.before_commit", 7),
    Case("store.in_commit", 7),
    Case("store.after_commit", 7),
    Case("store.before_release", 1, _LOST, _ONCE),
    Case("rollout.generate", 5),
    Case("rollout.completion", 14),
    Case("rollout.restored", 1, (Fault("driver.step", "kill", nth=3),)),
    Case("reward.rate", 14),
    Case("engine.load", 2),
    Case("engine.loaded", 2),
    Case("weights.before_publish", 2),
    Case("weights.published", 2),
    Case("weights.acknowledged", 2),
    Case("weights.floor", 2),
    Case("trainer.setup", 1),
    Case("trainer.before_step", 3),
    Case("trainer.before_update", 3),
    Case("trainer.after_update", 3),
    Case("checkpoint.begin", 2),
    Case("checkpoint.model", 2),
    Case("checkpoint.optimizer", 2),
    Case("checkpoint.before_rename", 2),
    Case("checkpoint.renamed", 2),
    Case("checkpoint.pruned", 1, settings={"train__keep_checkpoints": 1}),
    Case("driver.started", 1),
    Case("driver.step", 3),
    Case("driver.saved", 2),
)

SHORT: Mapping[str, object] = {
    "train__steps": 4,
    "train__checkpoint_every": 2,
    "train__keep_checkpoints": 5,
    "train__keep_batches": True,
}
"""Settings of every run of the matrices."""
