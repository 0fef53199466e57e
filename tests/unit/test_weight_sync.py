"""Rolling updates on a clock of their own: who loads when, who generates meanwhile."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import virtual

from offbeat.records import EngineHealth, Manifest, PolicyVersion
from offbeat.weights.sync import Replica, WeightSync, at_once, waves

DEADLINE = 10.0
NEVER = 1e6


def manifest(step: int) -> Manifest:
    return Manifest(PolicyVersion(0, step), "full", "", {})


@dataclass
class Board:
    """What a test sees of all engines: who loads, and every change of it with its time."""

    replicas: list[Replica[Any]] = field(default_factory=list)
    loading: set[int] = field(default_factory=set)
    started: list[tuple[float, int]] = field(default_factory=list)
    crowd: list[int] = field(default_factory=list)  # routable engines that load, at each change
    quiet: list[int] = field(default_factory=list)  # routable engines that do not

    def changed(self) -> None:
        routable = {r.index for r in self.replicas if r.routable}
        self.crowd.append(len(routable & self.loading))
        self.quiet.append(len(routable - self.loading))


class FakeEngine:
    """Loads in `seconds`; `fails` raises at the end of it."""

    def __init__(self, index: int, board: Board, seconds: float, *, fails: bool = False) -> None:
        self.index = index
        self.board = board
        self.seconds = seconds
        self.fails = fails

    async def load(self, manifest: Manifest) -> PolicyVersion:
        board = self.board
        board.loading.add(self.index)
        board.started.append((asyncio.get_running_loop().time(), self.index))
        board.changed()
        try:
            await asyncio.sleep(self.seconds)
            if self.fails:
                raise ConnectionError("the actor died")
            return manifest.version
        finally:
            board.loading.discard(self.index)

    async def health(self) -> EngineHealth:
        return EngineHealth(PolicyVersion(0, 0), 0, 0, 8)


@dataclass(frozen=True)
class Case:
    """Replica i loads in `seconds[i]`; `out` ones are out of routing from the start."""

    seconds: list[float]
    busy: list[int]
    out: set[int]
    loads_at_once: int | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 7))
    seconds = st.one_of(st.floats(0, DEADLINE - 0.1), st.sampled_from([0.0, 1.0, NEVER]))
    return Case(
        seconds=draw(st.lists(seconds, min_size=size, max_size=size)),
        busy=draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)),
        out=draw(st.sets(st.integers(0, size - 1), max_size=size - 1)),
        loads_at_once=draw(st.none() | st.integers(1, 8)),
    )


@dataclass
class Found:
    board: Board
    sync: WeightSync[Any]
    floor: int
    floor_before_end: list[int]
    took: float
    behind: list[int]


async def publish(case: Case) -> Found:
    """One publication, and then until all that was taken out has joined."""
    board = Board()
    board.replicas = [
        Replica(i, FakeEngine(i, board, s), PolicyVersion(0, 0), i not in case.out, case.busy[i])
        for i, s in enumerate(case.seconds)
    ]

    async def replace(index: int) -> Any:
        await asyncio.sleep(3.0)
        return FakeEngine(index, board, 1.0)

    async def nothing() -> None:
        board.changed()

    floors: list[int] = []
    async with asyncio.TaskGroup() as tasks:
        sync = WeightSync(
            board.replicas, deadline_seconds=DEADLINE, start_deadline_seconds=60,
            replace=replace, on_change=nothing, tasks=tasks, loads_at_once=case.loads_at_once,
        )  # fmt: skip
        behind = [r.index for r in board.replicas if r.routable]
        task = tasks.create_task(sync.publish(manifest(1)))
        clock = asyncio.get_running_loop().time
        while not task.done():
            await asyncio.wait([task], timeout=0.25)
            board.changed()
            old = any(r.routable and r.version.step == 0 for r in board.replicas)
            if not task.done() and old:
                floors.append(sync.floor)
        took = clock()
        floor = task.result()
    return Found(board, sync, floor, floors, took, behind)


@given(cases())
def test_a_publication_rolls_over_the_engines(case: Case) -> None:
    found = virtual.run(publish(case))
    board, replicas = found.board, len(case.seconds)
    limit = at_once(replicas, case.loads_at_once)
    slow = {i for i in found.behind if case.seconds[i] == NEVER}
    assert max(board.crowd) <= limit
    if limit < replicas and len(found.behind) > 1 and not slow:
        assert min(board.quiet) >= 1, "one generates at every moment"
    assert found.took <= waves(replicas, case.loads_at_once) * DEADLINE + 0.26
    assert set(found.floor_before_end) <= {0}, "the floor waits for the last routable engine"
    reports = found.sync.drain_reports()
    assert sorted(r.replica for r in reports) == found.behind
    assert {r.replica for r in reports if r.acknowledged} == set(found.behind) - slow
    if set(found.behind) - slow:
        assert found.floor == 1
    back = set(found.behind)
    assert all(r.routable and r.version.step == 1 for r in board.replicas if r.index in back)
    assert found.sync.floor == 1
    assert {r.index for r in board.replicas if r.restarts} == slow


def starts(case: Case) -> list[tuple[float, int]]:
    return virtual.run(publish(case)).board.started


def test_half_of_them_load_first_the_least_loaded() -> None:
    assert starts(Case([4.0] * 4, [3, 9, 1, 5], set(), None)) == [
        (0.0, 2), (0.0, 0), (4.0, 3), (4.0, 1),
    ]  # fmt: skip


def test_one_that_misses_its_deadline_holds_nobody_up() -> None:
    """Its lane goes on at its deadline, which counts from its own start; others do not wait."""
    case = Case([2.0, NEVER, 2.0, 2.0, 2.0], [0, 1, 2, 3, 4], set(), 2)
    assert starts(case) == [(0.0, 0), (0.0, 1), (2.0, 2), (4.0, 3), (6.0, 4), (13.0, 1)]
    late = Case([9.0, 9.0, 9.0], [0, 1, 2], set(), 1)
    found = virtual.run(publish(late))
    assert found.took == pytest.approx(27.0)
    assert all(report.acknowledged for report in found.sync.drain_reports())


@pytest.mark.parametrize(
    ("replicas", "setting", "loads", "turns"),
    [(1, None, 1, 1), (2, None, 1, 2), (3, None, 1, 3), (4, None, 2, 2), (5, None, 2, 3),
     (8, None, 4, 2), (4, 1, 1, 4), (4, 3, 3, 2), (4, 4, 4, 1), (4, 99, 4, 1)],
)  # fmt: skip
def test_how_many_load_at_once(replicas: int, setting: int | None, loads: int, turns: int) -> None:
    assert (at_once(replicas, setting), waves(replicas, setting)) == (loads, turns)


def test_who_is_taken_out_before_its_turn_joins_with_the_version_and_is_not_loaded_twice() -> None:
    async def main() -> Any:
        board = Board()
        board.replicas = [
            Replica(i, FakeEngine(i, board, 6.0), PolicyVersion(0, 0), True, i) for i in range(2)
        ]

        async def replace(index: int) -> Any:
            await asyncio.sleep(1.0)
            return FakeEngine(index, board, 1.0)

        async def nothing() -> None: ...

        async with asyncio.TaskGroup() as tasks:
            sync = WeightSync(
                board.replicas, deadline_seconds=DEADLINE, start_deadline_seconds=60,
                replace=replace, on_change=nothing, tasks=tasks, loads_at_once=1,
            )  # fmt: skip
            task = tasks.create_task(sync.publish(manifest(1)))
            await asyncio.sleep(0.5)
            woken: list[float] = []
            clock = asyncio.get_running_loop().time
            with board.replicas[1].watched(lambda: woken.append(clock())):
                sync.take_out(board.replicas[1], board.replicas[1].engine, "it died")
                sync.take_out(board.replicas[1], board.replicas[1].engine, "once more")
            await task
            return board.started, woken, sync.floor, board.replicas[1].version.step

    assert virtual.run(main()) == ([(0.0, 0), (1.5, 1)], [0.5], 1, 1)


def test_an_engine_that_joins_amid_a_publication_has_its_version() -> None:
    """Replica 1 is replaced while replica 0 loads: it comes with the version under way."""

    async def main() -> Any:
        board = Board()
        board.replicas = [
            Replica(i, FakeEngine(i, board, 6.0, fails=i == 1), PolicyVersion(0, 0), True, -i)
            for i in range(3)
        ]

        async def replace(index: int) -> Any:
            return FakeEngine(index, board, 1.0)

        async def nothing() -> None: ...

        async with asyncio.TaskGroup() as tasks:
            sync = WeightSync(
                board.replicas, deadline_seconds=DEADLINE, start_deadline_seconds=60,
                replace=replace, on_change=nothing, tasks=tasks,
            )  # fmt: skip
            task = tasks.create_task(sync.publish(manifest(1)))
            await asyncio.sleep(13.5)  # 2 has loaded, 1 has failed and is back, 0 loads
            seen = [(r.routable, r.version.step) for r in board.replicas], sync.floor
            return seen, await task, [r.version.step for r in board.replicas]

    seen, floor, versions = virtual.run(main())
    assert seen == ([(True, 0), (True, 1), (True, 1)], 0)
    assert (floor, versions) == (1, [1, 1, 1])
