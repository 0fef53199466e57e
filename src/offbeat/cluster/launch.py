"""Runs a configuration from start to summary, on Ray or in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from offbeat.cluster.logs import log_to
from offbeat.cluster.plan import device_kind, plan_pools
from offbeat.cluster.roles import Roles
from offbeat.cluster.signals import LastResort, Signals
from offbeat.cluster.specs import GoOn, RunSpec, log_folder
from offbeat.config import Config
from offbeat.config_file import check_no_passwords
from offbeat.disk import check_local
from offbeat.errors import UserError
from offbeat.faults import apoint
from offbeat.ledger import Counts
from offbeat.loop import AsyncLoop
from offbeat.outcome import Outcome
from offbeat.rates import META_KEY, Rate, ended, unpack_rates
from offbeat.store import StoreError, lock_file, read_meta, read_rows
from offbeat.track.console import duration
from offbeat.track.metrics import LineFile, write_whole
from offbeat.track.recorder import Recorder, recorded
from offbeat.track.summary import FILE_NAME, RunStats, build_summary, write_summary
from offbeat.weights.transport import choose_folder

log = logging.getLogger(__name__)


def train(config: Config, stream: TextIO | None = sys.stdout) -> int:
    """Trains; returns 0. Raises `UserError` before anything is on disk, else what failed.

    The run directory holds a summary.json also after a failure.
    """
    return _launch(config, stream, None)


def resume(
    config: Config,
    go_on: GoOn | None,
    stream: TextIO | None = sys.stdout,
    *,
    claimed: bool = False,
) -> int:
    """Goes on with a run whose directory is there, as `train` does; None: it had not begun.
    `claimed`: the caller holds its lock (`claim`)."""
    if go_on is not None:
        go_on = replace(go_on, rates=_rates(config))
    return _launch(config, stream, Resume(go_on, claimed))


@dataclass(frozen=True, slots=True)
class Resume:
    """The run's directory is there already; `claimed`: and ours."""

    go_on: GoOn | None
    claimed: bool = False


def _launch(config: Config, stream: TextIO | None, resumed: Resume | None) -> int:
    started = time.time()

    def say(message: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            if stream is not None:
                stream.write(f"[{duration(time.time() - started)}] {message}\n")
                stream.flush()

    try:
        with LastResort() as last:
            outcome = asyncio.run(_run(config, stream, started, say, resumed, last))
    except (asyncio.CancelledError, SystemExit):  # the latter: SIGTERM while Ray starts
        raise KeyboardInterrupt from None
    if outcome.stopped:
        raise KeyboardInterrupt
    return 0


async def _run(
    config: Config,
    stream: TextIO | None,
    started: float,
    say: Callable[[str], None],
    resumed: Resume | None,
    last: LastResort,
) -> Outcome:
    check_no_passwords(config.reward)
    signals = Signals(config.cluster.grace_seconds, last)
    go_on = None if resumed is None else resumed.go_on
    run = RunSpec(
        run_id=f"{config.run}-{secrets.token_hex(3)}",
        device=device_kind(config),
        publish_folder=choose_folder(config, _model_bytes(config.model.path)),
        lineage=_lineage(config),
        go_on=go_on,
    )
    async with (
        _claimed(config, started, say, resumed) as claimed,
        _roles(config, run, say, signals) as roles,
    ):
        await apoint("driver.started")
        version = 0 if go_on is None else go_on.version
        if resumed is not None:  # whatever was refused until now has changed nothing
            record_config(config, started)
            (config.run_dir / FILE_NAME).unlink(missing_ok=True)  # what it says is over
        recorder = await _recorder(config, stream, started, roles.total_steps, resumed)
        recorder.begin(version, run.lineage)
        recorder.say(f"{roles.total_steps} steps; everything is in {config.run_dir}")
        loop = AsyncLoop(
            config,
            roles.rollouter,
            roles.trainer,
            recorder,
            roles.total_steps,
            version=version,
            resumed=go_on is not None,
            saved=go_on is not None and go_on.checkpoint is not None,
        )
        claimed.begun = True
        outcome = await _looped(loop, recorder, signals)
    if outcome.stopped:
        say(_go_on_with(config))
    else:
        say(f"finished: {outcome.steps} steps; {_told(outcome.counts)}")
    return outcome


async def _recorder(
    config: Config,
    stream: TextIO | None,
    started: float,
    total_steps: int,
    resumed: Resume | None,
) -> Recorder:
    """What a run tells; of one that is resumed with all that it told before."""
    recorder = Recorder(
        config.run_dir,
        bound=config.train.max_staleness,
        total_steps=total_steps,
        stream=stream,
        replicas=_replicas(config),
        started=started,
        sources=config.active_rewards,
    )
    if resumed is not None:
        await asyncio.to_thread(recorder.recall)
    return recorder


async def _looped(loop: AsyncLoop, recorder: Recorder, signals: Signals) -> Outcome:
    """Runs the loop; a first signal lets it save and end. The summary says how it ended."""

    def stop() -> None:
        recorder.say("ending: the step that runs is finished and saved; again: at once")
        loop.stopping.set()

    status: str = "finished"
    error: str | None = None
    signals.drain_with(stop)
    try:
        outcome = await loop.run()
        if outcome.stopped:
            status, error = "interrupted", "stopped by the user"
        return outcome
    except BaseException as failure:
        status, error = _ending(failure)
        raise
    finally:
        signals.drain_with(None)
        recorder.close(status, error)


def _go_on_with(config: Config) -> str:
    return f"go on with: offbeat resume {config.run_dir}"


def _lineage(config: Config) -> int:
    """One that no weights of this run had."""
    try:
        return int(read_meta(config.ledger_path).get("lineage", "-1")) + 1
    except sqlite3.OperationalError:  # not there, or its process was killed while it made it
        return 0


def _rates(config: Config) -> tuple[Rate, ...]:
    """With what the steps were trained whose batches the ledger has recorded."""
    path = config.ledger_path
    if not path.exists():
        return ()
    recorded = [row.step for row in read_rows(path) if row.step is not None]
    known = unpack_rates(read_meta(path).get(META_KEY, "[]"))
    return ended(known, max(recorded, default=-1) + 1)


@dataclass(slots=True)
class Claimed:
    """A run directory that is ours; `begun`: there is something in it to go on from."""

    begun: bool = False


@asynccontextmanager
async def _claimed(
    config: Config, started: float, say: Callable[[str], None], resumed: Resume | None
) -> AsyncIterator[Claimed]:
    """The run directory is ours. A new one goes again if the input is found bad before the loop.

    Whatever else ends the run before its loop is written into a summary.json.
    """
    check_local(config.ledger_path)
    directory, new = config.run_dir, resumed is None
    lock, logs = _own(config, started, resumed)
    claimed = Claimed()
    handler = log_to(logs, "driver")
    try:
        yield claimed
    except UserError:
        if new and not claimed.begun:
            shutil.rmtree(directory)
        else:
            say(_go_on_with(config))
        raise
    except BaseException as failure:
        say(_go_on_with(config))
        if not (directory / FILE_NAME).exists():
            status, said = _ending(failure)
            stats = RunStats(config.train.max_staleness, started)
            with stats.boundary:
                for record in recorded(directory):
                    stats.feed(record)
            summary = build_summary(stats, status=status, now=time.time(), error=said)
            write_summary(directory, summary)
        raise
    finally:
        _free(lock)
        if handler is not None:
            logging.getLogger().removeHandler(handler)
            handler.close()


def _own(config: Config, started: float, resumed: Resume | None) -> tuple[int | None, Path]:
    """Makes what a run's directory has from the start on; returns its lock (None: somebody else
    here has it) and its logs."""
    directory, new = config.run_dir, resumed is None
    try:
        directory.mkdir(parents=True, exist_ok=not new)
    except FileExistsError:
        raise UserError(
            f"run: {directory} exists already; choose another name with --run NAME, or go on with "
            f"it: offbeat resume {directory}"
        ) from None
    except OSError as denied:
        raise UserError(
            f"runs_dir: {directory} cannot be made ({denied.strerror}); set it to a folder that "
            "can be written to"
        ) from None
    logs, ledger = log_folder(config), config.ledger_path.parent
    lock: int | None = None
    try:
        if resumed is None or not resumed.claimed:
            lock = claim(directory)
        if new:
            record_config(config, started)
        logs.mkdir(exist_ok=True)
        ledger.mkdir(parents=True, exist_ok=True)
    except BaseException as failure:
        _free(lock)
        if new:
            shutil.rmtree(directory)
        if isinstance(failure, OSError):
            setting = "runs_dir" if ledger == directory else "ledger_dir"
            raise UserError(
                f"{setting}: {failure.filename} cannot be made ({failure.strerror}); set it to a "
                "folder that can be written to"
            ) from None
        raise
    return lock, logs


def _free(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def record_config(config: Config, started: float, directory: Path | None = None) -> None:
    """The resolved configuration as config.json, and as the newest line of configs.jsonl, in the
    run's directory, or where that is being made."""
    directory = config.run_dir if directory is None else directory
    resolved = config.model_dump(mode="json", by_alias=True)
    try:
        write_whole(directory / "config.json", json.dumps(resolved, indent=2) + "\n")
        history = LineFile(directory / "configs.jsonl")
        try:
            history.append(json.dumps({"time": started, "config": resolved}).encode() + b"\n")
        finally:
            history.close()
    except OSError as error:
        raise UserError(
            f"{directory}: the configuration cannot be written ({error.strerror}); make room, "
            "or set runs_dir to a folder that can be written to"
        ) from None


def claim(directory: Path) -> int:
    """The lock of a run directory, which one driver has at a time; an open file."""
    try:
        return lock_file(directory / "driver")
    except StoreError as taken:
        raise UserError(
            f"{directory} is being trained: {taken}; end that process first, or wait for it"
        ) from None
    except OSError as denied:
        raise UserError(
            f"{directory} cannot be written to ({denied.strerror}), which a run needs; make room, "
            "or see to whom it belongs"
        ) from None


def _ending(failure: BaseException) -> tuple[str, str]:
    """A run's status and error, from what ended it."""
    if not isinstance(failure, Exception):  # Ctrl-C, SIGTERM
        return "interrupted", "stopped by the user"
    return "failed", str(failure) or repr(failure)


def _told(counts: Counts) -> str:
    """What became of the groups, in words."""
    lost = sum(counts["discarded"].values())
    why = ", ".join(f"{reason} {n}" for reason, n in counts["discarded"].items())
    return (
        f"{counts['trained']} groups trained, {counts['no_signal']} of them without signal, "
        f"{lost} discarded" + (f" ({why})" if why else "")
    )


def _roles(
    config: Config, run: RunSpec, say: Callable[[str], None], signals: Signals
) -> AbstractAsyncContextManager[Roles]:
    if config.cluster.backend == "local":
        from offbeat.cluster.local import local_roles

        return local_roles(config, run)
    try:
        from offbeat.cluster.ray_roles import ray_roles
    except ImportError:
        raise UserError(
            "cluster.backend = ray, but Ray is not installed; install ray, or set "
            "--cluster.backend local to run everything in one process"
        ) from None
    return ray_roles(config, run, say, signals)


def _replicas(config: Config) -> dict[str, int]:
    """Processes that compute, by the role that their spans name."""
    return {plan.name: plan.replicas for plan in plan_pools(config)}


def _model_bytes(path: Path) -> int:
    """Bytes of a model's weights as they are published: its files, as float32 at most."""
    return 2 * sum(file.stat().st_size for file in path.glob("*.safetensors"))
