"""Parts of the reliability benchmark: an engine that answers at once, runs of bookkeeping alone."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from reward_parts import Length, SleepingEngine, rollouter

from offbeat.config import Config, RewardSourceSection
from offbeat.ledger import Row
from offbeat.records import Completion, GenerateRequest, Manifest, Payload, PolicyVersion
from offbeat.reward.loop import RewardLoop
from offbeat.rollout.engine import Engine
from offbeat.rollout.rollouter import Rollouter
from offbeat.store import Store

TOKENS = 64
GROUPS_PER_STEP = 64
STALENESS = 2
CHECKPOINT_EVERY = 10
TEXT = "Three and four are seven, and seven and one are eight. " * 4


class ReadyEngine(SleepingEngine):
    """Answers at once, every token by the version that it holds."""

    def __init__(self) -> None:
        super().__init__(0.0, 1)
        rng = np.random.default_rng(0)
        self._ids = rng.integers(0, 2**15, TOKENS, dtype=np.int32)
        self._logprobs = -rng.random(TOKENS, dtype=np.float32)
        self._made: dict[int, Payload] = {}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        """All samples, one after another."""
        step = self._version.step
        if (ref := self._made.get(step)) is None:
            versions = np.full(TOKENS, step, np.int32)
            self._made = {step: (ref := Payload(self._ids, self._logprobs, versions))}
        for index in range(request.n):
            yield Completion(request.request_id, index, TEXT, TOKENS, step, step, "stop", ref)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some seconds of a run of nothing but bookkeeping.

    `groups` were trained in `seconds`; the process used `cpu` seconds meanwhile, the store's thread
    `store` of them. `stall` is the loop's longest, in seconds.
    """

    groups: int
    seconds: float
    cpu: float
    store: float
    stall: float


def settings(folder: Path, group_size: int, *, keep_batches: bool) -> Config:
    """A run of many small groups."""
    return Config.model_validate(
        {
            "run": "benchmark",
            "runs_dir": str(folder),
            "model": {"path": "none"},
            "data": {"train": "none"},
            "rollout": {"group_size": group_size, "max_tokens": TOKENS},
            "train": {
                "groups_per_step": GROUPS_PER_STEP,
                "max_staleness": STALENESS,
                "keep_batches": keep_batches,
            },
            "reward": {"length": {"kind": "function", "function": "none.py:none"}},
        }
    )


async def turn_over(
    folder: Path,
    group_size: int,
    stretches: Sequence[float],
    *,
    keep_batches: bool = False,
    engine: Engine | None = None,
) -> list[Stretch]:
    """The trainer's side takes, books and publishes, as fast as it is given batches; what came of
    each of the stretches, which last so many seconds. The ledger stays in `folder`."""
    config = settings(folder, group_size, keep_batches=keep_batches)
    section = RewardSourceSection.model_validate({"kind": "function", "function": "none.py:none"})
    loop = await RewardLoop.create({"length": Length()}, {"length": section})
    found, step = [], 0
    async with rollouter(config, engine or ReadyEngine(), loop, folder) as core:
        for seconds in stretches:
            stretch = await _stretch(core, step, seconds)
            found.append(stretch)
            step += stretch.groups // GROUPS_PER_STEP
    await loop.stop()
    return found


async def _stretch(core: Rollouter, first: int, seconds: float) -> Stretch:
    store, stall, step = core.books.store, 0.0, first
    begun, cpu, busy = time.monotonic(), time.process_time(), store.busy_seconds
    while time.monotonic() < begun + seconds:
        batch = await core.batch(step)
        await core.trained(step, {group.prompt.ordinal: "signal" for group in batch.groups})
        step += 1
        await core.published(Manifest(PolicyVersion(0, step), "full", "", {}))
        if step % CHECKPOINT_EVERY == 0:
            await core.checkpointed(step)
            stall = max(stall, (await core.drain())[2].loop_lag_seconds)
    stall = max(stall, (await core.drain())[2].loop_lag_seconds)
    return Stretch(
        (step - first) * GROUPS_PER_STEP,
        time.monotonic() - begun,
        time.process_time() - cpu,
        store.busy_seconds - busy,
        stall,
    )


def overhead_of(path: Path) -> tuple[int, float]:
    """Groups in a closed ledger file that has the payload of each, and its bytes a group besides
    that."""
    with closing(sqlite3.connect(path)) as db:
        (size,) = db.execute(
            "SELECT SUM(LENGTH(t.packed) + LENGTH(r.packed)) FROM tokens t "
            "JOIN rewards r USING (ordinal)"
        ).fetchone()
        (groups,) = db.execute("SELECT COUNT(*) FROM groups").fetchone()
    return groups, (path.stat().st_size - size) / groups


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds until puts were durable, and those of the same commits without a store."""

    store: list[float]
    disk: list[float]


PUTS = 400
PAUSE_SECONDS = 0.003
BLOB = bytes(4000)


def commits(folder: Path) -> Waits:
    """Puts a row and a payload every few milliseconds, and does the same by hand."""
    store = Store(folder / "commits.sqlite")
    waits: list[float] = []
    pending = []
    for ordinal in range(PUTS):
        begun = time.perf_counter()
        row = Row(ordinal, 0, "generated", None, None, 1)
        put = store.put([row], tokens=(ordinal, 0, lambda: BLOB))
        put.add_done_callback(lambda _, begun=begun: waits.append(time.perf_counter() - begun))
        pending.append(put)
        time.sleep(PAUSE_SECONDS)
    for put in pending:
        put.result(timeout=60)
    store.close()
    return Waits(sorted(waits), sorted(_by_hand(folder / "hand.sqlite")))


def _by_hand(path: Path) -> list[float]:
    took = []
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("CREATE TABLE t (ordinal INTEGER PRIMARY KEY, payload BLOB)")
        for ordinal in range(PUTS):
            begun = time.perf_counter()
            db.execute("INSERT INTO t VALUES (?, ?)", (ordinal, BLOB))
            took.append(time.perf_counter() - begun)
    return took
