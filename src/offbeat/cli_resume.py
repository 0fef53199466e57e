"""`offbeat resume RUN`: finds where a run stopped, and goes on from there.

Nothing in the run's directory changes before all is found well: the configuration is read and
compared, the ledger and the newest checkpoint are there, no other process trains the run.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.cluster.specs import GoOn
from offbeat.config import Config
from offbeat.config_base import RUN_NAME
from offbeat.config_file import check_files, check_no_passwords, load_config
from offbeat.config_resume import check_changes
from offbeat.errors import UserError
from offbeat.store import read_meta, read_payloads, read_rows
from offbeat.train.checkpoint import all_checkpoints, newest_valid, version_of

Say = Callable[[str], None]
RUNS = Path("runs")
NAME = re.compile(RUN_NAME)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run goes on; `go_on` None: it had not begun. `finished`: steps of a run that is."""

    config: Config
    go_on: GoOn | None
    changes: tuple[str, ...] = ()
    finished: int | None = None


def plan_resume(run: Path, overrides: Sequence[str] = ()) -> Plan:
    """Reads a run's directory, and nothing else; `UserError` for what the user mends."""
    directory = find_run(run)
    before = config_of(directory)
    after, changes = changed_config(directory, overrides, directory)
    checkpoint = newest_valid(directory / "checkpoints")
    version = 0 if checkpoint is None else version_of(checkpoint)
    recorded = _recorded_steps(after, directory)
    if recorded is None:
        return Plan(after, None, tuple(changes))
    damaged = [p for p in all_checkpoints(directory / "checkpoints") if version_of(p) > version]
    if damaged or (checkpoint is None and recorded > 0):
        _need_batches(after.ledger_path, version, damaged)
    done = max(version, recorded)
    if after.train.steps is not None and after.train.steps < done:
        raise UserError(
            f"train.steps = {after.train.steps}, but {done} steps have their batches already; set "
            f"it to at least {done}, or leave it out"
        )
    longer = after.train.steps != before.train.steps or version < (after.train.steps or 0)
    finished = version if not longer and _is_finished(directory, version) else None
    return Plan(after, GoOn(version, checkpoint), tuple(changes), finished)


def resume(run: Path, overrides: Sequence[str], say: Say, note: Say) -> int:
    """Goes on with a run; returns the exit code. `note` is told what it goes on without."""
    from offbeat.cli_check import preflight
    from offbeat.cluster import launch

    directory = find_run(run)
    if not (directory / "config.json").is_file():
        raise UserError(_no_config(directory))
    lock = launch.claim(directory)  # from here on nobody else changes what the plan is made of
    try:
        plan = plan_resume(run, overrides)
        if plan.finished is not None:
            steps = plan.finished
            say(f"{directory} is finished: all {steps} steps are done, nothing is left to do")
            return 0
        preflight(plan.config, lambda line: None, note, new=False)
        for change in plan.changes:
            say(f"changed: {change}")
        say(_where(directory, plan.go_on))
        return launch.resume(plan.config, plan.go_on, sys.stdout, claimed=True)
    finally:
        os.close(lock)


def find_run(run: Path) -> Path:
    """A run's directory, absolute: as named, or of that name under ./runs."""
    found = run if run.is_dir() or not NAME.fullmatch(str(run)) else RUNS / run
    if not found.is_dir():
        raise UserError(
            f"{run} is no run directory, and no name of one under {RUNS.resolve()}; name the "
            "directory of a run, as `offbeat train` says it"
        )
    return found.resolve()


def config_of(directory: Path) -> Config:
    """The configuration that a run's directory (absolute) holds, as it lies now."""
    return _of_directory(_saved_config(directory / "config.json"), directory)


def changed_config(
    directory: Path, overrides: Sequence[str], into: Path
) -> tuple[Config, list[str]]:
    """A run's configuration with overrides that do no harm, for the directory `into`; and what they
    change, in words."""
    saved = directory / "config.json"
    before = config_of(directory)
    after = load_config(saved, _placed(overrides, into), files=False, base=before.base_dir)
    check_no_passwords(after.reward)
    placed = before.model_copy(update={"run": into.name, "runs_dir": into.parent})
    changes = check_changes(placed, after)
    check_files(after, saved)
    return after, changes


def _where(directory: Path, go_on: GoOn | None) -> str:
    if go_on is None:
        return f"{directory.name} had not begun; it begins now"
    if go_on.checkpoint is None:
        return f"{directory.name} goes on from the model: there is no checkpoint yet"
    return f"{directory.name} goes on from {go_on.checkpoint.name}"


def _no_config(directory: Path) -> str:
    return (
        f"{directory} has no config.json, so it is no run directory, or that of a run that ended "
        "before it began; name another one, or begin the run again with offbeat train"
    )


def _saved_config(path: Path) -> dict[str, Any]:
    """The resolved configuration as the run wrote it."""
    if not path.is_file():
        raise UserError(_no_config(path.parent))
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({error}); put back its newest line of configs.jsonl"
        ) from None
    if not isinstance(raw, dict) or "runs_dir" not in raw:
        raise UserError(f"{path} is no configuration that a run wrote; put that back")
    return raw


def _of_directory(raw: dict[str, Any], directory: Path) -> Config:
    """As it was saved, but where the directory lies now."""
    config = load_config(directory / "config.json", _placed((), directory), files=False)
    if config.ledger_dir is not None and raw.get("run") != directory.name:
        raise UserError(
            f"{directory} was called {raw.get('run')} when its ledger was put under "
            f"{config.ledger_dir}; give it its name back"
        )
    return config


def _placed(overrides: Sequence[str], directory: Path) -> list[str]:
    """The overrides, and behind them where the directory lies."""
    for word in overrides:
        key = word.partition("=")[0].replace("-", "_").lstrip("_")
        if key in ("run", "runs_dir"):
            raise UserError(
                f"{word.partition('=')[0]} cannot change when a run is resumed: the run is the "
                "directory that is resumed; rename or move that instead"
            )
    if not NAME.fullmatch(directory.name):
        raise UserError(
            f"{directory.name!r} is no name of a run: letters, digits, `.`, `_` and `-` make one; "
            "rename the directory"
        )
    return [*overrides, "--run", directory.name, "--runs_dir", str(directory.parent)]


def _recorded_steps(config: Config, directory: Path) -> int | None:
    """Steps whose batches the ledger has recorded; None: the run had not begun."""
    path = config.ledger_path
    if not path.exists():
        if all_checkpoints(directory / "checkpoints"):
            raise UserError(
                f"{path}, the run's ledger, is gone, though there are checkpoints; put it back, or "
                "copy trainer/ledger.sqlite of the newest checkpoint there"
            )
        return None
    try:
        if not read_meta(path):
            return None
        steps = [row.step for row in read_rows(path) if row.step is not None]
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):  # killed while it was made
            return None
        raise UserError(f"{path}, the run's ledger, cannot be read: {error}") from None
    except sqlite3.Error as error:
        raise UserError(
            f"{path}, the run's ledger, is damaged ({error}); put it back, or copy "
            "trainer/ledger.sqlite of the newest checkpoint there"
        ) from None
    return max(steps, default=-1) + 1


def _need_batches(ledger: Path, version: int, damaged: Sequence[Path]) -> None:
    """Refuses to begin at a version after which a batch is not kept any more."""
    steps = {row.ordinal: row.step for row in read_rows(ledger) if row.step is not None}
    for ordinal in sorted(o for o, step in steps.items() if step >= version):
        kept = read_payloads(ledger, [ordinal]).get(ordinal)
        if kept is None or kept.rewards is None:
            what = ", ".join(path.name for path in damaged)
            what = f"damaged: {what}" if what else "there is none"
            raise UserError(
                f"no checkpoint can be gone on from ({what}): the batch of step {steps[ordinal]} "
                "is not kept any more; put one back, or begin another run"
            )


def _is_finished(directory: Path, version: int) -> bool:
    """Whether the summary says so, and the last checkpoint is there."""
    try:
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        return bool(summary["status"] == "finished" and summary["steps"] <= version)
    except (OSError, ValueError, KeyError, TypeError):
        return False
