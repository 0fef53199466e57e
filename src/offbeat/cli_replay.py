"""`offbeat replay RUN`: trains it again from what it recorded, and says where that differs."""

from __future__ import annotations

import math
import sqlite3
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.cli_models import check_policy_model
from offbeat.cli_resume import config_of, find_run
from offbeat.config import Config
from offbeat.errors import OffbeatError, RunFailed, UserError
from offbeat.redo_log import RedoLog
from offbeat.track.metrics import read_metrics
from offbeat.train.checkpoint import all_checkpoints, newest_valid, read, version_of

if TYPE_CHECKING:
    from offbeat.train.replay import Replay
    from offbeat.train.step import StepResult

Say = Callable[[str], None]
Record = Mapping[str, Any]


def replay(run: Path, first: int | None, out: Path | None, say: Say) -> int:
    """Trains from the checkpoint of step `first` (None: the oldest) to the last recorded step.

    Returns 1 if in the end the weights are others than the run's though they had to be the same
    (float32 on one CPU thread), else 0. Writes a checkpoint under `out` (None: RUN/replay).
    """
    directory = find_run(run)
    config = config_of(directory)
    out = directory / "replay" if out is None else out.resolve()
    if out == directory / "checkpoints":
        raise UserError(f"--out {out} holds the run's own checkpoints; name another folder")
    start, log = _start(directory, first), _log(config, directory)
    _check_kept(log, directory, 0 if start is None else version_of(start))
    if start is None:
        check_policy_model(config.model.path, "model.path")
    newest = newest_valid(directory / "checkpoints")
    from offbeat.train.replay import Replay

    try:
        out.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".weights-", dir=out)
    except OSError as denied:
        raise UserError(f"--out {out} cannot be written to ({denied.strerror})") from None
    with scratch as folder:
        made = Replay(config, log, start, Path(folder))
        try:
            return _train(made, config, directory, newest, out, say)
        finally:
            made.close()


def _train(
    made: Replay, config: Config, directory: Path, newest: Path | None, out: Path, say: Say
) -> int:
    """The steps, the comparison and the checkpoint."""
    recorded = _recorded(directory)
    begin = "the model" if made.trainer.version.step == 0 else f"step {made.first}"
    say(f"replaying {directory.name} from {begin}")
    differs: str | None = None
    verdict, equal = _at(made, newest)
    try:
        for result in made.steps():
            line, difference = _line(result, recorded.get(result.step))
            say(line)
            differs = differs or difference
            if verdict is None:
                verdict, equal = _at(made, newest)
    except RunFailed as failed:  # as the run had to end
        say(f"it ends here: {failed}")
        verdict, equal = (verdict, equal) if verdict else _at(made, newest)
    say(f"differs first at {differs}" if differs else "no step differs from what was recorded")
    say(f"wrote {made.save(out)}")
    say(verdict or "there is no checkpoint of the run among these steps to compare weights with")
    exact = config.train.threads == 1 and config.model.dtype == "float32"
    exact = exact and made.trainer.model.device.type == "cpu"
    return 1 if exact and not equal else 0


def _at(made: Replay, newest: Path | None) -> tuple[str | None, bool]:
    """What there is to say about the weights where the newest checkpoint was made, and whether
    they are equal; (None, True) elsewhere."""
    if newest is None or version_of(newest) != made.trainer.version.step:
        return None, True
    found = made.compare(newest)
    if not found.differing:
        return f"weights equal {newest.name} of the run bit for bit ({found.tensors} tensors)", True
    return (
        f"weights differ from {newest.name} of the run in {len(found.differing)} of "
        f"{found.tensors} tensors, first {found.differing[0]}, by {found.largest:.3g} at most",
        False,
    )


def _line(result: StepResult, recorded: Record | None) -> tuple[str, str | None]:
    """A step's line, and what differs in it."""
    mine = {"loss": result.loss, "grad_norm": result.grad_norm, "reward": result.reward_mean}
    parts = [f"{name} {value:.6g}" for name, value in mine.items()]
    head = f"step {result.step}: " + "  ".join(parts)
    if recorded is None:
        return f"{head}  (not recorded)", None
    there = {
        "loss": recorded.get("loss"),
        "grad_norm": recorded.get("grad_norm"),
        "reward": recorded.get("reward", {}).get("total"),
    }
    apart = [
        f"{name} {_shown(mine[name])}, recorded {_shown(there[name])}"
        for name in mine
        if not _equal(mine[name], there[name])
    ]
    if not apart:
        return f"{head}  as recorded", None
    return f"{head}  differs: {'; '.join(apart)}", f"step {result.step}: {'; '.join(apart)}"


def _equal(mine: float, there: float | None) -> bool:
    """Not finite numbers are recorded as null."""
    return not math.isfinite(mine) if there is None else mine == there


def _shown(value: float | None) -> str:
    return "none" if value is None else repr(value)


def _recorded(directory: Path) -> dict[int, Record]:
    """The newest record of each step; none where metrics.jsonl cannot be read."""
    try:
        found = read_metrics(directory / "metrics.jsonl")
        return {record["step"]: record for record in found if record["type"] == "step"}
    except OSError:
        return {}


def _start(directory: Path, first: int | None) -> Path | None:
    """The checkpoint to begin with; None: the model."""
    folder = directory / "checkpoints"
    there = all_checkpoints(folder)
    if first is None:
        return next((path for path in there if _is_whole(path)), None)
    for path in there:
        if version_of(path) == first:
            read(path)
            return path
    if first == 0:
        return None
    names = ", ".join(str(version_of(path)) for path in there) or "none"
    raise UserError(f"{directory} has no checkpoint of step {first}; there are those of: {names}")


def _is_whole(path: Path) -> bool:
    try:
        read(path)
    except OffbeatError:
        return False
    return True


def _log(config: Config, directory: Path) -> RedoLog:
    try:
        log = RedoLog.read(config.ledger_path)
    except sqlite3.Error as error:
        raise UserError(
            f"{config.ledger_path}, the ledger of {directory.name}, cannot be read: {error}"
        ) from None
    if not log.steps:
        raise UserError(f"{directory} has recorded no step yet: there is nothing to replay")
    return log


def _check_kept(log: RedoLog, directory: Path, first: int) -> None:
    if log.end <= first:
        raise UserError(
            f"{directory} has recorded no step after the checkpoint of step {first}; name an "
            "earlier one with --from"
        )
    lost = log.lost(first)
    if lost is None:
        return
    later = [version_of(path) for path in all_checkpoints(directory / "checkpoints")]
    later = [version for version in later if lost < version < log.end]
    hint = f"; what came after is there: --from {later[0]}" if later else ""
    raise UserError(
        f"{directory} has not kept the batch of step {lost}: to be replayed, a run needs "
        f"train.keep_batches = true from its start{hint}"
    )
