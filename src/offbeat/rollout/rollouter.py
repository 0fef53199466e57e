"""The rollouter: admission, routing, scoring, the buffer and the ledger, on one event loop.

It never pauses. Each admitted group is one task: generate, score every sample the moment it ends,
mark ready. It handles text, numbers and references; token arrays pass by it.
Invariant: every admitted ordinal ends in exactly one of trained and discarded(reason).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.config import Config
from offbeat.errors import DeadlinePassed, OffbeatError, RunFailed, first_of
from offbeat.faults import apoint
from offbeat.ledger import Counts, Flag
from offbeat.records import (
    Batch,
    Completion,
    GenerateRequest,
    Manifest,
    PolicyVersion,
    Sampling,
    Span,
)
from offbeat.reward.anchors import AnchorReport, Anchors
from offbeat.reward.loop import RewardLoop, SourceStats
from offbeat.rollout.books import Books, Restored
from offbeat.rollout.engine import Engine
from offbeat.rollout.generation import Generation
from offbeat.rollout.lives import Fetch, Lives, here
from offbeat.rollout.parts import (
    PromptSource,
    Tally,
    measure_lag,
    spans_of,
)
from offbeat.rollout.router import Router, wait_for
from offbeat.rollout.validation import Validator
from offbeat.weights.sync import Replica, SyncReport, WeightSync

log = logging.getLogger(__name__)


class Rollouter:
    """Admits, generates, scores and hands out batches. Call `run()` as a task, then the rest.

    `fetch` gives the token arrays behind completions, for the store. With `restored` (of `books`)
    it goes on from there, and generates from the first publication on.
    """

    def __init__(
        self,
        config: Config,
        *,
        prompts: PromptSource,
        engines: Sequence[Engine],
        rewards: RewardLoop,
        books: Books,
        version: PolicyVersion,
        total_steps: int,
        replace: Callable[[int], Awaitable[Engine]],
        validator: Validator | None = None,
        anchors: Anchors | None = None,
        fetch: Fetch = here,
        restored: Restored | None = None,
    ) -> None:
        self.config = config
        self._anchors = anchors or Anchors({}, {}, {})
        self._validator = validator
        self.running = asyncio.Event()  # set once `run` has begun
        self.prompts = prompts
        self.rewards = rewards
        self.replicas = [Replica(i, engine, version) for i, engine in enumerate(engines)]
        self.sampling = Sampling(
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            stop=config.rollout.stop,
        )
        self.books = books
        self._store_busy = books.store.busy_seconds
        self._replace = replace
        self._buffer, self._ledger = books.buffer, books.ledger
        self._changed = asyncio.Condition()
        router = Router(self.replicas, self._changed, config.rollout.seats)
        self._generation = Generation(router, lambda: self.sync, config.rollout)
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of groups that are not ready
        self.lives = Lives(
            config, books, rewards, self._generation, self.sampling, lambda: self.sync.floor,
            self._changed, fetch,
        )  # fmt: skip
        self._restored = restored or Restored()
        if restored is None:
            self.lives.open.set()
        self._next_ordinal = self._restored.next_ordinal
        self._wanted = min(prompts.total, total_steps * config.train.groups_per_step)
        self._discarded_before = self._restored.discards
        self._failure: BaseException | None = None
        self._sync: WeightSync[Engine] | None = None
        self._stopping = asyncio.Event()
        self._finished = self._published = False
        self._one_batch = asyncio.Lock()

    # -- the three loops -------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until `stop`; what fails here fails every later `batch`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._sync = WeightSync(
                    self.replicas,
                    deadline_seconds=self.config.weights.deadline_seconds,
                    start_deadline_seconds=self.config.cluster.start_deadline_seconds,
                    replace=self._replace,
                    on_change=self._notify,
                    tasks=tasks,
                    loads_at_once=self.config.weights.loads_at_once,
                    max_restarts=self.config.cluster.max_restarts,
                )
                self.running.set()
                lag = measure_lag(lambda: self.lives.tally)
                watch = self.rewards.watch(self._notify)
                self._go_on(tasks)
                loops = (self._admit(tasks), lag, watch, self._anchors.run())
                owned = [tasks.create_task(loop) for loop in loops]
                await self._stopping.wait()
                for task in owned:
                    task.cancel()
                raise _Stop
        except ExceptionGroup as group:
            _, rest = group.split(_Stop)
            if rest is not None:
                self._failure = first_of(rest)
                await self._notify()
                raise RunFailed(f"rollout failed: {self._failure!r}") from self._failure

    def _go_on(self, tasks: asyncio.TaskGroup) -> None:
        """What was live before a restart: scored if it was generated, else generated again."""
        for ordinal, (attempt, generated) in self._restored.unscored.items():
            prompt = self.prompts.prompt(ordinal)
            self._own(tasks, ordinal, self.lives.score(prompt, attempt, generated.completions))
        for ordinal, attempt in self._restored.again.items():
            self._own(tasks, ordinal, self.lives.again(self.prompts.prompt(ordinal), attempt))
        self._restored = Restored()

    def _own(self, tasks: asyncio.TaskGroup, ordinal: int, work: Coroutine[Any, Any, None]) -> None:
        task = tasks.create_task(work)
        self._tasks[ordinal] = task
        task.add_done_callback(lambda _: self._tasks.pop(ordinal, None))

    async def _admit(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes ordinals; waits for the buffer; produces group tasks; unblocked by the floor,
        by taken batches and by discards."""
        while True:
            async with self._changed:
                while not self._may_admit():
                    await self._changed.wait()
                prompt = self.prompts.prompt(self._next_ordinal)
                self._next_ordinal += 1
                await self.books.admit(prompt.ordinal, self.sync.floor)
            self._own(tasks, prompt.ordinal, self.lives.begin(prompt))
            await asyncio.sleep(0)

    # -- what the trainer's side calls -----------------------------------------------------------

    async def batch(self, step: int) -> Batch:
        """The batch of `step`, read in the moment the step starts; empty when data has ended.

        Idempotent: asking again for a step that no checkpoint holds gives the same batch. Waits for
        stragglers up to `train.straggler_patience_seconds`, then discards them by name.

        Raises `RunFailed` after `train.batch_deadline_seconds`, saying whom it waited for; time in
        which a reward source is down does not count, up to that source's patience.
        """
        if (recorded := await self.books.recorded(step)) is not None:
            return recorded
        async with self._one_batch:  # who asked before may have gone, and still wait here
            return await self._batch_of(step)

    async def _batch_of(self, step: int) -> Batch:
        if (recorded := await self.books.recorded(step)) is not None:
            return recorded
        patience = self.config.train.straggler_patience_seconds
        clock = asyncio.get_running_loop().time
        give_up = clock() + self.config.train.batch_deadline_seconds
        stalled_before = self.rewards.stalled_seconds

        def left() -> float:
            stalled = self.rewards.stalled_seconds - stalled_before
            return give_up + min(stalled, self.config.reward_patience) - clock()

        while True:
            wait = min(patience, max(left(), 0.01))
            try:
                ordinals = await wait_for(
                    self._changed, lambda: self._take(step), wait, lambda: self._whom(step)
                )
                break
            except DeadlinePassed as late:
                if left() <= 0:  # a source may have been down while it waited
                    raise RunFailed(f"no batch for step {step}: {late}") from late
                if wait == patience:
                    await self._discard_stragglers(step)
        self._raise_failure()
        batch = await self.books.batch(step, ordinals)
        await self._notify()
        return batch

    async def trained(self, step: int, flags: Mapping[int, Flag]) -> Counts:
        """Books a step as trained; `flags` says which groups had signal."""
        counts = await self.books.trained(step, flags)
        self._anchors.trained(step + 1)
        return counts

    async def checkpointed(self, step: int) -> None:
        """A checkpoint of version `step` is visible."""
        await self.books.checkpointed(step)

    async def next_step(self) -> int:
        """The first step whose batch has not been chosen: the trainer redoes those before it."""
        return self.books.next_step

    async def redo(self, version: int) -> None:
        """The trainer begins again with the weights of `version`."""
        self.books.redo(version)

    async def new_lineage(self) -> int:
        """A lineage for a trainer that starts."""
        return await self.books.new_lineage()

    async def copy_ledger(self, path: Path) -> None:
        """Writes the ledger as it is now to `path`, for a checkpoint."""
        await self.books.copy_to(path)

    async def ping(self) -> None:
        """Answers, while the loop turns."""

    async def restart(self, version: int, done: int) -> None:
        """Not from inside: whoever starts it in a process of its own can start it again."""
        raise RunFailed("the rollouter shares the driver's process, and ends with it")

    async def published(self, manifest: Manifest) -> int:
        """Loads a version into every engine; returns the floor then."""
        self._raise_failure()
        floor = await self.sync.publish(manifest)
        await apoint("weights.floor")
        self._published = True
        await self._notify()
        return floor

    async def validate(self) -> tuple[int, dict[str, float]]:
        """Held-out prompts answered by one version, through engines; its step, and metrics."""
        return await self._validator_of().validate(self.sync, self._generation)

    async def held_out(self) -> list[GenerateRequest]:
        """The held-out prompts, for whoever else answers them."""
        return self._validator_of().requests()

    async def assess(self, answers: Sequence[Completion]) -> dict[str, float]:
        """Metrics of answers to `held_out`, wherever they were made."""
        return await self._validator_of().assess(answers)

    async def counts(self) -> Counts:
        """The books: admitted = trained + discarded + live."""
        return self._ledger.counts()

    async def finish(self) -> Counts:
        """The run has its steps: what it has admitted beyond them (those of a resumed run may be
        fewer than before) is discarded by name, and nothing more is admitted."""
        self._finished = True
        counts = await self.books.close()
        for task in self._tasks.values():
            task.cancel()
        return counts

    async def notices(self) -> list[str]:
        """Lines for the user about the reward sources, since the last call."""
        return self.rewards.notices() + self._anchors.notices()

    async def looks(self, wait_seconds: float = 0.0) -> list[AnchorReport]:
        """Looks at anchors since the last call; those that are due are waited for so long."""
        if wait_seconds > 0:
            await self._anchors.settle(wait_seconds)
        return self._anchors.drain()

    async def reward_stats(self) -> Mapping[str, SourceStats]:
        """Outcomes by source so far, those of discarded groups included."""
        return self.rewards.stats()

    async def drain(self) -> tuple[list[Span], list[SyncReport], Tally]:
        """Spans of engines and reward sources, weight-sync reports and the tally, since last."""
        routable = [replica.engine for replica in self.replicas if replica.routable]
        drains = [*(e.drain_spans for e in routable), self.rewards.drain_spans]
        if self._validator is not None:
            drains.append(self._validator.drain_spans)
        spans = await spans_of(drains)
        tally, self.lives.tally = self.lives.tally, Tally()
        before, self._store_busy = self._store_busy, self.books.store.busy_seconds
        tally.store_seconds = self._store_busy - before
        return spans, self.sync.drain_reports(), tally

    async def stop(self) -> None:
        """Ends the loops; running groups stay live in the books."""
        self._stopping.set()

    @property
    def sync(self) -> WeightSync[Engine]:
        """Weight sync; there once `run` has begun."""
        if self._sync is None:
            raise OffbeatError("the rollouter is not running")
        return self._sync

    # -- helpers ---------------------------------------------------------------------------------

    def _may_admit(self) -> bool:
        """A reward source that is down stops admission, not what is in flight."""
        if self._sync is None or self.rewards.stalled or not self.lives.open.is_set():
            return False
        return not self._final() and self._buffer.can_admit(self.sync.floor, self.books.next_step)

    def _final(self) -> bool:
        """No further prompt will come, short of one that replaces a discard."""
        kept = self._next_ordinal - self._discarded_before - self.books.discards
        return self._finished or self._next_ordinal >= self.prompts.total or kept >= self._wanted

    def _validator_of(self) -> Validator:
        if self._validator is None:
            raise OffbeatError("there are no held-out prompts: data.validation is not set")
        return self._validator

    def _take(self, step: int) -> list[int] | None:
        if self._failure is not None:
            return []
        return self._buffer.take(step, final=self._final())

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RunFailed(f"rollout failed: {self._failure}") from self._failure

    def _whom(self, step: int) -> str:
        late = self._buffer.stragglers(step)[:8]
        state = {o: row.state for o in late if (row := self._ledger.row(o)) is not None}
        names = ", ".join(f"group {o} ({s})" for o, s in state.items())
        return f"step {step} waits for {names or 'new groups'}"

    async def _discard_stragglers(self, step: int) -> None:
        """Those that still generate, if only they hold the step; scores have their own deadlines
        (a slow judge never drops anything)."""
        seen = self._buffer.snapshot()
        late = self._buffer.stragglers(step)
        if seen.ready < self._buffer.groups_per_step and len(late) < seen.live - seen.ready:
            return
        for ordinal in late:
            row = self._ledger.row(ordinal)
            if row is not None and row.state == "admitted":
                gone = await self.lives.discard(ordinal, row.attempt, "straggler")
                if gone and (task := self._tasks.get(ordinal)) is not None:
                    task.cancel()  # its seats and its judges are free at once

    async def _notify(self) -> None:
        if self._published and any(replica.routable for replica in self.replicas):
            self.lives.open.set()  # until then the floor is that of engines which are gone
        async with self._changed:
            self._changed.notify_all()


class _Stop(Exception):
    """Ends the task group from inside."""
