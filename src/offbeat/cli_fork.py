"""`offbeat fork RUN --step N NEW`: begins another run at a checkpoint of this one.

The new run has the checkpoint (hard links, where the disk can) and the ledger as it was when that
was made: its unfinished groups are trained under their ordinals, what had been generated or judged
of them is not generated or judged again. It appears at once, when all of it is there, and is a run
of its own from then on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from offbeat.cli_resume import NAME, changed_config, config_of, find_run, resume
from offbeat.config import Config
from offbeat.errors import OffbeatError, UserError
from offbeat.rates import META_KEY, ended, pack_rates, unpack_rates
from offbeat.store import Store, StoreError, read_counts, read_meta
from offbeat.train.checkpoint import LEDGER_COPY, all_checkpoints, read, version_of

Say = Callable[[str], None]


def fork(
    run: Path, step: int, name: str, overrides: Sequence[str], say: Say, note: Say, *, go: bool
) -> int:
    """Makes the run `name` beside `run`, with the overrides that `resume` takes as well; with `go`
    it goes on at once. Returns the exit code."""
    directory = find_run(run)
    before = config_of(directory)
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} is no name of a run: letters, digits, `.`, `_` and `-` make one")
    new = directory.parent / name
    config, changes = changed_config(directory, overrides, new)
    for there in (new, config.ledger_path):
        if there.exists():
            raise UserError(f"{there} exists already; choose another name for the new run")
    checkpoint = _checkpoint(directory, step)
    _build(directory, before, checkpoint, config)
    counts = read_counts(config.ledger_path)
    for change in changes:
        say(f"changed: {change}")
    say(
        f"{new} begins at {checkpoint.name} of {directory.name}; groups under way: {counts['live']}"
    )
    if not go:
        say(f"go on with: offbeat resume {new}")
    return resume(new, (), say, note) if go else 0


def _checkpoint(directory: Path, step: int) -> Path:
    """The whole checkpoint of a step, which has a copy of the ledger."""
    there = all_checkpoints(directory / "checkpoints")
    found = [path for path in there if version_of(path) == step]
    if not found:
        names = ", ".join(str(version_of(path)) for path in there) or "none"
        raise UserError(
            f"{directory} has no checkpoint of step {step}; there are those of: {names}"
        )
    try:
        read(found[0])
    except OffbeatError as damaged:
        raise UserError(f"{damaged}; fork from another one") from None
    if not (found[0] / LEDGER_COPY).is_file():
        raise UserError(
            f"{found[0]} has no copy of the ledger ({LEDGER_COPY}), as one that was saved when the "
            "run failed; fork from another one"
        )
    return found[0]


def _build(directory: Path, before: Config, checkpoint: Path, config: Config) -> None:
    """Makes the new run beside its name, and gives it that at last."""
    from offbeat.cluster.launch import record_config

    new, ledger = config.run_dir, config.ledger_path
    inside = ledger.is_relative_to(new)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{new.name}-fork-", dir=new.parent))
    except OSError as denied:
        raise UserError(f"{new} cannot be made ({denied.strerror})") from None
    place = folder / ledger.relative_to(new) if inside else ledger
    try:
        folder.chmod(0o755)
        shutil.copytree(checkpoint, folder / "checkpoints" / checkpoint.name, copy_function=_link)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint / LEDGER_COPY, place)
        _go_on(place, before.ledger_path, directory.name, version_of(checkpoint))
        record_config(config, time.time(), folder)
        folder.rename(new)
    except BaseException as failure:
        shutil.rmtree(folder, ignore_errors=True)
        if not inside:
            place.unlink(missing_ok=True)
        if isinstance(failure, (OSError, sqlite3.Error, StoreError)):
            raise UserError(f"{new} cannot be made: {failure}") from failure
        raise


def _go_on(ledger: Path, of: Path, name: str, version: int) -> None:
    """The copy as the ledger of a run: lineages that the other run had since are not used again,
    and steps that are still to be trained have the new run's rate."""
    mine = newest = read_meta(ledger)
    with contextlib.suppress(sqlite3.Error):  # the other run's ledger may be gone
        newest = read_meta(of)
    rates = ended(unpack_rates(mine.get(META_KEY, "[]")), version)
    lineage = max(int(mine.get("lineage", "0")), int(newest.get("lineage", "0")))
    store = Store(ledger)
    try:
        store.put_meta(META_KEY, pack_rates(rates))
        store.put_meta("fork", json.dumps({"run": name, "step": version}))
        store.put_meta("lineage", str(lineage)).result()
    finally:
        store.close()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one that has no hard links
        shutil.copy2(source, target)
