"""Parts of the reward benchmark: engines that sleep, a trainer that takes, what is measured."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from offbeat.config import Config
from offbeat.records import (
    Completion,
    EngineHealth,
    GenerateRequest,
    Manifest,
    Payload,
    PolicyVersion,
    Prompt,
    Reward,
    ScoreItem,
    Span,
)
from offbeat.reward.loop import RewardLoop
from offbeat.rollout.books import Books
from offbeat.rollout.engine import Engine
from offbeat.rollout.rollouter import Rollouter
from offbeat.store import Store

START = PolicyVersion(0, 0)
GROUP_SIZE = 8
TOKENS = 300
CHECKPOINT_EVERY = 50
MEMORY_PERIOD_SECONDS = 0.5

SLEEPER = """
import asyncio, sys, time
async def main():
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, told.set)
    print("ready", flush=True)
    most = 0.0
    while not told.is_set():
        before = time.perf_counter()
        await asyncio.sleep(0.05)
        most = max(most, time.perf_counter() - before - 0.05)
    print(most)
asyncio.run(main())
"""
"""What `measure_lag` measures, in a process that does nothing else."""


IDS = np.arange(60, dtype=np.int32)


def prompt_of(ordinal: int) -> Prompt:
    """A prompt of its own for each ordinal."""
    question = f"Question {ordinal}: what is {ordinal} plus {ordinal}? " + "Think it over. " * 15
    return Prompt(ordinal, IDS, question, question, None, str(2 * ordinal))


def answer_of(ordinal: int, index: int) -> str:
    """About as long as 300 tokens are."""
    return f"Answer {index} to {ordinal}: it is {2 * ordinal}, " + "because that is so, " * 60


def item_of(ordinal: int) -> ScoreItem:
    """A sample that no other one equals."""
    return ScoreItem(prompt_of(ordinal), answer_of(ordinal, 0), tokens=TOKENS)


class Prompts:
    """More prompts than a benchmark takes."""

    total = 10**9

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt of an ordinal."""
        return prompt_of(ordinal)


class SleepingEngine:
    """Generates a group in `seconds`, its samples ending one after another, by sleeping."""

    def __init__(self, seconds: float, groups_at_once: int) -> None:
        self._seconds, self._seats = seconds, asyncio.Semaphore(groups_at_once)
        self._version = START

    async def start(self) -> None:
        """Nothing to start."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        """Its samples, evenly over the group's time."""
        ordinal = int(request.request_id.partition(".")[0])
        async with self._seats:
            step = self._version.step
            for index in range(request.n):
                await asyncio.sleep(self._seconds / request.n)
                yield Completion(
                    request.request_id, index, answer_of(ordinal, index), TOKENS, step,
                    self._version.step, "stop", _payload(step),
                )  # fmt: skip

    async def load(self, manifest: Manifest) -> PolicyVersion:
        """At once."""
        self._version = manifest.version
        return manifest.version

    async def health(self) -> EngineHealth:
        """Well."""
        return EngineHealth(self._version, 0, 0, 1)

    async def drain_spans(self) -> list[Span]:
        """None."""
        return []

    async def stop(self) -> None:
        """Nothing to stop."""


def _payload(step: int) -> Payload:
    return Payload(
        np.zeros(TOKENS, np.int32),
        np.zeros(TOKENS, np.float32),
        np.full(TOKENS, step, np.int32),
    )


class Length:
    """A reward source that answers at once."""

    name = "length"
    down_since: float | None = None

    async def start(self) -> None:
        """Nothing to start."""

    async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
        """Long answers are good."""
        return [Reward.scored(self.name, len(item.completion) / 1000) for item in items]

    def facts(self) -> dict[str, float]:
        """None."""
        return {}

    async def drain_spans(self) -> list[Span]:
        """None."""
        return []

    async def stop(self) -> None:
        """Nothing to stop."""


class Machine:
    """Memory and CPU time of this process."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.seen: list[tuple[float, float]] = []
        """Seconds of `time.monotonic()` and megabytes, as `watch` found them."""

    def memory_mb(self) -> float:
        """Resident now, in MB."""
        found: int = self._process.memory_info().rss
        return found / 1e6

    def cpu(self) -> float:
        """CPU seconds so far, of all threads."""
        return time.process_time()

    async def watch(self, seconds: float) -> None:
        """Writes down the memory for so long."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            self.seen.append((now, self.memory_mb()))
            await asyncio.sleep(MEMORY_PERIOD_SECONDS)


@contextmanager
def sleeper() -> Iterator[Callable[[], float]]:
    """A process that only sleeps meanwhile; what is yielded ends it and returns its longest
    stall, in seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()

    def longest() -> float:
        told, _ = process.communicate("\n", timeout=30)
        return float(told)

    try:
        yield longest
    finally:
        process.kill()
        process.wait()


@dataclass(slots=True)
class Trained:
    """What a trainer that takes what it is given has seen; times are of `time.monotonic()`."""

    taken: list[tuple[float, int]] = field(default_factory=list)  # when, how many groups
    staleness: int = 0
    most_live: int = 0
    max_live: int = 0
    discarded: int = 0

    def rate(self, since: float) -> float:
        """Groups a second, from the first batch after `since` to the last one."""
        late = [(at, groups) for at, groups in self.taken if at >= since]
        (first, _), (last, _) = late[0], late[-1]
        return sum(groups for _, groups in late[1:]) / (last - first)


def config_of(folder: Path, loop_sections: dict[str, Any], *, staleness: int) -> Config:
    """The settings of a run of groups of 8, eight groups a step."""
    return Config.model_validate(
        {
            "run": "benchmark",
            "runs_dir": str(folder),
            "model": {"path": "none"},
            "data": {"train": "none"},
            "rollout": {"group_size": GROUP_SIZE, "seats": 64, "max_tokens": TOKENS},
            "train": {"groups_per_step": 8, "max_staleness": staleness},
            "reward": loop_sections,
        }
    )


@asynccontextmanager
async def rollouter(
    config: Config, engine: Engine, loop: RewardLoop, folder: Path
) -> AsyncIterator[Rollouter]:
    """A running rollouter, its ledger on disk."""

    async def none(index: int) -> Engine:
        raise AssertionError(f"engine {index} is to be replaced")

    store, prompts = Store(folder / "ledger.sqlite"), Prompts()
    books = Books(store, config.train, prompts.prompt)
    core = Rollouter(
        config, prompts=prompts, engines=[engine], rewards=loop, books=books, version=START,
        total_steps=10**8, replace=none,
    )  # fmt: skip
    running = asyncio.create_task(core.run())
    await core.running.wait()
    try:
        yield core
    finally:
        await core.stop()
        await running
        await asyncio.to_thread(store.close)


async def train_for(seconds: float, core: Rollouter, config: Config) -> Trained:
    """The trainer's side: takes batch after batch and publishes at once, for so long."""
    trained = Trained(max_live=(config.train.max_staleness + 1) * config.train.groups_per_step)

    async def look() -> None:
        while True:
            trained.most_live = max(trained.most_live, (await core.counts())["live"])
            await asyncio.sleep(0.02)

    async def steps() -> None:
        step = 0
        while True:
            batch = await core.batch(step)
            trained.taken.append((time.monotonic(), len(batch.groups)))
            for group in batch.groups:
                oldest = min(sample.completion.version_min for sample in group.samples)
                trained.staleness = max(trained.staleness, step - oldest)
            await core.trained(step, {group.prompt.ordinal: "signal" for group in batch.groups})
            await core.published(Manifest(PolicyVersion(0, step + 1), "full", "", {}))
            await core.drain()
            step += 1
            if step % CHECKPOINT_EVERY == 0:
                await core.checkpointed(step)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            tasks.create_task(look())
            tasks.create_task(steps())
    trained.discarded = sum((await core.counts())["discarded"].values())
    return trained
