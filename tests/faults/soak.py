"""A soak: for half an hour a random process of a run is killed every 20 seconds (or once it trains
again, if that takes longer); then it must hold.

    python -m tests.faults.soak --minutes 30 --every 20 --backend ray --seed 1

The driver, the trainer, the rollouter, an engine, a reward replica: whoever it is, the run heals or
ends, and is resumed. In the end every ordinal is trained or discarded, and the weights are those of
a replay of the run's own record from its beginning, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.promises import check_promises, equal_to_replay

from offbeat.store import read_counts, read_rows
from offbeat.testing import tiny

KINDS = ("RollouterActor", "TrainerActor", "EngineActor", "ScorerActor")
LAST_STEPS = 2  # trained in peace at the end
STOP_SECONDS = 300.0

CONFIG = """
run = "soak"
base_dir = "{folder}"
runs_dir = "{folder}/runs"
[model]
path = "{folder}/actor"
dtype = "float32"
[data]
train = "{folder}/train.jsonl"
epochs = 100000
[rollout]
replicas = 2
max_tokens = 8
max_context = 64
group_size = 4
seats = 16
[train]
groups_per_step = 4
max_staleness = 2
steps = 100000
learning_rate = 1e-3
checkpoint_every = 10
keep_batches = true
max_no_signal_steps = 100000
[cluster]
backend = "{backend}"
slots = 4
max_restarts = 10
heartbeat_seconds = 30
[weights]
folder = "{folder}/weights"
[reward.letters]
kind = "function"
function = "rewards.py:letters"
"""

REWARDS = """
def letters(prompts, completions, **columns):
    return [sum(ch.isalpha() for ch in c) / 8 for c in completions]
"""


@dataclass
class Soak:
    """One run under fire."""

    folder: Path
    rng: random.Random
    started: float = field(default_factory=time.monotonic)
    kills: Counter[str] = field(default_factory=Counter)
    ends: Counter[int] = field(default_factory=Counter)
    process: subprocess.Popen[bytes] | None = None

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "soak"

    def say(self, text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - self.started:6.0f} s] {text}\n")
        sys.stdout.flush()

    def start(self, *overrides: str) -> None:
        """Trains, or goes on if the run has a directory."""
        begun = (self.run_dir / "config.json").exists()
        what = ["resume", str(self.run_dir)] if begun else ["train", str(self.folder / "run.toml")]
        log = (self.folder / "output.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "offbeat", *what, *overrides],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip

    def keep_running(self) -> None:
        """Resumes a run that has ended; it must not have ended well."""
        assert self.process is not None
        code = self.process.poll()
        if code is None:
            return
        assert code != 0, "the run says that it has done all its steps"
        self.ends[code] += 1
        self.start()

    def kill_one(self) -> None:
        """SIGKILL to the driver or one of its roles."""
        assert self.process is not None
        victims = {"driver": [self.process.pid]}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    line = " ".join(child.cmdline())
                    for kind in KINDS:
                        if line.startswith(f"ray::{kind}"):
                            victims.setdefault(kind, []).append(child.pid)
        kind = self.rng.choice(sorted(victims))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.rng.choice(sorted(victims[kind])), signal.SIGKILL)
            self.kills[kind] += 1
            self.say(f"killed: {kind}; {self.progress()}")

    def progress(self) -> str:
        try:
            counts = read_counts(self.run_dir / "ledger.sqlite")
        except Exception as error:  # boundary: the file may not be there yet
            return f"no ledger yet ({type(error).__name__})"
        return (
            f"{counts['admitted']} admitted = {counts['trained']} trained + "
            f"{sum(counts['discarded'].values())} discarded + {counts['live']} live"
        )

    def under_fire(self, seconds: float, every: float) -> None:
        """A kill `every` seconds, or later: once a batch has come since the last one. (On Ray a
        start may take longer than that: killed in each of them, a run would never begin.)"""
        until, last, steps = time.monotonic() + seconds, time.monotonic(), 0
        self.start()
        while time.monotonic() < until:
            time.sleep(0.5)
            self.keep_running()
            waited = time.monotonic() - last
            if waited >= every and self.recorded_steps() > steps:
                self.kill_one()
                last, steps = time.monotonic(), self.recorded_steps()
            assert waited < STOP_SECONDS, f"no batch came for {waited:.0f} s: {self.progress()}"

    def finish(self) -> None:
        """Drains by SIGTERM, then trains a few steps more, to the end."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.ends[self.process.wait(STOP_SECONDS)] += 1
        steps = self.recorded_steps() + LAST_STEPS
        self.start("--train.steps", str(steps))
        code = self.process.wait(STOP_SECONDS)
        assert code == 0, f"the last resume ended with {code}: see {self.folder / 'output.log'}"
        self.say(f"finished at step {steps}")

    def recorded_steps(self) -> int:
        """Steps that have their batches."""
        try:
            steps = [row.step for row in read_rows(self.run_dir / "ledger.sqlite")]
        except Exception:  # boundary: the file may not be there yet
            return 0
        return max((step + 1 for step in steps if step is not None), default=0)

    def check(self) -> None:
        """What was promised."""
        summary = json.loads((self.run_dir / "summary.json").read_text())
        assert summary["status"] == "finished", summary["status"]
        counts = read_counts(self.run_dir / "ledger.sqlite")
        assert counts["live"] == 0, counts
        assert counts["admitted"] == counts["trained"] + sum(counts["discarded"].values()), counts
        check_promises(self.run_dir)
        equal_to_replay(self.run_dir)
        self.say(f"kept its promises: {self.progress()}; {dict(self.kills)} killed")
        self.say(f"ends of drivers by exit code: {dict(self.ends)}")


def prepare(folder: Path, backend: str) -> None:
    """The tiny model, its data and the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny.make_tiny_model(folder / "actor")
    tiny.write_reverse_data(folder / "train.jsonl", 64, 1, longest=3)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "run.toml").write_text(CONFIG.format(folder=folder, backend=backend))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=30)
    options.add_argument("--every", type=float, default=20, help="seconds between two kills")
    options.add_argument("--backend", choices=("ray", "local"), default="ray")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--folder", type=Path)
    chosen = options.parse_args()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    prepare(folder.resolve(), chosen.backend)
    soak = Soak(folder.resolve(), random.Random(chosen.seed))
    soak.say(f"everything is in {folder}")
    try:
        soak.under_fire(chosen.minutes * 60, chosen.every)
        soak.finish()
    finally:
        if soak.process is not None and soak.process.poll() is None:
            os.killpg(soak.process.pid, signal.SIGKILL)
    soak.check()


if __name__ == "__main__":
    main()
