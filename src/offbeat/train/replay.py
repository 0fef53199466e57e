"""Trains a run again from its own record: no engine, no judge, no data.

Consumes the recorded batches in their order, from a checkpoint on; produces the trainer's numbers
of each step and, in the end, a checkpoint. In float32 on one CPU thread all of it is the run's bit
for bit, so that where a number differs first is where something else happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from offbeat.config import Config
from offbeat.errors import OffbeatError
from offbeat.redo_log import RedoLog
from offbeat.train.checkpoint import checkpoint_name
from offbeat.train.step import StepResult
from offbeat.train.trainer import Trainer

NO_PRUNING = 1 << 30


@dataclass(frozen=True, slots=True)
class Compared:
    """Weights beside those of a checkpoint: how many tensors there are, the names of those that
    differ, and the largest difference in one number."""

    tensors: int
    differing: tuple[str, ...]
    largest: float


class Replay:
    """A trainer of its own, that begins at `start` (a checkpoint; None: the run's model).

    Whatever it writes while it trains goes under `folder`. Raises as `Trainer.setup` does.
    """

    def __init__(self, config: Config, log: RedoLog, start: Path | None, folder: Path) -> None:
        train = config.train.model_copy(update={"keep_checkpoints": NO_PRUNING})
        weights = config.weights.model_copy(update={"transport": "folder"})
        self._log = log
        self.trainer = Trainer(
            config.model_copy(update={"train": train, "weights": weights}),
            total_steps=log.rates[-1].total_steps if log.rates else log.end,
            publish_folder=folder,
            run_id="replay",
            rates=log.rates,
        )
        self.first = self.trainer.setup(start).step

    def steps(self) -> Iterator[StepResult]:
        """Trains one recorded step after another. Raises `RunFailed` where the run had to."""
        for step in range(self.first, self._log.end):
            batch = self._log.batch(step)
            payloads = [[sample.completion.ref for sample in g.samples] for g in batch.groups]
            yield self.trainer.step(batch, payloads)

    def save(self, folder: Path) -> Path:
        """Writes `folder/step-N`, a checkpoint like the run's; without a copy of the ledger."""
        path = folder / checkpoint_name(self.trainer.version.step)
        self.trainer.save(path, {"replay_of": str(self._log.path), "from": self.first})
        return path

    def compare(self, checkpoint: Path) -> Compared:
        """The present weights beside those of a checkpoint, bit by bit."""
        mine = self.trainer.model.module.state_dict()
        tensors, largest, differing = 0, 0.0, []
        for file in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(file, framework="pt") as theirs:
                for name in theirs.keys():  # noqa: SIM118 - it is no mapping
                    tensors += 1
                    there, here = theirs.get_tensor(name), mine[name].detach().cpu()
                    if _same_bits(here, there):
                        continue
                    differing.append(name)
                    apart = (here.double() - there.double()).abs().max()
                    largest = max(largest, float(apart.nan_to_num(torch.inf)))
        if not tensors:
            raise OffbeatError(f"{checkpoint} holds no weights")
        return Compared(tensors, tuple(differing), largest)

    def close(self) -> None:
        """Removes what the trainer published."""
        self.trainer.close()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
