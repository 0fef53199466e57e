"""The asynchronous loop: how the roles meet. Read this first.

```
 data ──Prompt(ordinal)──► ADMIT ──► GENERATE ──► SCORE ──► READY ──► BATCHED(step) ──► TRAINED(step)
                             ▲        enginesxN      │          │            │                │
                             │                       │          │            │                ▼ weights of step+1
                             └───── the floor rises ◄┴──────────┴────────────┴── every routable engine acknowledged
                                                 function · genrm pool · disrm pool
```

Three things run at once and none waits for another without need:

* the **rollouter** (`rollout/rollouter.py`) admits, generates and scores. It waits only when
  admitting one more group could break the staleness bound.
* the **trainer** consumes `batch(step)` and produces weights. It waits only for a batch.
* the **publisher** carries the newest weights to the engines, one publication at a time.

A **validation** sees exactly one version, and there is one at a time: through engines it begins
when a publication has ended, and the next one waits until the answers are there (or, with engines
of its own, until these have loaded); by the trainer it is answered between two steps. Scoring its
answers holds nothing up. What is due while one is under way follows when that is done.

This file knows roles, not where they live: `cluster/local.py` runs them in one process,
`cluster/actors.py` and its neighbours as Ray actors.
"""  # noqa: E501

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from offbeat.config import Config
from offbeat.config_validate import On
from offbeat.errors import DeadlinePassed, RunFailed, UserError, first_of
from offbeat.ledger import Counts, Flag
from offbeat.records import Batch, Completion, GenerateRequest, Manifest, PolicyVersion, Span
from offbeat.reward.anchors import AnchorReport
from offbeat.reward.loop import SourceStats
from offbeat.rollout.parts import Tally
from offbeat.track.recorder import Recorder
from offbeat.train.step import StepResult
from offbeat.weights.sync import SyncReport, waves

log = logging.getLogger(__name__)
T = TypeVar("T")
GRACE_SECONDS = 120.0  # for a role to answer, beyond what it waits for by a setting of its own
LAST_SECONDS = 10.0  # for the last numbers of a run that ends
BESIDE = {"rollout": "beside the rollout", "dedicated": "on engines of its own"}
NOTICE_SECONDS = 1.0  # between two questions for what there is to say
LOOK_SECONDS = 30.0  # for the looks at anchors that the last step made due


class RollouterRole(Protocol):
    """The rollouter as the loop sees it, wherever it runs."""

    async def batch(self, step: int) -> Batch: ...
    async def trained(self, step: int, flags: Mapping[int, Flag]) -> Counts: ...
    async def published(self, manifest: Manifest) -> int: ...
    async def checkpointed(self, step: int) -> None: ...
    async def validate(self) -> tuple[int, dict[str, float]]: ...
    async def held_out(self) -> list[GenerateRequest]: ...
    async def assess(self, answers: Sequence[Completion]) -> dict[str, float]: ...
    async def counts(self) -> Counts: ...
    async def reward_stats(self) -> Mapping[str, SourceStats]: ...
    async def notices(self) -> list[str]: ...
    async def looks(self, wait_seconds: float = 0.0) -> list[AnchorReport]: ...
    async def drain(self) -> tuple[list[Span], list[SyncReport], Tally]: ...
    async def stop(self) -> None: ...


class TrainerRole(Protocol):
    """The trainer as the loop sees it; calls are collective over its ranks."""

    async def step(self, batch: Batch) -> StepResult: ...
    async def publish(self) -> Manifest: ...
    async def answer(
        self, requests: Sequence[GenerateRequest]
    ) -> tuple[PolicyVersion, list[Completion]]: ...
    async def save(self, path: Path, extra: Mapping[str, Any]) -> None: ...
    async def drain_spans(self) -> list[Span]: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished loop reached."""

    steps: int
    counts: Counts


class AsyncLoop:
    """One run: trains `total_steps` steps on what the rollouter hands out."""

    def __init__(
        self,
        config: Config,
        rollouter: RollouterRole,
        trainer: TrainerRole,
        recorder: Recorder,
        total_steps: int,
    ) -> None:
        self.config = config
        self.rollouter = rollouter
        self.trainer = trainer
        self.recorder = recorder
        self.total_steps = total_steps
        self.trained_steps = 0
        self._published = 0
        self._turn = asyncio.Lock()  # the trainer does one thing at a time
        self._validated = -1  # version of the newest validation that has begun
        self._validation: asyncio.Task[None] | None = None
        self._saved = 0  # version of the newest checkpoint
        self._trainer_is_well = True

    async def run(self) -> Outcome:
        """Runs to the end. Raises `RunFailed` with the steps done when it cannot go on, and
        `UserError` likewise for what the user mends."""
        try:
            async with asyncio.TaskGroup() as tasks:
                listener = tasks.create_task(self._listen())
                await self._begin_validation(tasks)
                publisher = tasks.create_task(self._publish(tasks))
                await self._save(final=False)  # the weights that the run began with
                for step in range(self.total_steps):
                    if not await self._train(step):
                        break
                    if publisher.done():
                        publisher = tasks.create_task(self._publish(tasks))
                        await asyncio.sleep(0)  # it takes its turn before the next step
                    if self._on == "train":
                        await self._validate_if_due(tasks, self.trained_steps)
                await publisher
                listener.cancel()
            await self._save(final=True)
            if self._validated != self.trained_steps:
                async with asyncio.TaskGroup() as tasks:
                    await self._begin_validation(tasks)
            await self._looks(LOOK_SECONDS)
        except Exception as failure:  # boundary: whatever ends a run says how far it came
            error = first_of(failure)
            kind = UserError if isinstance(error, UserError) else RunFailed
            said = str(error) or repr(error)
            await self._save_what_is_done()
            raise kind(f"{said}; {self.trained_steps} steps are done") from error
        finally:
            await self._drain()
        return Outcome(self.trained_steps, await self._books())

    async def _train(self, step: int) -> bool:
        """Consumes one batch; waits for it alone; produces weights of step + 1."""
        waiting = self.recorder.clock()
        patience = self.config.train.batch_deadline_seconds + self.config.reward_patience
        patience += GRACE_SECONDS
        batch = await within(patience, f"the rollouter's batch {step}", self.rollouter.batch(step))
        if not batch.groups:
            self.recorder.say(f"the data has ended after {step} steps")
            return False
        waited = self.recorder.clock() - waiting
        async with self._turn:
            result = await self._trainer(f"step {step}", self.trainer.step(batch))
        flags: dict[int, Flag] = {group.prompt.ordinal: "signal" for group in batch.groups}
        flags.update({ordinal: "no_signal" for ordinal in result.no_signal})
        counts = await _soon(self.rollouter.trained(step, flags))
        self.trained_steps = step + 1
        spans, reports, tally = await _soon(self.rollouter.drain())
        spans += await self._trainer("spans", self.trainer.drain_spans())
        self.recorder.step(batch, result, waited, counts, spans, reports, tally)
        if self.trained_steps % self.config.train.checkpoint_every == 0:
            await self._save(final=False)
        return True

    async def _publish(self, tasks: asyncio.TaskGroup) -> None:
        """Carries the newest weights to the engines until they have them."""
        while self._published < self.trained_steps:
            async with self._turn:
                manifest = await self._trainer("publication", self.trainer.publish())
            self._published = manifest.version.step
            turns = waves(self.config.rollout.replicas, self.config.weights.loads_at_once)
            seconds = turns * self.config.weights.deadline_seconds + GRACE_SECONDS
            if self._validation is not None:  # it may hold the version that it validates
                seconds += self.config.validation.deadline_seconds
            whom = f"the rollouter's engines, with version {manifest.version},"
            await within(seconds, whom, self.rollouter.published(manifest))
            if self._on != "train":
                await self._validate_if_due(tasks, self._published)

    # -- validation ------------------------------------------------------------------------------

    async def _validate_if_due(self, tasks: asyncio.TaskGroup, version: int) -> None:
        """Begins a validation that is due, unless one is under way; the last version's comes at the
        end of the run."""
        every = self.config.validation.every
        due = every > 0 and version // every > self._validated // every
        under_way = self._validation is not None and not self._validation.done()
        if due and not under_way and version < self.total_steps:
            await self._begin_validation(tasks)

    async def _begin_validation(self, tasks: asyncio.TaskGroup) -> None:
        """Returns when the trainer has answered, or else when the engines have been asked."""
        if self.config.data.validation is None:
            return
        if self._on == "train":
            work = self._scored_by_rollouter(*await self._answered_by_trainer())
        else:
            self._validated = self._published
            self.recorder.say(f"validating version {self._published} {BESIDE[self._on]}")
            work = self._through_engines()
        self._validation = tasks.create_task(work)
        await asyncio.sleep(0)  # it is asked for before the next publication

    async def _answered_by_trainer(self) -> tuple[PolicyVersion, list[Completion]]:
        requests = await _soon(self.rollouter.held_out())
        seconds = self.config.validation.deadline_seconds + GRACE_SECONDS
        async with self._turn:
            self._validated = self.trained_steps
            self.recorder.say(f"validating version {self.trained_steps} on the trainer's devices")
            call = self.trainer.answer(requests)
            return await self._trainer("answers to the held-out prompts", call, seconds)

    async def _scored_by_rollouter(
        self, version: PolicyVersion, answers: Sequence[Completion]
    ) -> None:
        seconds = self.config.validation.deadline_seconds + GRACE_SECONDS
        call = self.rollouter.assess(answers)
        metrics = await within(seconds, "the rollouter's scores of a validation", call)
        self.recorder.validation(version.step, metrics, self._on)

    async def _through_engines(self) -> None:
        seconds = self.config.validation.deadline_seconds + GRACE_SECONDS
        call = self.rollouter.validate()
        version, metrics = await within(seconds, "the rollouter's validation", call)
        self._validated = max(self._validated, version)
        self.recorder.validation(version, metrics, self._on)

    # -- helpers ---------------------------------------------------------------------------------

    async def _save(self, *, final: bool) -> None:
        step = self.trained_steps
        if final and step > 0 and step == self._saved:
            return
        path = self.config.run_dir / "checkpoints" / f"step-{step:06d}"
        async with self._turn:
            extra = {"counts": await _soon(self.rollouter.counts())}
            await self._trainer(f"checkpoint {step}", self.trainer.save(path, extra))
        self._saved = step
        await _soon(self.rollouter.checkpointed(step))

    async def _save_what_is_done(self) -> None:
        """A checkpoint of a run that fails elsewhere than in the trainer: no step is lost."""
        if not self._trainer_is_well or self.trained_steps == self._saved:
            return
        try:
            path = self.config.run_dir / "checkpoints" / f"step-{self.trained_steps:06d}"
            async with self._turn:
                await self._trainer("last checkpoint", self.trainer.save(path, {}))
        except Exception as error:  # boundary: what ended the run is what is told
            log.warning("the last steps are not saved: %s", error or repr(error))

    async def _listen(self) -> None:
        """Says, while the run goes on, what the rollouter has to say about reward sources."""
        while True:
            await asyncio.sleep(NOTICE_SECONDS)
            for line in await _soon(self.rollouter.notices()):
                self.recorder.say(line)
            await self._looks()

    async def _looks(self, wait_seconds: float = 0.0) -> None:
        for report in await _soon(self.rollouter.looks(wait_seconds)):
            self.recorder.anchors(report)

    @property
    def _on(self) -> On:
        return self.config.validation.on

    async def _trainer(self, what: str, call: Awaitable[T], seconds: float | None = None) -> T:
        whom = f"the trainer's {what}"
        if seconds is None:
            seconds, whom = self.config.train.deadline_seconds, f"{whom} (train.deadline_seconds)"
        self._trainer_is_well = False
        found = await within(seconds, whom, call)
        self._trainer_is_well = True
        return found

    async def _drain(self) -> None:
        """The last books and spans, also after a failure; roles that died have none."""
        for last in (self._last_books, self._last_spans):
            try:
                async with asyncio.timeout(LAST_SECONDS):
                    await last()
            except Exception as error:  # boundary: telemetry never changes the run's outcome
                log.warning("last numbers are lost: %s", error or repr(error))

    async def _last_books(self) -> None:
        for line in await self.rollouter.notices():
            self.recorder.say(line)
        await self._looks()
        self.recorder.books(await self.rollouter.counts(), await self.rollouter.reward_stats())
        spans, reports, tally = await self.rollouter.drain()
        self.recorder.tail(spans, reports, tally)

    async def _last_spans(self) -> None:
        self.recorder.tail(await self.trainer.drain_spans(), [], None)

    async def _books(self) -> Counts:
        counts = await _soon(self.rollouter.counts())
        lost = sum(counts["discarded"].values())
        if self.trained_steps == 0 or lost > counts["trained"]:
            why = ", ".join(f"{reason} {n}" for reason, n in counts["discarded"].items())
            raise RunFailed(
                f"{lost} of {counts['admitted']} groups were discarded ({why}); "
                f"{self.trained_steps} steps are done"
            )
        if counts["no_signal"] == counts["trained"]:
            raise RunFailed(
                f"all {counts['trained']} groups trained were no_signal (equal rewards, see "
                f'train.on_no_signal = "{self.config.train.on_no_signal}"): nothing was learnt in '
                f"{self.trained_steps} steps"
            )
        return counts


async def within(seconds: float, whom: str, call: Awaitable[T]) -> T:
    """Awaits a role's answer; `DeadlinePassed` says whom it waited for."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call
    except TimeoutError as late:
        if not limit.expired():
            raise
        raise DeadlinePassed(f"{whom} did not come within {seconds:g} s") from late


async def _soon(call: Awaitable[T]) -> T:
    return await within(GRACE_SECONDS, "the rollouter's answer", call)
