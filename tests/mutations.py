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
    """`old` stands in `file` (under src/offbeat) exactly once; so does each of `also`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = ()


MUTATIONS = (
    Mutation(
        "fencing of late attempts",
        "ledger.py",
        "        return attempt < row.attempt\n",
        "        return False\n",
        ("tests/unit/test_books.py", "tests/property/test_ledger.py"),
    ),
    Mutation(
        "deadline check of a batch",
        "buffer.py",
        "        if not feasible(left, step + 1, self.groups_per_step):\n            return None\n",
        "",
        ("tests/property/test_buffer.py",),
    ),
    Mutation(
        "deadline check of an admission",
        "buffer.py",
        "        return self._fits(floor + self.max_staleness, next_step)\n",
        "        return True\n",
        ("tests/property/test_buffer.py",),
    ),
    Mutation(
        "staleness check of the trainer",
        "train/trainer.py",
        "        samples.check_staleness(self.config.train.max_staleness)\n",
        "",
        ("tests/unit/test_trainer.py",),
    ),
    Mutation(
        "deduplication of samples",
        "rollout/generation.py",
        "item.request_id != self.request.request_id or item.index in self.done",
        "item.request_id != self.request.request_id",
        ("tests/unit/test_generation.py",),
    ),
    Mutation(
        "deduplication of a step's booking",
        "rollout/books.py",
        "        if not final and not all(row is not None and row.state == "
        '"trained" for row in rows):',
        "        if True:",
        ("tests/unit/test_books.py", "tests/sim"),
    ),
    Mutation(
        "consumption check of the trainer",
        "train/trainer.py",
        "        if batch.step != self._step:\n",
        "        if False:\n",
        ("tests/unit/test_trainer.py",),
    ),
    Mutation(
        "consumption check of the ledger",
        "ledger.py",
        "        if batch is None or set(batch) != set(flags):\n",
        "        if batch is None:\n",
        ("tests/property/test_ledger.py",),
    ),
    Mutation(
        "wait for the commit of a batch",
        "rollout/books.py",
        "            await asyncio.wrap_future(self.store.put(self.ledger.drain()))\n"
        '            await apoint("ledger.batch_committed")\n',
        "            self.store.put(self.ledger.drain())\n"
        '            await apoint("ledger.batch_committed")\n',
        ("tests/unit/test_books.py",),
    ),
    Mutation(
        "atomic rename of a checkpoint",
        "train/checkpoint.py",
        '    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}{_PARTIAL}", dir=path.parent))\n',
        "    folder = path\n    folder.mkdir(exist_ok=True)\n",
        ("tests/unit/test_checkpoints.py",),
        also=(
            (
                "        (folder / STATE).parent.mkdir()\n",
                "        (folder / STATE).parent.mkdir(exist_ok=True)\n",
            ),
            ("        _put_in_place(folder, path)\n", ""),
        ),
    ),
)


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
            for old, new in ((mutation.old, mutation.new), *mutation.also):
                if text.count(old) != 1:
                    raise SystemExit(f"{mutation.name}: not once in {mutation.file}: {old}")
                text = text.replace(old, new)
            path.write_text(text)
        environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}:{copy}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *mutation.tests], cwd=copy, env=environment, timeout=SECONDS,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
