"""Commands in processes of their own, forked from one that has imported all: a start takes a second
or two, and can be killed for real."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from offbeat.store import Row, read_rows
from offbeat.testing.faults import Fault, FaultPlan

SECONDS = 300.0


class Started:
    """`offbeat WORDS`, with faults at points of it; what it says is in `said`."""

    def __init__(self, words: Sequence[object], folder: Path, *faults: Fault) -> None:
        number = len(list(folder.glob("said-*.log")))
        self.said = folder / f"said-{number}.log"
        self.said.touch()
        self.plan = FaultPlan(faults, folder / f"faults-{number}")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.faults.preload"])
        texts = [str(word) for word in words]
        self.process: ForkServerProcess = context.Process(
            target=_main, args=(texts, faults, self.plan.log, self.said, dict(os.environ))
        )
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def text(self) -> str:
        """All that it has said."""
        return self.said.read_text()

    def until(self, there: Callable[[], Any], what: str) -> None:
        """Waits until something holds while the process lives."""
        end = time.monotonic() + SECONDS
        while not there():
            assert self.process.is_alive(), f"ended before {what}\n{self.text}"
            assert time.monotonic() < end, f"waited {SECONDS:g} s for {what}\n{self.text}"
            time.sleep(0.02)

    def says(self, words: str) -> None:
        """Waits until it has said something."""
        self.until(lambda: words in self.text, words)

    def fires(self) -> None:
        """Waits until one of its faults has fired."""
        self.until(self.plan.fired, "a fault")

    def send(self, sent: signal.Signals) -> None:
        os.kill(self.pid, sent)

    def kill(self) -> None:
        """SIGKILL, and its end."""
        self.process.kill()
        self.process.join(30)

    def ends(self) -> int:
        """Its exit code."""
        self.process.join(SECONDS)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"did not end within {SECONDS:g} s\n{self.text}")
        return self.process.exitcode


def _main(
    words: list[str],
    faults: tuple[Fault, ...],
    log: Path,
    said: Path,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    from offbeat.cli import main

    out = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if faults:
        FaultPlan(faults, log).install()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(words))


def rows(run_dir: Path) -> list[Row]:
    """The ledger's; none while it is not there."""
    path = run_dir / "ledger.sqlite"
    try:
        return read_rows(path) if path.exists() else []
    except Exception:  # it is being made
        return []


def summary_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found
