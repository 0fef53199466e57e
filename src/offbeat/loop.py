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

A role that dies is started again, within `cluster.max_restarts`: the trainer from the newest
checkpoint, to **redo** the recorded batches after it in a new lineage; the rollouter from its
ledger. `offbeat resume` is the same, with all of them dead.

This file knows roles (`roles.py`), not where they live: `cluster/local.py` runs them in one
process, `cluster/actors.py` and its neighbours as Ray actors.
"""  # noqa: E501

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from offbeat.config import Config
from offbeat.config_validate import On
from offbeat.errors import RoleDied, RunFailed, UserError, first_of
from offbeat.faults import apoint
from offbeat.ledger import Counts, Flag
from offbeat.outcome import Outcome, checked
from offbeat.records import Batch, Completion, PolicyVersion
from offbeat.roles import GRACE_SECONDS, Asking, RollouterRole, TrainerRole
from offbeat.track.recorder import Recorder
from offbeat.train.checkpoint import LEDGER_COPY, checkpoint_name, newest_valid, version_of
from offbeat.weights.sync import waves

log = logging.getLogger(__name__)
LAST_SECONDS = 10.0  # for the last numbers of a run that ends
BESIDE = {"rollout": "beside the rollout", "dedicated": "on engines of its own"}
NOTICE_SECONDS = 1.0  # between two questions for what there is to say
LOOK_SECONDS = 30.0  # for the looks at anchors that the last step made due


async def newest_on_disk(folder: Path) -> Path | None:
    """The whole checkpoint of the highest step in `folder`."""
    return await asyncio.to_thread(newest_valid, folder)


class AsyncLoop:
    """One run: trains `total_steps` steps on what the rollouter hands out.

    `version`: the trainer's at the start. With `resumed` the engines hold nothing that may be used,
    until the recorded batches after that version are trained again; `saved`: there is a checkpoint
    of it. `newest` finds the newest whole checkpoint in a folder.
    """

    def __init__(
        self,
        config: Config,
        rollouter: RollouterRole,
        trainer: TrainerRole,
        recorder: Recorder,
        total_steps: int,
        *,
        version: int = 0,
        resumed: bool = False,
        saved: bool = False,
        newest: Callable[[Path], Awaitable[Path | None]] = newest_on_disk,
    ) -> None:
        self.config = config
        self.rollouter = rollouter
        self.trainer = trainer
        self.recorder = recorder
        self.total_steps = total_steps
        self.trained_steps = version
        self.stopping = asyncio.Event()  # set it to end after the step that runs
        self._resumed, self._newest = resumed, newest
        self._published = -1 if resumed else version
        self._redo_until = version  # steps before it are trained again before anything is published
        self._booked: dict[int, dict[int, Flag]] = {}  # steps since the newest checkpoint
        self._restarts = 0
        self._turn = asyncio.Lock()  # the trainer does one thing at a time
        self._validated = -1  # version of the newest validation that has begun
        self._told = -1  # and of the newest one that has been recorded
        self._held = False  # a validation that nobody waits for may hold the engines' version
        self._validation: asyncio.Task[None] | None = None
        self._stepping = False  # whether the trainer may be a step further than it has told
        self._saved = version if saved else -1  # version of the newest checkpoint
        self._ask = Asking(config.train.deadline_seconds)
        self._trainer, self._rollouter = self._ask.trainer, self._ask.rollouter

    async def run(self) -> Outcome:
        """Runs to the end, or until `stopping`. Raises `RunFailed` with the steps done when it
        cannot go on, and `UserError` likewise for what the user mends."""
        dead: list[RoleDied] = []
        try:
            if self._resumed:
                self._redo_until = await self._rollouter("books", self.rollouter.next_step())
            while True:
                try:
                    await self._revive(dead)
                    await self._session()
                    await self._save(final=True)
                    if not self.stopping.is_set():
                        await self._last_validation()
                    counts = await self._close()
                    break
                except Exception as failure:  # boundary: a role that died is started again
                    self._note_death(failure, dead)
        except Exception as failure:  # boundary: whatever ends a run says how far it came
            error = first_of(failure)
            kind = UserError if isinstance(error, UserError) else RunFailed
            said = str(error) or repr(error)
            await self._save_what_is_done()
            raise kind(f"{said}; {self.trained_steps} steps are done") from error
        finally:
            await self._drain()
        if not self._stopped:
            wanted = None if self.config.train.steps is None else self.total_steps
            checked(counts, self.trained_steps, self.config.train.on_no_signal, wanted)
        return Outcome(self.trained_steps, counts, self._stopped)

    async def _session(self) -> None:
        """Trains until all is done, a role dies, or the loop is to stop."""
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._listen()), tasks.create_task(self._heartbeats())]
            if self._published >= 0:
                await self._begin_validation(tasks)
            publisher = tasks.create_task(self._publish(tasks))
            if self._saved < 0:
                await self._save(final=False)  # the weights that the run began with
            for step in range(self.trained_steps, self.total_steps):
                if not await self._train(step):
                    break
                if publisher.done():
                    publisher = tasks.create_task(self._publish(tasks))
                    await asyncio.sleep(0)  # it takes its turn before the next step
                if self._on == "train":
                    await self._validate_if_due(tasks, self.trained_steps)
            if self.stopping.is_set():
                beside += [publisher, *([self._validation] if self._validation else [])]
            else:
                await publisher
            for task in beside:
                task.cancel()

    async def _train(self, step: int) -> bool:
        """Consumes one batch; waits for it alone; produces weights of step + 1."""
        waiting = self.recorder.clock()
        batch = await self._next_batch(step)
        if batch is None:
            return False
        if not batch.groups:
            self.recorder.say(f"the data has ended after {step} steps")
            return False
        waited = self.recorder.clock() - waiting
        async with self._turn:
            self._stepping = True
            result = await self._trainer(f"step {step}", self.trainer.step(batch))
            self._stepping = False
        flags: dict[int, Flag] = {group.prompt.ordinal: "signal" for group in batch.groups}
        flags.update({ordinal: "no_signal" for ordinal in result.no_signal})
        self.trained_steps, self._booked[step] = step + 1, flags
        counts = await self._rollouter(f"books of step {step}", self.rollouter.trained(step, flags))
        await apoint("driver.step")
        spans, reports, tally = await self._rollouter("spans", self.rollouter.drain())
        spans += await self._trainer("spans", self.trainer.drain_spans())
        self.recorder.step(batch, result, waited, counts, spans, reports, tally)
        if self.trained_steps % self.config.train.checkpoint_every == 0:
            await self._save(final=False)
        return True

    async def _next_batch(self, step: int) -> Batch | None:
        """The batch of a step; None when the loop is to stop, which no wait holds up."""
        patience = self.config.train.batch_deadline_seconds + self.config.reward_patience
        seconds = patience + GRACE_SECONDS
        call = self._rollouter(f"batch {step}", self.rollouter.batch(step), seconds)
        batch, stop = asyncio.create_task(call), asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait({batch, stop}, return_when=asyncio.FIRST_COMPLETED)
            return None if self.stopping.is_set() else await batch
        finally:
            for task in (batch, stop):
                task.cancel()
            await asyncio.gather(batch, stop, return_exceptions=True)

    async def _publish(self, tasks: asyncio.TaskGroup) -> None:
        """Carries the newest weights to the engines until they have them; none that are redone."""
        while self._published < self.trained_steps and self.trained_steps >= self._redo_until:
            async with self._turn:
                manifest = await self._trainer("publication", self.trainer.publish())
            self._published = manifest.version.step
            turns = waves(self.config.rollout.replicas, self.config.weights.loads_at_once)
            seconds = turns * self.config.weights.deadline_seconds + GRACE_SECONDS
            if self._held or self._validation is not None:  # it may hold what it validates
                seconds += self.config.validation.deadline_seconds
            what = f"engines, with version {manifest.version},"
            await self._rollouter(what, self.rollouter.published(manifest), seconds)
            self._held = False
            if self._on != "train":
                await self._validate_if_due(tasks, self._published)

    async def _close(self) -> Counts:
        """The last books: of a run that has its steps, nothing is live."""
        role = self.rollouter
        return await self._rollouter("books", role.counts() if self._stopped else role.finish())

    @property
    def _stopped(self) -> bool:
        return self.stopping.is_set() and self.trained_steps < self.total_steps

    # -- roles that die --------------------------------------------------------------------------

    def _note_death(self, failure: Exception, dead: list[RoleDied]) -> None:
        """Raises what cannot be healed by starting a role again, or not any more."""
        error = first_of(failure)
        most = self.config.cluster.max_restarts
        if not isinstance(error, RoleDied):
            raise failure
        if self._restarts >= most:
            raise RunFailed(f"{error} (cluster.max_restarts = {most} are used up)") from failure
        self._restarts += 1
        dead.append(error)
        log.warning("%s", error)
        self.recorder.say(f"{error}; starting it again, restart {self._restarts} of {most}")

    async def _revive(self, dead: list[RoleDied]) -> None:
        """Starts dead roles again: the rollouter first, which has the books; then the trainer,
        which redoes what is recorded after its checkpoint. Engines get weights anew."""
        if not (roles := {died.role for died in dead}):
            return
        checkpoint = await self._newest(self.config.run_dir / "checkpoints")
        version = 0 if checkpoint is None else version_of(checkpoint)
        seconds = self.config.cluster.start_deadline_seconds + GRACE_SECONDS
        if "rollouter" in roles:
            call = self.rollouter.restart(version, self.trained_steps)
            await self._rollouter("restart", call, seconds)
            self.recorder.rewards_begin_anew()
            for booked in self._booked.items():  # it may not have committed them
                await self._rollouter("books", self.rollouter.trained(*booked))
        if "trainer" in roles:
            lineage = await self._rollouter("books", self.rollouter.new_lineage())
            again = self.trainer.restart(lineage, checkpoint)
            self.trained_steps = (await self._trainer("restart", again, seconds)).step
            await self._rollouter("books", self.rollouter.redo(self.trained_steps))
            self._booked, self._stepping = {}, False
        self._redo_until = await self._rollouter("books", self.rollouter.next_step())
        self._held = self._validation is not None
        self._published, self._validation, self._validated = -1, None, self._told
        self._turn = asyncio.Lock()
        dead.clear()

    async def _heartbeats(self) -> None:
        """Finds a role that neither ends nor answers."""
        limit = self.config.cluster.heartbeat_seconds
        while True:
            await asyncio.sleep(limit / 4)
            await self._rollouter("heartbeat", self.rollouter.ping(), limit)
            await self._ask.ping(self.trainer.ping(), limit)

    # -- validation ------------------------------------------------------------------------------

    async def _validate_if_due(self, tasks: asyncio.TaskGroup, version: int) -> None:
        """Begins a validation that is due, unless one is under way; the last version's comes at the
        end of the run."""
        every = self.config.validation.every
        due = every > 0 and version // every > self._validated // every
        due |= self._validated < 0 and not self._resumed  # the first one was lost with its role
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

    async def _last_validation(self) -> None:
        if self._validated != self.trained_steps:
            async with asyncio.TaskGroup() as tasks:
                await self._begin_validation(tasks)
        await self._looks(LOOK_SECONDS)

    async def _answered_by_trainer(self) -> tuple[PolicyVersion, list[Completion]]:
        requests = await self._rollouter("held-out prompts", self.rollouter.held_out())
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
        metrics = await self._rollouter("scores of a validation", call, seconds)
        self._told = version.step
        self.recorder.validation(version.step, metrics, self._on)

    async def _through_engines(self) -> None:
        seconds = self.config.validation.deadline_seconds + GRACE_SECONDS
        call = self.rollouter.validate()
        version, metrics = await self._rollouter("validation", call, seconds)
        self._validated, self._told = max(self._validated, version), version
        self.recorder.validation(version, metrics, self._on)

    # -- helpers ---------------------------------------------------------------------------------

    async def _save(self, *, final: bool) -> None:
        step = self.trained_steps
        if final and step > 0 and step == self._saved:
            return
        if final and self._stepping:
            return  # the answer to its newest step was lost; resume redoes what is recorded
        path = self.config.run_dir / "checkpoints" / checkpoint_name(step)
        copy = self.config.run_dir / f".ledger-{step}.sqlite"
        copy.unlink(missing_ok=True)  # of a driver that was killed here
        try:
            async with self._turn:
                extra = {"counts": await self._rollouter("books", self.rollouter.counts())}
                await self._rollouter("copy of its ledger", self.rollouter.copy_ledger(copy))
                call = self.trainer.save(path, extra, {LEDGER_COPY: copy})
                await self._trainer(f"checkpoint {step}", call)
        finally:
            copy.unlink(missing_ok=True)
        self._saved, self._booked = step, {}  # the copy has waited for their commit
        await self._rollouter("books", self.rollouter.checkpointed(step))
        await apoint("driver.saved")

    async def _save_what_is_done(self) -> None:
        """A checkpoint of a run that fails elsewhere than in the trainer: no step is lost."""
        well = self._ask.trainer_is_well and not self._stepping
        if not well or self.trained_steps == self._saved:
            return
        try:
            path = self.config.run_dir / "checkpoints" / checkpoint_name(self.trained_steps)
            async with self._turn:
                await self._trainer("last checkpoint", self.trainer.save(path, {}, {}))
        except Exception as error:  # boundary: what ended the run is what is told
            log.warning("the last steps are not saved: %s", error or repr(error))

    async def _listen(self) -> None:
        """Says, while the run goes on, what the rollouter has to say about reward sources."""
        while True:
            await asyncio.sleep(NOTICE_SECONDS)
            for line in await self._rollouter("notices", self.rollouter.notices()):
                self.recorder.say(line)
            await self._looks()

    async def _looks(self, wait_seconds: float = 0.0) -> None:
        call = self.rollouter.looks(wait_seconds)
        for report in await self._rollouter("looks at anchors", call):
            self.recorder.anchors(report)

    @property
    def _on(self) -> On:
        return self.config.validation.on

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
