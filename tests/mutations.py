"""Takes safeguards out of the code, one by one, and expects a test to notice each.

    python -m tests.mutations [NAME ...]

A mutation is a piece of source, what it becomes, and the tests that must turn red by it (and are
green without). They run on a copy of the sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600


@dataclass(frozen=True, slots=True)
class Mutation:
    """`old` stands in `file` (under src/offbeat) exactly once."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS: tuple[Mutation, ...] = ()


def main() -> int:
    """Runs the mutations named, or all; 1 if a test did not notice one."""
    chosen = [m for m in MUTATIONS if not sys.argv[1:] or m.name in sys.argv[1:]]
    survived = []
    for mutation in chosen:
        before, after = run(mutation, mutate=False), run(mutation, mutate=True)
        noticed = before == 0 and after == 1
        sys.stdout.write(f"{mutation.name:32} {'noticed' if noticed else 'NOT NOTICED'}")
        sys.stdout.write(f"  (pytest ended with {before}, mutated with {after})\n")
        sys.stdout.flush()
        if not noticed:
            survived.append(mutation.name)
    return 1 if survived else 0


def run(mutation: Mutation, *, mutate: bool) -> int:
    """The exit code of the mutation's tests on a copy of the sources."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder)
        skip = shutil.ignore_patterns("__pycache__", ".*", "runs")
        for part in ("src", "tests", "examples", "docs"):
            shutil.copytree(ROOT / part, copy / part, ignore=skip)
        shutil.copy(ROOT / "pyproject.toml", copy)
        if mutate:
            path = copy / "src" / "offbeat" / mutation.file
            text = path.read_text()
            if text.count(mutation.old) != 1:
                raise SystemExit(f"{mutation.name}: {mutation.file} has its text not exactly once")
            path.write_text(text.replace(mutation.old, mutation.new))
        environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}:{copy}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *mutation.tests], cwd=copy, env=environment, timeout=SECONDS,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
