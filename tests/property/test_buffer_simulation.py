"""A simulation that tries to break the staleness bound, to stall, or to lose a group.

Rollouter, engines and trainer under a virtual clock: heavy-tailed answers, overtaking, retries
whose late results come all the same, discards, partial last batches, rolling acknowledgements,
engines that leave and join, whole-run crashes with redo. Then broken buffers, which it has to
notice.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from offbeat.buffer import Buffer, BufferStateError
from offbeat.ledger import Ledger, Row


class Broken(AssertionError):
    """The simulation found a broken promise; the first argument is its kind."""


@dataclass
class Engine:
    version: int = 0
    routable: bool = True


class Simulation:
    """Rollouter, engines and trainer under a virtual clock, with everything going wrong.

    Events are (time, sequence, method, arguments). After each, `pump` admits and starts steps.
    """

    def __init__(self, seed: int, make: Callable[[int, int], Buffer] = Buffer) -> None:
        self.rng = rng = random.Random(seed)
        self.bound, self.size = rng.randint(0, 3), rng.randint(1, 4)
        self.prompts = rng.randint(0, 30)
        self.buffer, self.ledger = make(self.bound, self.size), Ledger()
        self.engines = [Engine() for _ in range(rng.randint(1, 4))]
        self.failing = rng.choice([0.0, 0.05, 0.3])
        self.patience = rng.choice([3.0, 30.0, float("inf")])
        self.tail = rng.choice([0.7, 1.1, 3.0])
        self.sync_delay = rng.choice([0.0, 0.5, 5.0])
        self.now, self.sequence, self.events = 0.0, 0, []  # type: ignore[var-annotated]
        self.floor = self.step = self.admitted = 0
        self.publishing: int | None = None
        self.trainer = "idle"  # idle | stepping | blocked (a publication is in flight)
        self.oldest: dict[tuple[int, int], int] = {}  # (ordinal, attempt) -> smallest token step
        self.seen: Counter[str] = Counter()
        self.trained: set[int] = set()
        self.waits = 0
        self.make = make
        self.saved = self.crashes = 0  # the checkpoint's version; crashes so far
        self.table: dict[int, Row] = {}  # the store
        self.pending: list[int] = []  # admitted before a crash, their tokens lost in it
        if rng.random() < 0.3:
            self.later(rng.uniform(1, 20), self.crash)

    def later(self, delay: float, method: Callable[..., None], *args: object) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + delay, self.sequence, method, args))

    def run(self) -> Simulation:
        self.pump()
        while self.events and self.trainer != "done":
            self.now, _, method, args = heapq.heappop(self.events)
            method(*args)
            self.pump()
            if self.sequence > 5_000:
                break
        counts = self.ledger.counts()
        if self.trainer != "done" or counts["live"] or counts["admitted"] != self.prompts:
            raise Broken("stalled", self.step, counts)
        if self.failing == 0.0 and self.patience == float("inf") and counts["discarded"]:
            raise Broken("starved", counts)
        return self

    def pump(self) -> None:
        while self.pending and self.buffer.can_admit(self.floor, self.step):
            self.admit_again(self.pending.pop(0))
        while not self.pending and self.admitted < self.prompts:
            if not self.buffer.can_admit(self.floor, self.step):
                break
            deadline = self.buffer.admit(self.admitted, 0, self.floor, self.step)
            self.ledger.admit(self.admitted, deadline, self.floor)
            self.later(self.rng.expovariate(5), self.dispatch, self.admitted, 0)
            self.admitted += 1
        if self.trainer == "idle":
            final = self.admitted == self.prompts and not self.pending
            batch = self.buffer.take(self.step, final)
            if batch:
                self.start_step(batch)
            elif batch is not None:
                self.trainer = "done"
            elif self.waits == 0 and self.patience < float("inf"):
                self.waits = 1
                self.later(self.patience, self.out_of_patience, self.step)

    def start_step(self, batch: list[int]) -> None:
        for ordinal in batch:
            row = self.ledger.row(ordinal)
            assert row is not None
            staleness = self.step - self.oldest[ordinal, row.attempt]
            if staleness > self.bound:
                raise Broken("stale", ordinal, staleness, self.bound)
            self.seen["at the bound"] += staleness == self.bound > 0
            self.seen["overtaken"] += ordinal + self.size < max(self.trained, default=0)
            self.seen["retried"] += row.attempt > 0
        self.seen["partial"] += len(batch) < self.size
        self.trained.update(batch)
        self.ledger.batched(batch, self.step)
        self.trainer, self.waits = "stepping", 0
        self.step += 1
        self.later(self.rng.expovariate(1), self.step_done, self.step - 1, batch)

    def step_done(self, step: int, batch: list[int]) -> None:
        self.ledger.trained(step, {o: self.rng.choice(["signal", "no_signal"]) for o in batch})
        if self.rng.random() < 0.2:
            self.ledger.checkpointed(step + 1)
            self.saved = step + 1
        self.check_counts()
        self.trainer = "blocked"
        if self.publishing is None:
            self.publish()

    def publish(self) -> None:
        self.publishing, self.trainer = self.step, "idle"
        for i, engine in enumerate(self.engines):
            delay = self.sync_delay * (self.rng.random() + i * self.rng.random())
            if engine.routable and self.rng.random() < 0.1:  # waived; it left routing before that
                engine.routable = False
                self.later(delay * 5 + 1, self.rejoin, engine)
            elif engine.routable:
                self.later(delay, self.acknowledge, engine, self.step)
        self.settle()

    def acknowledge(self, engine: Engine, version: int) -> None:
        engine.version = max(engine.version, version)
        self.settle()

    def rejoin(self, engine: Engine) -> None:
        newest = self.floor if self.publishing is None else self.publishing
        engine.version, engine.routable = newest, True  # joins as it acknowledges
        self.settle()

    def settle(self) -> None:
        routable = [engine.version for engine in self.engines if engine.routable]
        if routable:
            assert min(routable) >= self.floor
            self.floor = min(routable)
            if self.publishing is not None and self.floor >= self.publishing:
                self.publishing = None
                if self.trainer == "blocked":
                    self.publish()

    def dispatch(self, ordinal: int, attempt: int) -> None:
        routable = [engine.version for engine in self.engines if engine.routable]
        if not self.buffer.is_live(ordinal, attempt):
            return
        if not routable:
            self.later(1.0, self.dispatch, ordinal, attempt)
            return
        self.oldest[ordinal, attempt] = self.rng.choice(routable)
        duration = 0.3 * self.rng.paretovariate(self.tail)
        self.later(min(duration, 500.0), self.generated, ordinal, attempt)
        if self.rng.random() < self.failing:  # gives up on it; the late result comes all the same
            self.later(duration * self.rng.random(), self.failed, ordinal, attempt)

    def generated(self, ordinal: int, attempt: int) -> None:
        if self.ledger.generated(ordinal, attempt):
            self.later(self.rng.expovariate(3), self.judged, ordinal, attempt)

    def judged(self, ordinal: int, attempt: int) -> None:
        fate = self.rng.random()
        if fate < self.failing / 3:
            self.failed(ordinal, attempt)
        elif fate < self.failing / 2:
            self.discard(ordinal, attempt, "reward")
        elif self.ledger.scored(ordinal, attempt):
            assert self.ledger.ready(ordinal, attempt)
            assert self.buffer.ready(ordinal, attempt)

    def failed(self, ordinal: int, attempt: int) -> None:
        if not self.buffer.is_live(ordinal, attempt):
            return
        if attempt >= 2:
            self.discard(ordinal, attempt, "failed")
            return
        try:
            deadline = self.buffer.retry(ordinal, attempt, self.floor)
        except BufferStateError:
            assert self.crashes  # else a retry needs no room
            self.discard(ordinal, attempt, "no room")
            return
        assert self.ledger.retried(ordinal, deadline) == attempt + 1
        self.later(self.rng.expovariate(5), self.dispatch, ordinal, attempt + 1)

    def discard(self, ordinal: int, attempt: int, reason: str) -> None:
        if self.buffer.discard(ordinal, attempt):
            self.ledger.discarded(ordinal, reason, attempt)
            self.seen[reason] += 1
            self.check_counts()

    def out_of_patience(self, step: int) -> None:
        if self.trainer != "idle" or step != self.step:
            return
        for ordinal in self.buffer.stragglers(step):
            row = self.ledger.row(ordinal)
            assert row is not None
            self.discard(ordinal, row.attempt, "straggler")
        if self.events or self.admitted < self.prompts:
            self.later(self.patience, self.out_of_patience, step)

    def crash(self) -> None:
        """Everything dies; the checkpoint, the store and the payload of generated groups stay."""
        self.events, self.waits, self.pending, self.crashes = [], 0, [], self.crashes + 1
        self.table.update((row.ordinal, row) for row in self.ledger.drain())
        self.ledger = Ledger.restore(self.table.values(), self.saved)
        self.buffer = self.make(self.bound, self.size)
        self.floor, self.publishing, self.trainer = self.saved, None, "idle"
        self.engines = [Engine(self.saved) for _ in self.engines]
        assert self.step == max(self.ledger.batches(), default=self.saved - 1) + 1
        for row in self.ledger.live_rows():
            if row.state == "admitted":
                self.pending.append(row.ordinal)
            elif row.state != "batched":
                ready = row.state == "ready"
                self.buffer.restore(row.ordinal, row.attempt, row.deadline, self.step, ready=ready)
                if not ready:
                    self.later(1.0, self.judged, row.ordinal, row.attempt)
        self.seen["restored"] += self.buffer.live()
        self.seen["redone"] += len(self.ledger.batches())
        if self.step > self.saved:
            self.trainer = "redoing"
            self.later(self.rng.expovariate(1), self.redone)
        self.check_counts()
        if self.rng.random() < 0.3:
            self.later(self.rng.uniform(1, 20), self.crash)

    def redone(self) -> None:
        for step, batch in self.ledger.batches().items():
            self.ledger.trained(step, dict.fromkeys(batch, "signal"))
        self.publish()

    def admit_again(self, ordinal: int) -> None:
        row = self.ledger.row(ordinal)
        assert row is not None
        deadline = self.buffer.admit(ordinal, row.attempt + 1, self.floor, self.step)
        assert self.ledger.retried(ordinal, deadline) == row.attempt + 1
        self.later(self.rng.expovariate(5), self.dispatch, ordinal, row.attempt + 1)

    def check_counts(self) -> None:
        counts = self.ledger.counts()
        ended = counts["trained"] + sum(counts["discarded"].values())
        training = sum(len(batch) for batch in self.ledger.batches().values())
        live = len(self.ledger.live_rows())
        if counts["admitted"] != ended + counts["live"] or counts["live"] != live:
            raise Broken("counts", counts)
        if not self.buffer.live() <= live <= self.buffer.live() + training + len(self.pending):
            raise Broken("counts", counts, self.buffer.live())
        if self.buffer.live() > self.buffer.max_live:
            raise Broken("memory", self.buffer.live())


def test_ten_thousand_random_schedules() -> None:
    seen: Counter[str] = Counter()
    for seed in range(10_000):
        try:
            seen += Simulation(seed).run().seen
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    for event in ("at the bound", "overtaken", "retried", "partial", "straggler", "failed"):
        assert seen[event] > 1_000, seen  # the schedules do try it
    assert min(seen["restored"], seen["redone"]) > 1_000, seen
    assert seen["no room"] > 0, seen


# Mutants: each breaks one rule, and the simulation must notice. Otherwise it would prove nothing.


class SlotCount(Buffer):
    """The tempting simpler rule: at most `max_live` groups live, any `G` ready ones may go."""

    def can_admit(self, floor: int, next_step: int) -> bool:
        return self.live() < self.max_live

    def _fits(self, deadline: int, step: int) -> bool:
        return True

    def _check_step(self, step: int) -> None:
        pass

    def take(self, step: int, final: bool = False) -> list[int] | None:
        chosen = sorted(o for o, group in self._groups.items() if group.ready)
        size = min(self.groups_per_step, self.live()) if final else self.groups_per_step
        if len(chosen) < size:
            return None
        for ordinal in chosen[:size]:
            self._remove(ordinal)
        return chosen[:size]


class DeadlineOneLate(Buffer):
    def __init__(self, max_staleness: int, groups_per_step: int) -> None:
        super().__init__(max_staleness + 1, groups_per_step)


class RetryFromTrainerStep(Buffer):
    """Takes the trainer's step for the floor: engines may not have that version yet."""

    def retry(
        self, ordinal: int, attempt: int, floor: int | None = None, *, keeps_tokens: bool = False
    ) -> int:
        self._remove(ordinal)
        deadline = self._next_step + self.max_staleness
        self._add(ordinal, attempt + 1, deadline, self._next_step, ready=False)
        return deadline


class AdmitsOneTooFew(Buffer):
    """Never lets the last group of a batch in."""

    def can_admit(self, floor: int, next_step: int) -> bool:
        return self.live() + 1 < self.groups_per_step and super().can_admit(floor, next_step)


class NamesNobody(Buffer):
    """The trainer waits for the last, incomplete batch, and nobody is named."""

    def take(self, step: int, final: bool = False) -> list[int] | None:
        return super().take(step, final and self.live() == 0)


@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        (SlotCount, "stale"),
        (DeadlineOneLate, "stale"),
        (RetryFromTrainerStep, "stale"),
        (AdmitsOneTooFew, "stalled"),
        (NamesNobody, "stalled"),
    ],
)
def test_simulation_notices_a_broken_buffer(mutant: type[Buffer], kind: str) -> None:
    kinds = set()
    for seed in range(400):
        try:
            Simulation(seed, mutant).run()
        except Broken as broken:
            kinds.add(broken.args[0])
        if kind in kinds:
            return
    raise AssertionError(f"only {kinds} were noticed")
