"""Whole runs under a virtual clock, hundreds of seeds; `make sim` has the long ones.

A seed that fails is told with the command that shows the same run again, event by event.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter

import pytest

from offbeat.testing import clock
from offbeat.testing.sim_world import Shape
from offbeat.testing.simulation import Report, simulate

GROUPS = 40
SEEDS = 240
SHARE = 60


@pytest.mark.parametrize("first", range(0, SEEDS, SHARE))
def test_every_promise_holds_in_every_run(first: int) -> None:
    reports = [simulate(seed, Shape.drawn(seed, GROUPS)) for seed in range(first, first + SHARE)]
    seen: Counter[str] = sum((report.seen for report in reports), Counter())
    ends = Counter(end.partition(":")[0] for report in reports for end in report.ends)
    assert ends["done"] == len(reports), "every run is done in the end"
    assert sum(ends.values()) > ends["done"], "some of them only after they were resumed"
    for event in ("at the bound", "retried", "trouble: rollouter", "trouble: trainer"):
        assert seen[event] > 0, (event, seen)


def test_a_run_without_trouble_loses_nothing() -> None:
    shape = Shape(trouble=0.0, steps=20, tail=3.0)
    report = simulate(3, shape)
    assert report.ends == ("done",)
    assert report.groups == 160
    assert report.seen["retried"] == 0


def test_a_seed_is_the_same_run_every_time_and_in_every_process() -> None:
    shape = Shape.drawn(5, GROUPS)
    first, again = simulate(5, shape), simulate(5, shape)
    assert first == again
    assert first.trace != simulate(6, shape).trace
    command = [sys.executable, "-m", "offbeat.testing.simulation", "--seed", "5"]
    for hashes in ("1", "2"):
        said = subprocess.run(
            [*command, "--groups", str(GROUPS)],
            env=os.environ | {"PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        )
        assert f"trace {first.trace:08x}" in said.stdout


def test_a_report_says_what_happened() -> None:
    report = simulate(8, Shape.drawn(8, GROUPS))
    assert isinstance(report, Report)
    assert report.ends[-1] == "done"
    assert report.seconds > 0


def test_the_clock_runs_what_is_ready_in_an_order_of_its_seed() -> None:
    async def order() -> list[int]:
        found: list[int] = []

        async def one(number: int) -> None:
            await asyncio.sleep(0)
            found.append(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(20):
                tasks.create_task(one(number))
        await asyncio.sleep(3600)
        assert asyncio.get_running_loop().time() == 3600
        return found

    assert clock.run(order()) == list(range(20))
    assert clock.run(order(), 1) == clock.run(order(), 1)
    assert clock.run(order(), 1) != list(range(20))
    assert clock.run(order(), 1) != clock.run(order(), 2)


def test_the_clock_names_a_deadlock_and_refuses_threads() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    with pytest.raises(clock.Deadlock):
        clock.run(waits(), 1)

    async def threads() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(RuntimeError, match="virtual clock"):
        clock.run(threads(), 1)
