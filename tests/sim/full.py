"""The long figures of the simulation: `make sim`. Exits 1 if a promise is broken.

500 seeds of about 1,000 groups each on two processes, a simulated hour of 64 engines, and 10,000
groups in flight with flat memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path

from offbeat.testing.sim_trainer import SimTrainer
from offbeat.testing.sim_world import Shape
from offbeat.testing.simulation import Report, SimulationFailed, simulate

HOUR = Shape(
    engines=64,
    groups_per_step=64,
    max_staleness=2,
    steps=200,
    seconds=4.0,
    step_seconds=20.0,
    tail=1.3,
    trouble=0.5,
    fault_seconds=300.0,
    scale=20.0,
)
CROWD = Shape(
    engines=64,
    groups_per_step=2000,
    max_staleness=4,
    steps=12,
    checkpoint_every=1,
    seconds=4.0,
    step_seconds=20.0,
    trouble=0.05,
    fault_seconds=300.0,
    scale=40.0,
)
FLAT = 1.25  # memory of the later half of steps, by that of the earlier half


def one(task: tuple[int, int]) -> Report | str:
    """A seed's report, or what failed."""
    seed, groups = task
    try:
        return simulate(seed, Shape.drawn(seed, groups))
    except SimulationFailed as failed:
        return str(failed)


def seeds(first: int, count: int, groups: int, processes: int) -> int:
    """Simulates seeds; returns how many failed."""
    began = time.monotonic()
    tasks = [(seed, groups) for seed in range(first, first + count)]
    with multiprocessing.Pool(processes) as pool:
        found = pool.map(one, tasks, chunksize=5)
    reports = [report for report in found if isinstance(report, Report)]
    failed = [report for report in found if isinstance(report, str)]
    for text in failed:
        print(text, file=sys.stderr)
    seen: Counter[str] = sum((report.seen for report in reports), Counter())
    ends = Counter(end.partition(":")[0] for report in reports for end in report.ends)
    trained = sum(report.groups for report in reports)
    print(f"{len(reports)} of {count} seeds hold: {trained} groups", end=" ")
    print(f"in {time.monotonic() - began:.0f} s, {sum(r.seconds for r in reports):.0f} s simulated")
    print(f"  ends {dict(ends)}; seen {dict(seen.most_common(24))}")
    return len(failed)


def hour() -> None:
    """A simulated hour of 64 engines."""
    began, used = time.monotonic(), time.process_time()
    report = simulate(1, HOUR)
    print(f"{report.seconds:.0f} s of 64 engines: {report.groups} groups", end=" ")
    print(f"in {time.monotonic() - began:.0f} s, {time.process_time() - used:.0f} s of CPU")
    print(f"  ends {report.ends}; seen {dict(report.seen.most_common(16))}")
    assert report.seconds >= 3600, report


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def crowd() -> None:
    """10,000 groups in flight; resident memory after each step."""
    sizes: list[int] = []
    train = SimTrainer._train

    async def measured(self: SimTrainer, batch):  # type: ignore[no-untyped-def]
        result = await train(self, batch)
        sizes.append(resident_bytes())
        return result

    SimTrainer._train = measured  # type: ignore[method-assign]
    try:
        report = simulate(2, CROWD)
    finally:
        SimTrainer._train = train  # type: ignore[method-assign]
    half = len(sizes) // 2
    early, late = max(sizes[2:half]), max(sizes[half:])
    print(f"10,000 groups in flight: {report.groups} groups, {report.seconds:.0f} s simulated")
    print(f"  {early / 1e6:.0f} MB at most in the first half, {late / 1e6:.0f} MB in the second")
    assert late <= FLAT * early, sizes


def main() -> int:
    """All of it, or what is named."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.full")
    parser.add_argument("what", nargs="*", help="seeds, hour, crowd; default: all")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    what = given.what or ["seeds", "hour", "crowd"]
    failed = 0
    if "seeds" in what:
        failed = seeds(given.first, given.count, given.groups, given.processes)
    if "hour" in what:
        hour()
    if "crowd" in what:
        crowd()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
