"""The scoring of `offbeat score`: the rows that are not done yet, a bounded number in flight."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from offbeat.cli_score_files import stream
from offbeat.cli_score_progress import Progress
from offbeat.cli_score_rows import Entry, Reading, items_of, result_of
from offbeat.cluster.build import EXAMPLES
from offbeat.cluster.plan import device_kind
from offbeat.cluster.reward_roles import reward_roles
from offbeat.cluster.signals import end_on_sigterm
from offbeat.cluster.specs import RunSpec
from offbeat.records import ScoreItem
from offbeat.reward.loop import RewardLoop, Scored
from offbeat.reward.stats import SourceStats

SCOPE = "score"
IN_FLIGHT = 256
"""Rows in flight at most, unless a source's concurrency asks for more."""
SAVE_SECONDS = 0.25
"""What a kill loses at most."""
BREATH = 256
"""Rows that are passed over before others get a turn."""

Say = Callable[[str], None]


class Scoring:
    """Scores rows and commits them. Whatever ends it, what was scored is in the progress."""

    def __init__(self, reading: Reading, progress: Progress, in_flight: int | None) -> None:
        """`in_flight` rows at most are under way at once (one group at least)."""
        self._reading, self._progress = reading, progress
        sections = reading.chosen.active_rewards.values()
        most = max(IN_FLIGHT, *(2 * section.concurrency for section in sections))
        self._limit = most if in_flight is None else in_flight
        self._flying = 0
        self._changed = asyncio.Event()
        self._pending: dict[int, tuple[bool, str]] = {}
        self._failed = 0
        self.stats: Mapping[str, SourceStats] = {}
        self.seconds = 0.0

    def run(self, rows: int, note: Say) -> None:
        """Scores what is not done of so many rows; `stats` and `seconds` tell of it."""
        done = self._progress.done(rows)
        before = sum(done)
        if before == rows:
            return
        if before:
            note(f"{before} of {rows} rows are done already; the others follow")
        try:
            asyncio.run(self._run(done, note))
        except (asyncio.CancelledError, SystemExit):  # SIGTERM, the latter while Ray starts
            raise KeyboardInterrupt from None
        finally:
            kept = sum(self._progress.done(rows))
            if before < kept < rows:
                note(f"{kept} of {rows} rows are kept; the same command goes on from there")

    async def _run(self, done: bytearray, note: Say) -> None:
        end_on_sigterm()
        chosen = self._reading.chosen
        run = RunSpec(f"{chosen.run}-{secrets.token_hex(3)}", device_kind(chosen), Path())
        # a name of its own: what starts must not take the directory of the run itself
        config = chosen.model_copy(update={"run": f"{chosen.run}.{SCOPE}"})
        async with reward_roles(config, run, note, self._examples()) as rewards:
            began = time.monotonic()
            total, initial = len(done), sum(done)
            with tqdm(total=total, initial=initial, unit="row", disable=None, leave=False) as bar:
                try:
                    await self._score(rewards, done, bar)
                finally:
                    self._save()
                    self.stats, self.seconds = rewards.stats(SCOPE), time.monotonic() - began

    def _examples(self) -> list[ScoreItem]:
        """The first answers of the file."""
        entries = self._reading.entries(stream(self._reading.path))
        items = (entry.item for entry in entries if entry.item is not None)
        return list(islice(items, EXAMPLES))

    async def _score(self, rewards: RewardLoop, done: bytearray, bar: Any) -> None:
        async with asyncio.TaskGroup() as beside:
            watch = beside.create_task(rewards.watch(self._wake))
            saver = beside.create_task(self._keep_saving())
            async with asyncio.TaskGroup() as tasks:
                for number, group in enumerate(self._reading.groups(stream(self._reading.path))):
                    if number % BREATH == 0:
                        await asyncio.sleep(0)
                    if all(done[entry.place] for entry in group):
                        continue
                    await self._room(rewards, len(group))
                    tasks.create_task(self._group(rewards, group, bar))
            watch.cancel()
            saver.cancel()

    async def _group(self, rewards: RewardLoop, group: list[Entry], bar: Any) -> None:
        items = items_of(group)
        scored: list[Scored] = await rewards.score_group(items, scope=SCOPE) if items else []
        for place, entry in enumerate(group):
            found = scored[place] if items else None
            result = result_of(found, self._reading.chosen, self._reading.into)
            outcomes = result[f"{self._reading.into}s"].values()
            failed = any(outcome and outcome["status"] == "failed" for outcome in outcomes)
            self._failed += failed
            self._pending[entry.place] = failed, json.dumps(result)
        self._flying -= len(group)
        self._changed.set()
        if self._failed:
            bar.set_postfix(failed=self._failed, refresh=False)
        bar.update(len(group))

    async def _room(self, rewards: RewardLoop, rows: int) -> None:
        """Waits until so many rows may start: others have ended, and no source is stalled."""
        while rewards.stalled or (self._flying and self._flying + rows > self._limit):
            self._changed.clear()
            await self._changed.wait()
        self._flying += rows

    async def _wake(self) -> None:
        self._changed.set()

    async def _keep_saving(self) -> None:
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            self._save()

    def _save(self) -> None:
        """Commits what has been scored: milliseconds, as a commit waits for no disk."""
        if self._pending:
            self._progress.put(self._pending)
            self._pending = {}
