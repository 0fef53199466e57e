"""A whole run in one process, under a virtual clock, with everything going wrong, by a seed.

Rollouter, lives, books, buffer, ledger, reward loop, weight sync and the loop are the real ones.
Engines, reward sources, the trainer and the disk are simulated (`sim_*.py`): they are slow with a
heavy tail, die, hang, answer twice, late or after their end; roles die, calls are lost after they
ran, the whole run is killed and resumed. `Promises` looks at every event. The same seed gives the
same run, event by event:

    python -m offbeat.testing.simulation --seed 17
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from offbeat import loop
from offbeat.errors import OffbeatError, UserError
from offbeat.loop import AsyncLoop
from offbeat.outcome import Outcome
from offbeat.rollout import parts
from offbeat.testing import clock
from offbeat.testing.promises import Broken
from offbeat.testing.sim_engine import SimEngine
from offbeat.testing.sim_rollouter import SimRollouter
from offbeat.testing.sim_trainer import SimTrainer
from offbeat.testing.sim_world import CALM_START, Shape, World
from offbeat.track.recorder import Recorder

LIMIT_SECONDS = 20_000.0  # virtual, for one start of a run
INJECTED = (OSError, TimeoutError, asyncio.CancelledError)  # the last under a timeout


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulated run came to. `seconds` are virtual; `trace` is a checksum of every event and
    its second; `seen` counts what happened, `ends` says how each start ended."""

    seed: int
    groups: int
    seconds: float
    trace: int
    seen: Counter[str]
    ends: tuple[str, ...]


class SimulationFailed(AssertionError):
    """A promise is broken, or a start ended as none may; says how to see it again."""


def simulate(seed: int, shape: Shape | None = None) -> Report:
    """One run to its end. Raises `SimulationFailed`."""
    shape = shape or Shape.drawn(seed)
    with _quiet(seed):
        return clock.run(_Simulation(seed, shape).run(), seed)


class _Simulation:
    def __init__(self, seed: int, shape: Shape) -> None:
        self.seed, self.shape = seed, shape
        self.ends: list[str] = []

    async def run(self) -> Report:
        """Starts the run, and resumes it until it is done."""
        self.world = world = World(self.seed, self.shape)
        try:
            done = False
            while not done:
                done = await self._start()
                world.start += 1
        except (Broken, TimeoutError, OffbeatError, ValueError) as error:
            raise self._failed(error) from error
        counts = Counter(world.promises.seen)
        groups = sum(row.state == "trained" for row in world.tables.groups.values())
        seconds = world.promises.clock()
        ends = tuple(self.ends)
        return Report(self.seed, groups, seconds, world.promises.trace, counts, ends)

    def _failed(self, error: Exception) -> SimulationFailed:
        promises = self.world.promises
        events = "\n  ".join(promises.last)
        said = promises.broken[0] if promises.broken else f"{type(error).__name__}: {error}"
        return SimulationFailed(
            f"seed {self.seed}, start {self.world.start}: {said}\n{self.shape}\nends: {self.ends}\n"
            f"the last events:\n  {events}\n"
            f"again: python -m offbeat.testing.simulation --seed {self.seed}"
        )

    async def _start(self) -> bool:
        """One start of the run, as `cluster/launch.py` does it. True if it is done."""
        world = self.world
        world.resumed = "lineage" in world.tables.meta
        world.lineage = int(world.tables.meta.get("lineage", "-1")) + 1
        acknowledged = -1 if world.resumed else 0
        world.engines = [SimEngine(world, i, acknowledged) for i in range(self.shape.engines)]
        checkpoint = await world.disk.newest()
        version = world.disk.load(checkpoint).step
        trainer, rollouter = SimTrainer(world), SimRollouter(world)
        await trainer.setup(checkpoint)
        await rollouter.begin(version, resumed=world.resumed)
        loop = AsyncLoop(
            world.config,
            rollouter,
            trainer,
            cast(Recorder, Silent()),
            self.shape.steps,
            version=version,
            resumed=world.resumed,
            saved=checkpoint is not None,
            newest=world.disk.newest,
        )
        driver = asyncio.get_running_loop().create_task(loop.run())
        trouble = asyncio.get_running_loop().create_task(self._trouble(loop, rollouter, trainer))
        await asyncio.wait(
            {driver, trouble}, timeout=LIMIT_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        try:
            return await self._ended(driver, trouble, rollouter, trainer)
        finally:
            await _gone(trouble, driver)
            await world.end_tasks()

    async def _ended(
        self,
        driver: asyncio.Task[Outcome],
        trouble: asyncio.Task[None],
        rollouter: SimRollouter,
        trainer: SimTrainer,
    ) -> bool:
        world = self.world
        promises = world.promises
        killed = not driver.done()
        if killed and not trouble.done():
            raise Broken("promise 8: the run neither ended nor failed")
        if not killed:
            rollouter.end()
        trainer.process.kill()
        rollouter.kill()
        if promises.broken:
            raise Broken(promises.broken[0])
        if killed:
            self._note("killed")
            return False
        error = driver.exception()
        if error is not None:
            self._check_failure(error)
            self._note(f"failed: {error}")
            return False
        outcome = driver.result()
        self._note("stopped" if outcome.stopped else "done")
        if outcome.stopped:
            return False
        promises.ended(outcome.counts, self.shape.steps, self.shape.groups_per_step)
        return True

    def _note(self, end: str) -> None:
        self.world.promises.event(end)
        self.ends.append(end)

    def _check_failure(self, error: BaseException) -> None:
        """A run may fail only of what was done to it, and says so in a sentence."""
        promises = self.world.promises
        said = str(error)
        well = isinstance(error, OffbeatError) and said.endswith("steps are done")
        promises.check(well, 9, f"the run ended with {error!r}")
        cause: BaseException | None = error
        while cause is not None:
            expected = isinstance(cause, (OffbeatError, *INJECTED, BaseExceptionGroup))
            promises.check(expected, 9, f"the run ended of {cause!r}")
            cause = cause.__cause__
        promises.check(not isinstance(error, UserError), 9, f"the user is blamed: {said}")
        promises.check(self.world.start < CALM_START + 3, 9, f"it fails without trouble: {said}")

    async def _trouble(self, loop: AsyncLoop, rollouter: SimRollouter, trainer: SimTrainer) -> None:
        """Returns when the whole run is killed; until then it does this and that to it."""
        world = self.world
        if world.calm or not self.shape.trouble:
            await asyncio.Event().wait()
        mean = self.shape.fault_seconds / self.shape.trouble
        while True:
            await asyncio.sleep(world.rng.expovariate(1 / mean))
            fault = world.rng.choice(
                ("kill", "stop", "trainer", "trainer", "trainer hangs", "rollouter", "rollouter",
                 "rollouter hangs", "engine", "engine", "outage", "outage", "checkpoint")
            )  # fmt: skip
            world.promises.event(f"trouble: {fault}")
            world.promises.seen[f"trouble: {fault}"] += 1
            if fault == "kill":
                return
            if fault == "stop":
                loop.stopping.set()
            elif fault == "trainer":
                trainer.process.kill()
            elif fault == "trainer hangs":
                trainer.process.hung = True
            elif fault == "rollouter":
                rollouter.kill()
            elif fault == "rollouter hangs":
                rollouter.process.hung = True
            elif fault == "engine":
                world.rng.choice(world.engines).die()
            elif fault == "outage":
                seconds = world.rng.choice((1.0, 3.0, 8.0, 8.0, 30.0))
                world.spawn(world.rng.choice(rollouter.sources).outage(seconds))
            elif world.may_lose_newest():  # it is damaged, which is found at a kill
                del world.disk.saved[max(world.disk.saved)]
                return


class Silent:
    """In place of the recorder."""

    @staticmethod
    def clock() -> float:
        """It never asks for the time."""
        return 0.0

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Telemetry never changes training."""

    say = step = validation = anchors = books = tail = rewards_begin_anew = _nothing


async def _gone(*tasks: asyncio.Task[Any]) -> None:
    """Ends tasks, whatever they hold on to."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=1)
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _quiet(seed: int) -> Iterator[None]:
    """No log lines; random numbers of the code under test and collections by the seed alone."""
    before, state, collects = logging.root.manager.disable, random.getstate(), gc.isenabled()
    lag, parts.LAG_PERIOD_SECONDS = parts.LAG_PERIOD_SECONDS, LIMIT_SECONDS  # of the real clock
    notice, loop.NOTICE_SECONDS = loop.NOTICE_SECONDS, 5.0
    logging.disable(logging.CRITICAL)
    gc.disable()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        parts.LAG_PERIOD_SECONDS, loop.NOTICE_SECONDS = lag, notice
        logging.disable(before)
        if collects:
            gc.enable()


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulates seeds and says what they came to; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m offbeat.testing.simulation")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--groups", type=int, default=1000, help="about so many a seed")
    given = parser.parse_args(arguments)
    failed = 0
    for seed in range(given.seed, given.seed + given.seeds):
        began = time.process_time()
        try:
            report = simulate(seed, Shape.drawn(seed, given.groups))
        except SimulationFailed as failure:
            failed += 1
            sys.stderr.write(f"{failure}\n")
            continue
        used = time.process_time() - began
        sys.stdout.write(
            f"seed {seed}: {report.groups} groups in {report.seconds:.0f} s, {used:.2f} s of CPU, "
            f"trace {report.trace:08x}, {', '.join(end[:60] for end in report.ends)}\n"
        )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
