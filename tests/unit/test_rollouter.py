"""The rollouter's promises, with fake engines that fail and dawdle on purpose (W1, W2)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.config import Config
from offbeat.errors import RequestRefused, RunFailed
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
from offbeat.reward.loop import Scored
from offbeat.rollout.books import Books
from offbeat.rollout.engine import Engine
from offbeat.rollout.rollouter import Rollouter
from offbeat.store import Store, read_counts
from offbeat.train.step import gather

ZERO = PolicyVersion(0, 0)


class FakePrompts:
    def __init__(self, total: int) -> None:
        self.total = total

    def prompt(self, ordinal: int) -> Prompt:
        return Prompt(ordinal, np.array([1, 2], np.int32), "p", "p")


def one_token(version: int) -> Payload:
    """The token arrays of a sample that `version` made."""
    ids = np.array([7], np.int32)
    return Payload(ids, np.array([-0.5], np.float32), np.array([version], np.int32))


class FakeEngine:
    """Generates at once, unless `behave(ordinal, attempt)` sleeps or raises."""

    def __init__(self, behave: Callable[[int, int], Awaitable[None]]) -> None:
        self.behave = behave
        self.version = ZERO
        self.loaded: list[PolicyVersion] = []
        self.load_seconds = 0.0

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        ordinal, attempt = (int(part) for part in request.request_id.split("."))
        made_by = self.version.step
        for index in range(request.n):
            await self.behave(ordinal, attempt)
            yield Completion(
                request.request_id, index, "x", 1, made_by, made_by, "stop", one_token(made_by)
            )

    async def load(self, manifest: Manifest) -> PolicyVersion:
        await asyncio.sleep(self.load_seconds)
        self.version = manifest.version
        self.loaded.append(manifest.version)
        return manifest.version

    async def health(self) -> EngineHealth:
        return EngineHealth(self.version, 0, 0, 8)

    async def drain_spans(self) -> list[Span]:
        return []

    async def stop(self) -> None: ...


class FakeRewards:
    """Scores 1.0 after `delay` seconds; remembers when each sample came."""

    def __init__(self, delay: float = 0.0, verdict: str = "keep") -> None:
        self.delay = delay
        self.verdict = verdict
        self.seen = 0

    async def rate(self, item: ScoreItem, *, attempt: int = 0) -> dict[str, Reward]:
        self.seen += 1
        await asyncio.sleep(self.delay)
        if self.verdict == "keep":
            return {"r": Reward.scored("r", 1.0)}
        return {"r": Reward.failed("r", "timeout")}

    def spoils(self, rewards: dict[str, Reward]) -> list[str]:
        return ["r"] if self.verdict == "drop_group" else []

    async def finish(
        self, items: list[ScoreItem], rated: list[dict[str, Reward]], *, attempt: int = 0
    ) -> list[Scored]:
        return [
            Scored(r, r["r"].value, "keep" if r["r"].value is not None else "drop_sample")
            for r in rated
        ]

    stalled: tuple[str, ...] = ()
    stalled_seconds = 0.0

    async def watch(self, on_change: Callable[[], Awaitable[None]]) -> None:
        await asyncio.Event().wait()

    async def drain_spans(self) -> list[Span]:
        return []


def config_of(tmp_path: Path, **train: Any) -> Config:
    rollout = {"group_size": 2, "max_tokens": 4, "max_attempts": 2, "deadline_seconds": 30}
    rollout |= train.pop("rollout", {})
    return Config.model_validate(
        {
            "run": "r",
            "runs_dir": str(tmp_path),
            "model": {"path": "m"},
            "data": {"train": "d"},
            "rollout": rollout,
            "train": {"groups_per_step": 4, "max_staleness": 2} | train,
            "weights": {"deadline_seconds": 0.5},
            "reward": {"r": {"kind": "function", "function": "f.py:f", "patience_seconds": 0.1}},
        }
    )


Body = Callable[[Rollouter], Awaitable[Any]]


def drive(
    tmp_path: Path,
    config: Config,
    engines: list[FakeEngine],
    body: Body,
    *,
    total: int,
    rewards: FakeRewards | None = None,
    replace: Callable[[int], Awaitable[Engine]] | None = None,
    version: int | None = None,
) -> Any:
    """Runs a rollouter around `body` and closes its store; with the checkpoint of a `version` it
    goes on from what the store has."""

    async def none(index: int) -> Engine:
        raise AssertionError("no engine is to be replaced")

    async def main() -> Any:
        store = Store(tmp_path / "ledger.sqlite")
        books = Books(store, config.train, FakePrompts(total).prompt)
        rollouter = Rollouter(
            config,
            prompts=FakePrompts(total),
            engines=engines,
            rewards=rewards or FakeRewards(),  # type: ignore[arg-type]
            books=books,
            restored=None if version is None else books.restore(version),
            version=ZERO,
            total_steps=-(-total // config.train.groups_per_step),
            replace=replace or none,
        )
        task = asyncio.create_task(rollouter.run())
        await rollouter.running.wait()
        try:
            async with asyncio.timeout(20):
                return await body(rollouter)
        finally:
            await rollouter.stop()
            await asyncio.gather(task, return_exceptions=True)
            store.close()

    return asyncio.run(main())


def manifest(step: int) -> Manifest:
    return Manifest(PolicyVersion(0, step), "full", "", {})


async def train_all(rollouter: Rollouter) -> list[list[int]]:
    """The trainer's side at its simplest; the ordinals of every step."""
    steps: list[list[int]] = []
    while True:
        step = len(steps)
        batch = await rollouter.batch(step)
        if not batch.groups:
            return steps
        for group in batch.groups:
            for sample in group.samples:
                assert step - sample.completion.version_min <= 2
        steps.append([group.prompt.ordinal for group in batch.groups])
        await rollouter.trained(step, {o: "signal" for o in steps[-1]})
        await rollouter.published(manifest(step + 1))


async def prompt_answer(ordinal: int, attempt: int) -> None:
    await asyncio.sleep(0)


def test_every_ordinal_is_trained_once_and_the_store_says_the_same(tmp_path: Path) -> None:
    async def body(rollouter: Rollouter) -> Any:
        return await train_all(rollouter), await rollouter.counts()

    engines = [FakeEngine(prompt_answer), FakeEngine(prompt_answer)]
    steps, counts = drive(tmp_path, config_of(tmp_path), engines, body, total=30)
    assert sorted(o for step in steps for o in step) == list(range(30))
    assert len(steps[-1]) == 2
    assert counts["trained"] == 30
    assert counts["live"] == 0
    assert read_counts(tmp_path / "ledger.sqlite") == counts


@pytest.mark.parametrize(("bad", "max_staleness"), [(77, 2), (0, 0), (127, 0), (127, 2)])
def test_w1_one_failing_group_of_128_is_retried_then_discarded_by_its_cause(
    tmp_path: Path, bad: int, max_staleness: int
) -> None:
    tries: list[int] = []

    async def behave(ordinal: int, attempt: int) -> None:
        if ordinal == bad:
            tries.append(attempt)
            raise ValueError("broken")

    async def body(rollouter: Rollouter) -> Any:
        return await train_all(rollouter), await rollouter.counts()

    config = config_of(tmp_path, max_staleness=max_staleness)
    steps, counts = drive(tmp_path, config, [FakeEngine(behave)], body, total=128)
    assert sorted(o for step in steps for o in step) == [o for o in range(128) if o != bad]
    assert counts["discarded"] == {"generation: ValueError": 1}
    assert tries == [0, 1]


def test_a_failure_that_passes_is_retried_and_trained(tmp_path: Path) -> None:
    async def behave(ordinal: int, attempt: int) -> None:
        if attempt == 0 and ordinal % 5 == 0:
            raise ConnectionError("once")

    async def body(rollouter: Rollouter) -> Any:
        return await train_all(rollouter), await rollouter.counts()

    steps, counts = drive(tmp_path, config_of(tmp_path), [FakeEngine(behave)], body, total=32)
    assert sorted(o for step in steps for o in step) == list(range(32))
    assert counts["discarded"] == {}


@pytest.mark.parametrize("patience", [0.3, 30.0])
def test_w2_a_straggler_is_overtaken_then_trained_or_discarded_by_name(
    tmp_path: Path, patience: float
) -> None:
    async def behave(ordinal: int, attempt: int) -> None:
        await asyncio.sleep(1.5 if ordinal == 0 else 0.005)

    async def body(rollouter: Rollouter) -> Any:
        return await train_all(rollouter), await rollouter.counts()

    config = config_of(tmp_path, straggler_patience_seconds=patience)
    steps, counts = drive(tmp_path, config, [FakeEngine(behave)], body, total=40)
    trained = [o for step in steps for o in step]
    assert 0 not in steps[0], "the first steps go on without the straggler"
    if patience < 1:
        assert counts["discarded"] == {"straggler": 1}
        assert sorted(trained) == list(range(1, 40))
    else:
        assert counts["discarded"] == {}
        assert 0 in steps[2], "it is waited for at its deadline"


def test_a_refused_request_discards_its_group_alone(tmp_path: Path) -> None:
    async def behave(ordinal: int, attempt: int) -> None:
        if ordinal == 3:
            raise RequestRefused("too long")

    async def body(rollouter: Rollouter) -> Any:
        await train_all(rollouter)
        return await rollouter.counts()

    counts = drive(tmp_path, config_of(tmp_path), [FakeEngine(behave)], body, total=16)
    assert counts["discarded"] == {"refused": 1}
    assert counts["trained"] == 15


def test_when_every_group_fails_the_run_ends_and_says_why(tmp_path: Path) -> None:
    async def behave(ordinal: int, attempt: int) -> None:
        raise ValueError("always")

    with pytest.raises(RunFailed, match="generation: ValueError"):
        drive(tmp_path, config_of(tmp_path), [FakeEngine(behave)], train_all, total=400)


def test_drop_group_discards_it_naming_the_source(tmp_path: Path) -> None:
    async def body(rollouter: Rollouter) -> Any:
        with pytest.raises(RunFailed, match="reward failed: r"):
            await rollouter.batch(0)
        return await rollouter.counts()

    counts = drive(
        tmp_path, config_of(tmp_path), [FakeEngine(prompt_answer)], body, total=400,
        rewards=FakeRewards(verdict="drop_group"),
    )  # fmt: skip
    assert set(counts["discarded"]) == {"reward failed: r"}


def test_a_group_with_too_few_rewards_is_discarded_by_name(tmp_path: Path) -> None:
    async def body(rollouter: Rollouter) -> Any:
        with pytest.raises(RunFailed, match="min_scored: r timeout"):
            await rollouter.batch(0)

    drive(
        tmp_path, config_of(tmp_path), [FakeEngine(prompt_answer)], body, total=400,
        rewards=FakeRewards(verdict="drop_sample"),
    )  # fmt: skip


class Choir(FakeEngine):
    """Gives eight answers, named a to h by index, the last one first."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        for index in (7, 2, 5, 0, 3, 6, 1, 4):
            await asyncio.sleep(0)
            payload = Payload(
                np.array([index], np.int32), np.array([-1.0 - index], np.float32),
                np.zeros(1, np.int32),
            )  # fmt: skip
            text = "abcdefgh"[index]
            yield Completion(request.request_id, index, text, 1, 0, 0, "stop", payload)


class ByAnswer(FakeRewards):
    """The reward that belongs to an answer; a NaN is a failure, whose sample is dropped."""

    def __init__(self, rewards: dict[str, float]) -> None:
        super().__init__()
        self.rewards = rewards

    async def rate(self, item: ScoreItem, *, attempt: int = 0) -> dict[str, Reward]:
        await asyncio.sleep(0.01 * (ord(item.completion) % 3))
        return {"r": Reward.scored("r", self.rewards[item.completion])}


def test_g5_dropped_samples_leave_the_others_rewards_in_place(tmp_path: Path) -> None:
    """Eight samples that end in odd order, three dropped: up to what the trainer makes of them."""
    given = {"a": math.nan, "b": 1.0, "c": 2.0, "d": math.nan, "e": math.nan, "f": 5.0, "g": 6.0,
             "h": 9.0}  # fmt: skip

    async def body(rollouter: Rollouter) -> Any:
        return await rollouter.batch(0)

    config = config_of(tmp_path, rollout={"group_size": 8})
    rewards = ByAnswer(given)
    batch = drive(tmp_path, config, [Choir(prompt_answer)], body, total=4, rewards=rewards)
    kept = {text: value for text, value in given.items() if math.isfinite(value)}
    for group in batch.groups:
        assert [s.completion.text for s in group.samples] == list(given)
        assert {s.completion.text: s.total for s in group.samples if s.total is not None} == kept
        assert group.samples[0].rewards["r"].cause == "non_finite"
    payloads = [[s.completion.ref for s in group.samples] for group in batch.groups]
    samples = gather(batch, payloads, config.train)
    places = ["abcdefgh".index(text) for text in kept] * 4
    values = np.array(list(kept.values()))
    expected = (values - values.mean()) / (values.std(ddof=1) + config.train.advantage_eps)
    assert [int(t.completion[0]) for t in samples.trajectories] == places
    assert samples.behaviour.tolist() == [-1.0 - place for place in places]
    assert samples.advantages == pytest.approx(np.tile(expected, 4), abs=1e-6)
    assert samples.tokens == 20


def test_a_sample_is_scored_when_it_ends_not_when_its_group_does(tmp_path: Path) -> None:
    rewards = FakeRewards()
    gate = asyncio.Event()
    made: list[int] = []

    async def behave(ordinal: int, attempt: int) -> None:
        made.append(ordinal)
        if len(made) == 2:
            await gate.wait()

    async def body(rollouter: Rollouter) -> int:
        await asyncio.sleep(0.3)
        seen = rewards.seen
        gate.set()
        await train_all(rollouter)
        return seen

    config = config_of(tmp_path, groups_per_step=1, max_staleness=0)
    assert drive(tmp_path, config, [FakeEngine(behave)], body, total=2, rewards=rewards) == 1


def test_a_slow_judge_slows_admission_and_drops_nothing(tmp_path: Path) -> None:
    rewards = FakeRewards(delay=0.2)

    async def body(rollouter: Rollouter) -> Any:
        await asyncio.sleep(0.1)
        early = await rollouter.counts()
        await train_all(rollouter)
        return early, await rollouter.counts()

    early, late = drive(
        tmp_path, config_of(tmp_path, straggler_patience_seconds=0.05),
        [FakeEngine(prompt_answer)], body, total=24, rewards=rewards,
    )  # fmt: skip
    assert early["admitted"] == 12, "max_live groups and no more"
    assert late["trained"] == 24
    assert late["discarded"] == {}


def test_asking_twice_for_a_batch_gives_it_twice(tmp_path: Path) -> None:
    async def body(rollouter: Rollouter) -> Any:
        return await rollouter.batch(0), await rollouter.batch(0)

    first, second = drive(tmp_path, config_of(tmp_path), [FakeEngine(prompt_answer)], body, total=8)
    assert first is second
    assert len(first.groups) == 4


def test_an_engine_that_misses_its_deadline_is_replaced_and_joins_at_the_current_version(
    tmp_path: Path,
) -> None:
    slow, quick, fresh = (FakeEngine(prompt_answer) for _ in range(3))
    slow.load_seconds = 60.0
    replaced: list[int] = []

    async def replace(index: int) -> Engine:
        replaced.append(index)
        return fresh

    async def body(rollouter: Rollouter) -> Any:
        steps = await train_all(rollouter)
        await asyncio.sleep(0.05)
        return steps, rollouter.sync.floor, [r.routable for r in rollouter.replicas]

    steps, floor, routable = drive(
        tmp_path, config_of(tmp_path), [slow, quick], body, total=16, replace=replace
    )
    assert sorted(o for step in steps for o in step) == list(range(16))
    assert replaced == [0]
    assert floor == 4
    assert routable == [True, True]
    assert fresh.loaded[-1] == PolicyVersion(0, 4)


def test_a_wait_without_end_says_whom_it_waits_for(tmp_path: Path) -> None:
    async def behave(ordinal: int, attempt: int) -> None:
        await asyncio.sleep(60)

    async def body(rollouter: Rollouter) -> None:
        with pytest.raises(RunFailed, match=r"waits for group 0 \(admitted\)"):
            await rollouter.batch(0)

    config = config_of(tmp_path, batch_deadline_seconds=0.3)
    drive(tmp_path, config, [FakeEngine(behave)], body, total=16)


def test_time_in_which_a_source_is_down_is_not_the_batchs(tmp_path: Path) -> None:
    """Also where it went down in the last wait that the deadline leaves."""

    class Down(FakeRewards):
        @property
        def stalled_seconds(self) -> float:  # type: ignore[override]
            return min(5.0, max(0.0, asyncio.get_running_loop().time() - down_at))

    down_at = math.inf

    async def behave(ordinal: int, attempt: int) -> None:
        await asyncio.sleep(0.45)

    async def body(rollouter: Rollouter) -> int:
        nonlocal down_at
        down_at = asyncio.get_running_loop().time() + 0.1
        return len((await rollouter.batch(0)).groups)

    config = config_of(tmp_path, batch_deadline_seconds=0.6)
    source = config.reward["r"].model_copy(update={"patience_seconds": 5.0})
    config = config.model_copy(update={"reward": {"r": source}})
    engines = [FakeEngine(behave)]
    assert drive(tmp_path, config, engines, body, total=16, rewards=Down()) == 4


def test_a_restored_rollouter_waits_for_an_engine_that_holds_what_was_published(
    tmp_path: Path,
) -> None:
    """The only engine misses its first load: groups that begin again wait for its successor, whose
    floor their deadlines need, and none is lost as too late."""
    config = config_of(tmp_path)

    async def first(rollouter: Rollouter) -> None:
        for step in range(5):
            batch = await rollouter.batch(step)
            await rollouter.trained(step, {g.prompt.ordinal: "signal" for g in batch.groups})
            await rollouter.published(manifest(step + 1))

    async def until_20(ordinal: int, attempt: int) -> None:
        await asyncio.sleep(0 if ordinal < 20 else 60)

    drive(tmp_path, config, [FakeEngine(until_20)], first, total=28)
    hung, fresh = FakeEngine(prompt_answer), FakeEngine(prompt_answer)
    hung.load_seconds = 60

    async def replace(index: int) -> Engine:
        await asyncio.sleep(0.2)
        return fresh

    async def rest(rollouter: Rollouter) -> Any:
        await rollouter.published(manifest(5))
        assert not rollouter.lives.open.is_set(), "nobody has it yet"
        for step in (5, 6):
            batch = await rollouter.batch(step)
            assert len(batch.groups) == 4
            await rollouter.trained(step, {g.prompt.ordinal: "signal" for g in batch.groups})
        return await rollouter.counts()

    counts = drive(tmp_path, config, [hung], rest, total=28, replace=replace, version=5)
    assert (counts["trained"], counts["discarded"]) == (28, {})
