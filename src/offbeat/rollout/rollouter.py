"""The rollouter: admission, routing, scoring, the buffer and the ledger, on one event loop.

It never pauses. Each admitted group is one task: generate, score every sample the moment it ends,
mark ready. It handles text, numbers and references; token arrays pass by it.
Invariant: every admitted ordinal ends in exactly one of trained and discarded(reason).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from offbeat.buffer import Buffer
from offbeat.config import Config
from offbeat.errors import DeadlinePassed, OffbeatError, RequestRefused, RunFailed, first_of
from offbeat.ledger import Counts, Flag, Ledger
from offbeat.records import (
    Batch,
    Completion,
    GenerateRequest,
    Group,
    Manifest,
    PolicyVersion,
    Prompt,
    Sample,
    Sampling,
    Span,
)
from offbeat.reward.anchors import AnchorReport, Anchors
from offbeat.reward.budget import WINDOW
from offbeat.reward.loop import RewardLoop, SourceStats
from offbeat.rollout.engine import Engine
from offbeat.rollout.generation import Generation
from offbeat.rollout.parts import (
    GroupFailed,
    PromptSource,
    Tally,
    cause_of,
    measure_lag,
    spans_of,
)
from offbeat.rollout.router import Place, Router, wait_for
from offbeat.rollout.scoring import Rated, combine, rate
from offbeat.rollout.validation import Validator
from offbeat.store import Store
from offbeat.weights.sync import Replica, SyncReport, WeightSync

log = logging.getLogger(__name__)


class Rollouter:
    """Admits, generates, scores and hands out batches. Call `run()` as a task, then the rest."""

    def __init__(
        self,
        config: Config,
        *,
        prompts: PromptSource,
        engines: Sequence[Engine],
        rewards: RewardLoop,
        store: Store,
        version: PolicyVersion,
        total_steps: int,
        replace: Callable[[int], Awaitable[Engine]],
        validator: Validator | None = None,
        anchors: Anchors | None = None,
    ) -> None:
        self.config = config
        self._anchors = anchors or Anchors({}, {}, {})
        self._validator = validator
        self.running = asyncio.Event()  # set once `run` has begun
        self.prompts = prompts
        self.rewards = rewards
        self.replicas = [Replica(i, engine, version) for i, engine in enumerate(engines)]
        self.tally = Tally()
        self.sampling = Sampling(
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            stop=config.rollout.stop,
        )
        self._store = store
        self._replace = replace
        self._buffer = Buffer(config.train.max_staleness, config.train.groups_per_step)
        self._ledger = Ledger()
        self._changed = asyncio.Condition()
        router = Router(self.replicas, self._changed, config.rollout.seats)
        self._generation = Generation(router, lambda: self.sync, config.rollout)
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of groups that are not ready
        self._groups: dict[int, Group] = {}  # ready, not yet batched
        self._batch: Batch | None = None  # the newest, so that asking twice gives it twice
        self._next_ordinal = 0
        self._next_step = 0
        self._wanted = min(prompts.total, total_steps * config.train.groups_per_step)
        self._discards = 0
        self._failures_in_a_row = 0
        self._failure: BaseException | None = None
        self._sync: WeightSync[Engine] | None = None
        self._stopping = asyncio.Event()

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
                )
                self.running.set()
                lag = measure_lag(lambda: self.tally)
                watch = self.rewards.watch(self._notify)
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

    async def _admit(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes ordinals; waits for the buffer; produces group tasks; unblocked by the floor,
        by taken batches and by discards."""
        while True:
            async with self._changed:
                while not self._may_admit():
                    await self._changed.wait()
                prompt = self.prompts.prompt(self._next_ordinal)
                self._next_ordinal += 1
                floor = self.sync.floor
                deadline = self._buffer.admit(prompt.ordinal, 0, floor, self._next_step)
                self._ledger.admit(prompt.ordinal, deadline, floor)
                self._record()
            task = tasks.create_task(self._group(prompt), name=str(prompt.ordinal))
            self._tasks[prompt.ordinal] = task
            task.add_done_callback(lambda task: self._tasks.pop(int(task.get_name()), None))
            await asyncio.sleep(0)

    # -- one group -------------------------------------------------------------------------------

    async def _group(self, prompt: Prompt) -> None:
        """One group's life up to ready, through its attempts."""
        attempt = 0
        place = Place()
        while True:
            try:
                samples = await self._attempt(prompt, attempt, place)
            except GroupFailed as failure:
                return await self._discard(prompt.ordinal, attempt, str(failure))
            except Exception as error:  # boundary: one group's failure never touches another
                cause = cause_of(error)
                log.warning("group %d attempt %d: %s: %s", prompt.ordinal, attempt, cause, error)
                if attempt + 1 >= self.config.rollout.max_attempts:
                    return await self._discard(prompt.ordinal, attempt, f"generation: {cause}")
                if not self._buffer.is_live(prompt.ordinal, attempt):
                    return None  # discarded meanwhile, as a straggler
                deadline = self._buffer.retry(prompt.ordinal, attempt, self.sync.floor)
                attempt = self._ledger.retried(prompt.ordinal, deadline)
                self._record()
                continue
            return await self._finish(prompt, attempt, samples)

    async def _attempt(self, prompt: Prompt, attempt: int, place: Place) -> list[Sample]:
        """Generates on one engine at a time; every sample is scored from the moment it ends."""
        request = GenerateRequest(
            f"{prompt.ordinal}.{attempt}",
            prompt.token_ids,
            self.config.rollout.group_size,
            self.sampling,
        )
        rating: list[asyncio.Task[Rated]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                async for completion in self._generation.once(request, place):
                    self.tally.generated_tokens += completion.tokens
                    one = rate(self.rewards, prompt, completion, attempt)
                    rating.append(tasks.create_task(one))
                if not self._ledger.generated(prompt.ordinal, attempt):
                    raise GroupFailed("superseded")
                self._record()
        except ExceptionGroup as group:
            error = first_of(group)
            if isinstance(error, RequestRefused):
                raise GroupFailed("refused") from error
            raise error from None
        rated = [task.result() for task in rating]
        if len(rated) != request.n:
            raise OffbeatError(f"engine gave {len(rated)} of {request.n} samples")
        return await combine(self.rewards, rated, attempt, self.config.train.min_scored)

    async def _finish(self, prompt: Prompt, attempt: int, samples: list[Sample]) -> None:
        async with self._changed:
            if self._buffer.ready(prompt.ordinal, attempt):
                deadline = self._buffer.deadline(prompt.ordinal)
                self._groups[prompt.ordinal] = Group(prompt, attempt, deadline, tuple(samples))
                self._ledger.scored(prompt.ordinal, attempt)
                self._ledger.ready(prompt.ordinal, attempt)
                self._record()
                self._failures_in_a_row = 0
                self._changed.notify_all()

    async def _discard(self, ordinal: int, attempt: int, reason: str) -> None:
        async with self._changed:
            if not self._buffer.discard(ordinal, attempt):
                return  # discarded before, as a straggler
            self._ledger.discarded(ordinal, reason, attempt)
            self._groups.pop(ordinal, None)
            self._record()
            self._discards += 1
            self._failures_in_a_row += 1
            self._changed.notify_all()
        log.warning("group %d discarded: %s", ordinal, reason)
        limit = max(3 * self._buffer.max_live, WINDOW // self.config.rollout.group_size)
        if self._failures_in_a_row >= limit and not self.rewards.stalled:
            raise RunFailed(f"{limit} groups on end were discarded, the last one for: {reason}")

    # -- what the trainer's side calls -----------------------------------------------------------

    async def batch(self, step: int) -> Batch:
        """The batch of `step`, read in the moment the step starts; empty when data has ended.

        Idempotent: asking again for the newest step gives the same batch. Waits for stragglers up
        to `train.straggler_patience_seconds`, then discards them by name.

        Raises `RunFailed` after `train.batch_deadline_seconds`, saying whom it waited for; time in
        which a reward source is down does not count, up to that source's patience.
        """
        if self._batch is not None and self._batch.step == step:
            return self._batch
        patience = self.config.train.straggler_patience_seconds
        give_up = time.monotonic() + self.config.train.batch_deadline_seconds
        stalled_before = self.rewards.stalled_seconds

        def left() -> float:
            stalled = self.rewards.stalled_seconds - stalled_before
            return give_up + min(stalled, self.config.reward_patience) - time.monotonic()

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
        groups = tuple(self._groups.pop(ordinal) for ordinal in ordinals)
        self._batch = Batch(step, groups)
        self._next_step = step + 1
        if ordinals:
            self._ledger.batched(ordinals, step)
            await asyncio.wrap_future(self._store.put(self._ledger.drain()))
        await self._notify()
        return self._batch

    async def trained(self, step: int, flags: Mapping[int, Flag]) -> Counts:
        """Books a step as trained; `flags` says which groups had signal."""
        self._ledger.trained(step, flags)
        self._record()
        self._anchors.trained(step + 1)
        return self._ledger.counts()

    async def checkpointed(self, step: int) -> None:
        """A checkpoint of version `step` is visible: earlier steps are final."""
        self._ledger.checkpointed(step)
        self._record()

    async def published(self, manifest: Manifest) -> int:
        """Loads a version into every engine; returns the floor then."""
        self._raise_failure()
        return await self.sync.publish(manifest)

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

    async def notices(self) -> list[str]:
        """Lines for the user about the reward sources, since the last call."""
        return self.rewards.notices()

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
        tally, self.tally = self.tally, Tally()
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
        if self._sync is None or self.rewards.stalled:
            return False
        return not self._final() and self._buffer.can_admit(self.sync.floor, self._next_step)

    def _final(self) -> bool:
        """No further prompt will come, short of one that replaces a discard."""
        kept = self._next_ordinal - self._discards
        return self._next_ordinal >= self.prompts.total or kept >= self._wanted

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
                await self._discard(ordinal, row.attempt, "straggler")
                if (task := self._tasks.get(ordinal)) is not None:
                    task.cancel()  # its seats and its judges are free at once

    def _record(self) -> None:
        self._store.put(self._ledger.drain())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class _Stop(Exception):
    """Ends the task group from inside."""
