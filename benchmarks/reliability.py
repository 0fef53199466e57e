"""What durability costs, and how fast the rollouter turns groups over.

    python benchmarks/reliability.py [--figures turnover commits pace] [--seconds 10] [--json]

turnover: the rollouter, the reward loop, the buffer and the durable store, all on one core, with
    an engine and a reward source that answer at once and a trainer that takes what it is given. At
    least 2,000 groups for each second of CPU time (of all threads), in the best of five stretches:
    other work on the machine only takes time. No stall of the event loop of 50 ms or more, and
    under 2 KB a group in the file besides its payload.
commits: half of all puts are durable within 5 ms plus what the disk takes for such a commit.
pace: at the pace of a small run (twenty groups a second, none of which shares its commit) the
    store's thread takes under 2 % of the time.

All is on disk, in the folder for temporary files. Other work on the machine shows as stalls and as
slow commits: a process that only sleeps measures its own beside the run. Prints a table, or JSON;
exit code 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

from reliability_parts import GROUPS_PER_STEP, TOKENS, commits, overhead_of, turn_over
from reward_parts import SleepingEngine, sleeper
from rewards import Figure, at_least, below, table

from offbeat.rollout.parts import shorten_collections

try:
    import uvloop
except ImportError:  # it comes with Ray's default extra, and with vLLM
    uvloop = None

T = TypeVar("T")
GROUP_SIZE = 4
WARM_SECONDS = 2.0
KEPT_SECONDS = 3.0
PACE_SECONDS = 8.0
GENERATION_SECONDS = 0.4
AT_ONCE = 8
"""Groups that are generated at the same time at that pace."""
STRETCHES = 5
GROUP_COMMIT_SECONDS = 0.005


def run(work: Coroutine[Any, Any, T]) -> T:
    """On the event loop that the rollouter's process has under Ray."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        return runner.run(work)


def turnover(seconds: float) -> list[Figure]:
    """As fast as it goes; then once more with every payload kept, for the file's size."""
    shorten_collections()  # as the rollouter's process does
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        with tempfile.TemporaryDirectory() as name, sleeper() as stall_of_sleeper:
            lengths = [WARM_SECONDS, *([seconds / STRETCHES] * STRETCHES)]
            _, *ran = run(turn_over(Path(name), GROUP_SIZE, lengths))
            idle = stall_of_sleeper()
    finally:
        os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory() as name:
        run(turn_over(Path(name), GROUP_SIZE, [KEPT_SECONDS], keep_batches=True))
        kept, overhead = overhead_of(Path(name) / "ledger.sqlite")
    best = max(ran, key=lambda one: one.groups / one.cpu)
    return [
        at_least("groups for a second of one core", best.groups / best.cpu, 2000),
        below("longest stall of the event loop, ms", 1000 * max(one.stall for one in ran), 50),
        below("bytes a group in the file, besides its payload", overhead, 2048),
        Figure("groups in that file", kept),
        Figure("longest stall of a process that only sleeps, ms", 1000 * idle),
        Figure("the same, median stretch", median(one.groups / one.cpu for one in ran)),
        Figure("groups a second", best.groups / best.seconds),
        Figure("CPU of the process, cores", best.cpu / best.seconds),
        Figure("CPU time of a group, ms", 1000 * best.cpu / best.groups),
        Figure("of it the store's thread, ms", 1000 * best.store / best.groups),
        Figure("groups a step", GROUPS_PER_STEP),
        Figure("samples a group", GROUP_SIZE),
        Figure("tokens a sample", TOKENS),
    ]


def durable() -> list[Figure]:
    """How long a put waits."""
    with tempfile.TemporaryDirectory() as folder:
        waits = commits(Path(folder))
    store, disk = ([1000 * wait for wait in waits] for waits in (waits.store, waits.disk))
    most = 1000 * GROUP_COMMIT_SECONDS
    late, slow = (quantiles(of, n=100)[-1] for of in (store, disk))
    return [
        below("until a put is durable, median, ms", median(store), most + median(disk)),
        Figure("until a put is durable, 99 of 100, ms", late),
        Figure("the disk's own commit, median, ms", median(disk)),
        Figure("the disk's own commit, 99 of 100, ms", slow),
    ]


def share() -> list[Figure]:
    """The store beside a run that has something else to do."""
    engine = SleepingEngine(GENERATION_SECONDS, AT_ONCE)
    with tempfile.TemporaryDirectory() as name:
        _, paced = run(turn_over(Path(name), GROUP_SIZE, [1.0, PACE_SECONDS], engine=engine))
    return [
        below("the store's share of the time", paced.store / paced.seconds, 0.02),
        Figure("groups a second", paced.groups / paced.seconds),
        Figure("CPU time of a group's commits, ms", 1000 * paced.store / paced.groups),
    ]


def main() -> int:
    """Prints what was measured; 0 if every bound is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = ("turnover", "commits", "pace")
    parser.add_argument("--figures", nargs="+", choices=every, default=list(every))
    parser.add_argument("--seconds", type=float, default=10, help="of the turnover")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    told = parser.parse_args()
    every_one = {"turnover": lambda: turnover(told.seconds), "commits": durable, "pace": share}
    found: dict[str, list[Figure]] = {}
    for name in told.figures:
        begun = time.monotonic()
        found[name] = every_one[name]()
        if not told.json:
            sys.stdout.write(table(f"{name} ({time.monotonic() - begun:.0f} s)", found[name]))
            sys.stdout.flush()
    if told.json:
        figures = {name: [asdict(one) for one in of] for name, of in found.items()}
        sys.stdout.write(json.dumps({"benchmark": "reliability", "figures": figures}) + "\n")
    return 0 if all(one.met for of in found.values() for one in of) else 1


if __name__ == "__main__":
    sys.exit(main())
