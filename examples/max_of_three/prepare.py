"""Make everything the example needs, once: actor, judge, scorer, data and a report.

    python examples/max_of_three/prepare.py [--out DIR]

The first time takes under three minutes on two free cores; a second run finds the cache
and takes a second. Two lanes run side by side, one thread each: judge, and actor then
scorer. Each artefact is made in a folder of its own and renamed into place when it is
whole, so an interrupted run loses only what was in the making. A changed recipe makes anew.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import task
from filelock import FileLock, Timeout

HERE = Path(__file__).resolve().parent
LOCK_PATIENCE = 900.0


@dataclass
class Part:
    """One artefact: its maker, the files that define it, and about how long it takes."""

    name: str
    script: str
    recipe: tuple[str, ...]
    seconds: float
    made: tuple[str, ...] = ()
    share: float = 0.0
    message: str = "waiting"
    began: float | None = None

    def digest(self) -> str:
        """What the artefact was made from; another digest means another artefact."""
        files = b"\0".join((HERE / name).read_bytes() for name in (self.script, *self.recipe))
        return hashlib.sha256(files).hexdigest()

    def left(self) -> float:
        """About how many seconds are still needed."""
        if self.began is None or self.share < 0.1:
            return self.seconds * (1 - self.share)
        return (time.monotonic() - self.began) * (1 - self.share) / self.share


PARTS = {
    "actor": Part("actor", "make_actor.py", (), 25),
    "judge": Part("judge", "make_judge.py", ("task.py", "texts.py", "judge.jinja"), 100),
    "scorer": Part("scorer", "make_scorer.py", ("task.py", "texts.py", "scorer.jinja"), 70),
}
LANES = (("judge",), ("actor", "scorer"))
REPORT = Part(
    "report",
    "validate.py",
    (
        "evaluate.py", "task.py", "texts.py", "judge.jinja", "scorer.jinja", "make_actor.py",
        "make_judge.py", "make_scorer.py",
    ),
    40,
    ("report.json",),
)  # fmt: skip
DATA = Part("data", "task.py", (), 1, ("train.jsonl", "validation.jsonl"))


@dataclass
class Preparation:
    """One run of this script over one cache folder."""

    out: Path
    began: float = field(default_factory=time.monotonic)
    failed: list[str] = field(default_factory=list)

    def stamp(self, part: Part) -> Path:
        """The file that says what a finished artefact was made from."""
        return self.out / f"{part.name}.recipe"

    def ready(self, part: Part) -> bool:
        """Whether the artefact is there and made by today's recipe."""
        stamp = self.stamp(part)
        if not stamp.exists() or stamp.read_text() != part.digest():
            return False
        return all((self.out / name).exists() for name in part.made or (part.name,))

    def make(self, part: Part, target: Path) -> bool:
        """Run a maker in a process of its own, one thread, and follow its progress."""
        part.began, part.message = time.monotonic(), "starting"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        env |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        env |= {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-u", str(HERE / part.script), str(target)]
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        tail: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@"):
                share, _, part.message = line[1:].strip().partition(" ")
                part.share = float(share)
            else:
                tail = [*tail[-20:], line]
        if process.wait() != 0:
            self.failed.append(f"{part.script} ended with {process.returncode}:\n{''.join(tail)}")
            return False
        return True

    def place(self, part: Part) -> bool:
        """Make a model directory beside its place, then rename it into place."""
        target = self.out / f".{part.name}.making"
        shutil.rmtree(target, ignore_errors=True)
        if not self.make(part, target):
            return False
        self.stamp(part).unlink(missing_ok=True)
        shutil.rmtree(self.out / part.name, ignore_errors=True)
        target.rename(self.out / part.name)
        self.stamp(part).write_text(part.digest())
        return True

    def lane(self, parts: list[Part]) -> None:
        """Make some parts one after the other; stop at the first that fails."""
        for part in parts:
            if not self.place(part):
                return

    def show(self, lanes: list[list[Part]]) -> None:
        """Print where every part stands and about how long it all will take."""
        parts = [part for lane in lanes for part in lane]
        left = max(sum(part.left() for part in lane) for lane in lanes)
        left += 0.0 if REPORT in parts else REPORT.seconds
        states = " · ".join(f"{part.name} {part.share:.0%} {part.message}" for part in parts)
        seconds = time.monotonic() - self.began
        print(f"[{seconds:.0f} s, about {left:.0f} s left] {states}", flush=True)

    def watch(self, threads: list[threading.Thread], lanes: list[list[Part]]) -> None:
        """Start some threads and print the progress every few seconds until all end."""
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(3.0)
                self.show(lanes)
        if self.failed:
            raise SystemExit("\n".join(self.failed))

    def write_data(self) -> None:
        """Write the training and the held-out problems."""
        for name, problems in (("train", task.training()), ("validation", task.held_out())):
            making = self.out / f".{name}.making"
            task.write_jsonl(making, problems)
            making.rename(self.out / f"{name}.jsonl")
        self.stamp(DATA).write_text(DATA.digest())

    def run(self) -> None:
        """Make what is missing, then measure it."""
        if not self.ready(DATA):
            self.write_data()
        lanes = [[p for n in lane if not self.ready(p := PARTS[n])] for lane in LANES]
        lanes = [lane for lane in lanes if lane]
        if lanes:
            self.watch([threading.Thread(target=self.lane, args=(x,)) for x in lanes], lanes)
        if lanes or not self.ready(REPORT):
            self.measure()
        seconds = time.monotonic() - self.began
        print((self.out / "report.json").read_text(), end="")
        print(f"ready after {seconds:.1f} s: {self.out}")

    def measure(self) -> None:
        """Write the report of how good judge and scorer are."""
        self.watch([threading.Thread(target=self.make, args=(REPORT, self.out))], [[REPORT]])
        self.stamp(REPORT).write_text(REPORT.digest())


def main() -> None:
    """Read the command line, take the cache's lock, make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / ".cache", help="the cache folder")
    out: Path = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"another process prepares {out}; waiting up to {LOCK_PATIENCE:.0f} s", flush=True)
        lock.acquire(timeout=LOCK_PATIENCE)
    with lock:
        Preparation(out).run()


if __name__ == "__main__":
    main()
