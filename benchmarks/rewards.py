"""Rewards beside generation: three figures, with a fake judge on loopback in a process of its own.

    python benchmarks/rewards.py [--figures flight slow overlap] [--seconds 300] [--json]

flight: 1,000 judge calls in flight, latency log-normal with median 1 s. The reward loop keeps at
    least 95 % of that concurrency (calls under way, averaged over time, counted by the server),
    its memory grows by less than 200 MB, and the event loop's longest stall, from the first call
    on, is under 50 ms.
slow: a judge 10 times slower than generation, for `--seconds`. Never more calls at the server than
    the source's limit, never more live groups than the buffer allows, memory flat after the first
    minute (under 30 MB), nothing discarded, staleness within its bound.
overlap: a judge whose latency equals a group's generation time. Groups a second are within 10 % of
    those of the same run without it.

All is real (reward loop, judge source, pool, verdict cache, transcripts, rollouter, ledger on
disk) but the engines, which sleep, and the trainer, which takes what it is given. Two cores are
enough. Other work on the machine shows as stalls: a process that only sleeps measures its own
beside the flight, and both are told. Prints a table, or JSON; exit code 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from reward_parts import (
    GROUP_SIZE,
    Length,
    Machine,
    SleepingEngine,
    Trained,
    config_of,
    item_of,
    rollouter,
    sleeper,
    train_for,
)

from offbeat.config import RewardSourceSection
from offbeat.reward.cache import VerdictCache
from offbeat.reward.genrm import GenRM
from offbeat.reward.judge_http import HttpBackend
from offbeat.reward.loop import RewardLoop
from offbeat.reward.source import RewardSource
from offbeat.rollout.parts import Tally, measure_lag, shorten_collections
from offbeat.testing.judge_server import JudgeProcess, judge_process
from offbeat.track.transcripts import TranscriptWriter

IN_FLIGHT = 1000
WAITING = 250
"""Samples that wait for a seat beside those in flight."""
BEGIN_SECONDS = 2.0
"""In which the samples of the flight begin."""
WARM_SECONDS = 6.0
FLIGHT_SECONDS = 20.0
GENERATION_SECONDS = 0.1
"""Of a group in front of the slow judge, which takes ten times as long for one call."""
SLOW_CALLS = 64
GROUP_SECONDS = 1.0
"""Of a group in front of the judge that takes as long."""
GROUPS_AT_ONCE = 8
OVERLAP_SECONDS = 20.0
FIRST_MINUTE = 60.0
STALENESS = 2


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value with its bound; without a bound it is only told."""

    name: str
    value: float
    bound: str = ""
    met: bool = True


def below(name: str, value: float, bound: float) -> Figure:
    """A value that has to be under its bound."""
    return Figure(name, value, f"< {bound:g}", value < bound)


def at_most(name: str, value: float, bound: float) -> Figure:
    """A value that may reach its bound."""
    return Figure(name, value, f"<= {bound:g}", value <= bound)


def at_least(name: str, value: float, bound: float) -> Figure:
    """A value that has to reach its bound."""
    return Figure(name, value, f">= {bound:g}", value >= bound)


@asynccontextmanager
async def rewards(
    folder: Path, judge: JudgeProcess | None, concurrency: int, *others: RewardSource
) -> AsyncIterator[tuple[RewardLoop, dict[str, RewardSourceSection]]]:
    """A started reward loop, as a run has it: `others` and a judge behind HTTP."""
    sources: dict[str, RewardSource] = {other.name: other for other in others}
    instant = RewardSourceSection.model_validate({"kind": "function", "function": "none.py:none"})
    sections = dict.fromkeys(sources, instant)
    if judge is not None:
        sections["judge"] = section = RewardSourceSection.model_validate(
            {
                "kind": "genrm",
                "base_url": judge.base_url,
                "model": "judge",
                "concurrency": concurrency,
            }
        )
        cache = VerdictCache(folder / "verdicts.sqlite")
        sources["judge"] = GenRM("judge", section, HttpBackend(section, name="judge"), cache)
    loop = await RewardLoop.create(sources, sections, transcripts=TranscriptWriter(folder))
    try:
        yield loop, sections
    finally:
        await loop.stop()


async def flight() -> list[Figure]:
    """1,000 calls in flight, measured once they are."""
    machine, tally, numbers = Machine(), Tally(), itertools.count()
    before = machine.memory_mb()
    with (
        judge_process("--reply", "8", "--latency", "1.0", "0.5") as judge,
        tempfile.TemporaryDirectory() as folder,
        sleeper() as stall_of_sleeper,
    ):
        async with rewards(Path(folder), judge, IN_FLIGHT) as (loop, _):

            async def score_on() -> None:
                while True:
                    scored = await loop.score(item_of(next(numbers)))
                    assert scored.total is not None, scored.rewards

            lag = asyncio.create_task(measure_lag(lambda: tally))
            running = []
            for _ in range(IN_FLIGHT + WAITING):  # samples end one after another
                running.append(asyncio.create_task(score_on()))
                await asyncio.sleep(BEGIN_SECONDS / (IN_FLIGHT + WAITING))
            await machine.watch(WARM_SECONDS)
            first, cpu = await asyncio.to_thread(judge.stats), machine.cpu()
            await machine.watch(FLIGHT_SECONDS)
            last, cpu = await asyncio.to_thread(judge.stats), machine.cpu() - cpu
            stalls = tally.loop_lag_seconds, stall_of_sleeper()
            for task in (lag, *running):
                task.cancel()
            ended = await asyncio.gather(lag, *running, return_exceptions=True)
    failures = [e for e in ended if not isinstance(e, asyncio.CancelledError)]
    assert not failures, failures[0]
    seconds, calls = last["clock"] - first["clock"], last["calls"] - first["calls"]
    under_way = (last["call_seconds"] - first["call_seconds"]) / seconds
    return [
        at_least("calls in flight, share of 1,000", under_way / IN_FLIGHT, 0.95),
        at_most("calls in flight at most", last["most_at_once"], IN_FLIGHT),
        below("memory grows by, MB", max(mb for _, mb in machine.seen) - before, 200),
        below("longest stall of the event loop, ms", 1000 * stalls[0], 50),
        Figure("longest stall of a process that only sleeps, ms", 1000 * stalls[1]),
        Figure("calls a second", calls / seconds),
        Figure("CPU time of a call, ms", 1000 * cpu / calls),
        Figure("CPU of the process, cores", cpu / seconds),
    ]


async def slow(seconds: float) -> list[Figure]:
    """A slow judge holds admission back, and nothing else happens."""
    machine, delay = Machine(), 10 * GENERATION_SECONDS
    with (
        judge_process("--reply", "8", "--delay", str(delay)) as judge,
        tempfile.TemporaryDirectory() as name,
    ):
        folder = Path(name)
        async with rewards(folder, judge, SLOW_CALLS) as (loop, sections):
            config = config_of(folder, sections, staleness=STALENESS)
            engine = SleepingEngine(GENERATION_SECONDS, GROUPS_AT_ONCE)
            async with rollouter(config, engine, loop, folder) as core:
                watch = asyncio.create_task(machine.watch(seconds))
                trained = await train_for(seconds, core, config)
                await watch
            stats = await asyncio.to_thread(judge.stats)
            failed = sum(loop.stats()["judge"].failed.values())
    begun = machine.seen[0][0] + min(FIRST_MINUTE, seconds / 5)
    early = max(mb for at, mb in machine.seen if at <= begun)
    groups = sum(count for _, count in trained.taken)
    capacity = SLOW_CALLS / delay / GROUP_SIZE
    return [
        at_most("calls at the server at most", stats["most_at_once"], SLOW_CALLS),
        at_most("live groups at most", trained.most_live, trained.max_live),
        below(
            "memory grows after the first minute by, MB",
            max(mb for _, mb in machine.seen) - early,
            30,
        ),
        at_most("groups discarded", trained.discarded, 0),
        at_most("verdicts failed", failed, 0),
        at_most("staleness at most, steps", trained.staleness, STALENESS),
        Figure("groups trained", groups),
        Figure("groups a second, share of the judge's", groups / seconds / capacity),
        Figure("memory at the end, MB", machine.seen[-1][1]),
    ]


async def overlap() -> list[Figure]:
    """The same run without and with a judge that takes as long as generation."""
    alone = await _paced(None)
    with judge_process("--reply", "8", "--delay", str(GROUP_SECONDS)) as judge:
        judged = await _paced(judge)
    rates = [one.rate(one.taken[0][0] + WARM_SECONDS) for one in (alone, judged)]
    stale = max(alone.staleness, judged.staleness)
    return [
        at_least(
            "groups a second with the judge, share of those without", rates[1] / rates[0], 0.9
        ),
        at_most("groups discarded", alone.discarded + judged.discarded, 0),
        at_most("staleness at most, steps", stale, STALENESS),
        Figure("groups a second without a judge", rates[0]),
        Figure("groups a second with it", rates[1]),
    ]


async def _paced(judge: JudgeProcess | None) -> Trained:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with rewards(folder, judge, 2 * GROUPS_AT_ONCE * GROUP_SIZE, Length()) as (loop, of):
            config = config_of(folder, of, staleness=STALENESS)
            engine = SleepingEngine(GROUP_SECONDS, GROUPS_AT_ONCE)
            async with rollouter(config, engine, loop, folder) as core:
                return await train_for(WARM_SECONDS + OVERLAP_SECONDS, core, config)


def table(name: str, figures: Sequence[Figure]) -> str:
    """What was measured, as lines."""
    lines = [f"{name}\n"]
    for one in figures:
        told = ("met" if one.met else "MISSED") if one.bound else ""
        lines.append(f"  {one.name:58}{one.value:10.3f}  {one.bound:8}  {told}".rstrip() + "\n")
    return "".join(lines)


def main() -> int:
    """Prints what was measured; 0 if every bound is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = {"flight": flight, "slow": None, "overlap": overlap}
    parser.add_argument("--figures", nargs="+", choices=every, default=list(every))
    parser.add_argument("--seconds", type=float, default=300, help="of the slow judge")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    told = parser.parse_args()
    found: dict[str, list[Figure]] = {}
    shorten_collections()  # as the rollouter's process does
    for name in told.figures:
        run = every[name]
        begun = time.monotonic()
        found[name] = asyncio.run(slow(told.seconds) if run is None else run())
        if not told.json:
            sys.stdout.write(table(f"{name} ({time.monotonic() - begun:.0f} s)", found[name]))
            sys.stdout.flush()
    if told.json:
        figures = {name: [asdict(one) for one in of] for name, of in found.items()}
        sys.stdout.write(json.dumps({"benchmark": "rewards", "figures": figures}) + "\n")
    return 0 if all(one.met for of in found.values() for one in of) else 1


if __name__ == "__main__":
    sys.exit(main())
