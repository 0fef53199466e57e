"""Runs that are broken on purpose: started with a plan of faults, resumed until they are done."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.promises import Kept, check_nothing_again, check_promises, config_of, kept_by

from offbeat.testing.faults import FaultPlan

SECONDS = 560.0  # for one start; two cores may be shared with others
MOST_STARTS = 5
REPORT = "OFFBEAT_FAULTS_REPORT"
"""Environment variable: a file to which every case appends what was seen, as a line of JSON."""

Start = Callable[[Sequence[str], FaultPlan, Path], int]
"""Runs `offbeat WORDS` with a plan, writes what it says to a file, returns its exit code."""


@dataclass(slots=True)
class Seen:
    """What became of a run: the exit code of every start."""

    codes: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def told(self) -> str:
        """Everything that was said, for a failing test."""
        return "\n".join(self.said)


def run_to_the_end(toml: Path, plan: FaultPlan, start: Start) -> Seen:
    """Trains and resumes until a start ends with 0; checks after each that nothing that was made
    durable is made again."""
    run_dir = toml.parent / "runs" / toml.stem
    seen = Seen()
    before: dict[int, Kept] = {}
    for number in range(MOST_STARTS):
        begun = (run_dir / "config.json").exists()
        words = ["resume", str(run_dir)] if begun else ["train", str(toml)]
        said = toml.parent / f"{toml.stem}-{number}.log"
        seen.codes.append(start(words, plan, said))
        seen.said.append(f"--- {' '.join(words)}: {seen.codes[-1]}\n{said.read_text()}")
        if (run_dir / "config.json").exists():
            config = config_of(run_dir)
            check_nothing_again(before, config)
            before = kept_by(config)
            if seen.codes[-1] != 0 and before:
                check_promises(run_dir, finished=False)
        if seen.codes[-1] == 0:
            return seen
        assert seen.codes[-1] != 2, f"a fault is no mistake of the user\n{seen.told}"
    raise AssertionError(f"not done after {MOST_STARTS} starts\n{seen.told}")


def report(backend: str, point: str, kind: str, seen: Seen, compared: int) -> None:
    """Appends a line for the table of the documentation."""
    if REPORT in os.environ:
        line = {
            "backend": backend,
            "point": point,
            "kind": kind,
            "codes": seen.codes,
            "compared": compared,
        }
        with open(os.environ[REPORT], "a") as file:
            file.write(json.dumps(line) + "\n")


def start_on_cluster(address: str, words: Sequence[str], plan: FaultPlan, said: Path) -> int:
    """A driver of its own on a Ray cluster, as a user starts it; its actors end with it."""
    env = os.environ | plan.environment()
    env |= {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": address}
    with said.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "offbeat", *words],
            stdout=out,
            stderr=out,
            env=env,
            start_new_session=True,
        )
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{words} took more than {SECONDS:g} s\n{said.read_text()}"
            ) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


def start_fork(words: Sequence[str], plan: FaultPlan, said: Path) -> int:
    """The same with a fork of a process that has imported all, which saves most of a short run's
    time. For runs of one process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.preload"])
    process = context.Process(target=_main, args=(list(words), plan.environment(), said))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join(30)
        raise AssertionError(f"{words} took more than {SECONDS:g} s\n{said.read_text()}")
    return process.exitcode


def _main(words: list[str], env: dict[str, str], said: Path) -> None:
    from offbeat.cli import main

    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(env)
    FaultPlan.from_environment().install()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(words))
