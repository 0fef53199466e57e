"""Validation's promises: one version, the file's order, bounded scoring, and nothing held up."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.config import Config
from offbeat.errors import DeadlinePassed, OffbeatError, RequestRefused, UserError
from offbeat.records import (
    Completion,
    EngineHealth,
    GenerateRequest,
    Manifest,
    PolicyVersion,
    Prompt,
    Reward,
    ScoreItem,
    Span,
)
from offbeat.reward.function import WorkerFailed, WorkerProcess
from offbeat.reward.loop import Scored
from offbeat.rollout import checker as checker_module
from offbeat.rollout.checker import Checker
from offbeat.rollout.dedicated import DedicatedEngines
from offbeat.rollout.generation import Generation
from offbeat.rollout.router import Router
from offbeat.rollout.validation import Validator
from offbeat.weights.sync import Replica, WeightSync

ZERO = PolicyVersion(0, 0)
FUNCTIONS = '''
import os, re, time

def right(prompts, completions, reference, **columns):
    return [float(c == r) for c, r in zip(completions, reference)]

def odd(prompts, completions, **columns):
    """Does with each completion what it says."""
    for c in completions:
        if c == "raise":
            raise ValueError("boom")
        if c == "exit":
            os._exit(3)
        if c == "hang":
            time.sleep(3600)
    return [{"none": None, "nan": float("nan")}.get(c, 1.0) for c in completions]

def slow(prompts, completions, **columns):
    """Takes a tenth of a second for each completion, and for ever for some."""
    for c in completions:
        time.sleep(3600 if c == "hang" else 0.1)
    return [1.0] * len(completions)

def hopeless(prompts, completions):
    raise ValueError("boom")

def greedy_regex(prompts, completions):
    """Holds its interpreter for a second or two."""
    re.match("(a+)+$", "a" * 25 + "b")
    return [1.0] * len(completions)
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "f.py").write_text(FUNCTIONS)
    return folder


def config_of(**validate: Any) -> Config:
    concurrency = validate.pop("concurrency", 64)
    rollout = {"group_size": 2, "max_tokens": 4, "max_attempts": 2, "seats": 8}
    return Config.model_validate(
        {
            "run": "r",
            "model": {"path": "m"},
            "data": {"train": "d", "validation": "v"},
            "rollout": rollout,
            "validate": validate,
            "weights": {"deadline_seconds": 1.0},
            "reward": {"r": {"kind": "function", "function": "f.py:f", "concurrency": concurrency}},
        }
    )


def prompts(n: int) -> list[Prompt]:
    return [
        Prompt(i, np.arange(3, dtype=np.int32), f"p{i}", f"p{i}", reference=f"a{i}.0")
        for i in range(n)
    ]


Behave = Callable[[int], Awaitable[None]]


class Engine:
    """Answers `a<place>.<index>`; `behave(place)` may sleep or raise."""

    def __init__(self, behave: Behave | None = None, version: PolicyVersion = ZERO) -> None:
        self.behave = behave
        self.version = version
        self.dead = False
        self.loads: list[int] = []
        self.asked: list[int] = []

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        place = int(request.request_id.partition("/")[2])
        self.asked.append(place)
        for index in reversed(range(request.n)):
            await asyncio.sleep(0)
            if self.behave is not None:
                await self.behave(place)
            if self.dead:
                raise ConnectionError("the engine died")
            made = self.version.step
            yield Completion(
                request.request_id, index, f"a{place}.{index}", 2 + place, made, made, "stop", None
            )

    async def load(self, manifest: Manifest) -> PolicyVersion:
        if self.dead:
            raise ConnectionError("the engine died")
        await asyncio.sleep(0.01)
        self.version = manifest.version
        self.loads.append(manifest.version.step)
        return manifest.version

    async def health(self) -> EngineHealth:
        if self.dead:
            raise ConnectionError("the engine died")
        return EngineHealth(self.version, 0, 0, 8)

    async def drain_spans(self) -> list[Span]:
        return []

    async def stop(self) -> None: ...


class Rewards:
    """Scores a group after `delay` seconds; remembers who came, and how many at once."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.now = self.most = 0
        self.seen: list[tuple[str, int, list[str]]] = []

    async def score_group(
        self, items: Sequence[ScoreItem], *, scope: str, attempt: int
    ) -> list[Scored]:
        self.seen.append((scope, attempt, [item.completion for item in items]))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.delay)
        finally:
            self.now -= 1
        return [Scored({"r": Reward.scored("r", 0.5)}, 0.5, "keep") for _ in items]


class World:
    """Rollout's engines with their weight sync, as a validator meets them."""

    def __init__(self, engines: list[Engine], tasks: asyncio.TaskGroup, config: Config) -> None:
        async def never(index: int) -> Any:
            raise AssertionError("no rollout engine is to be replaced")

        changed = asyncio.Condition()
        self.replicas: list[Replica[Any]] = [Replica(i, e, ZERO) for i, e in enumerate(engines)]
        self.sync: WeightSync[Any] = WeightSync(
            self.replicas,
            deadline_seconds=1.0,
            start_deadline_seconds=1.0,
            replace=never,
            on_change=self.nothing,
            tasks=tasks,
        )
        router = Router(self.replicas, changed, 8)
        self.generation = Generation(router, lambda: self.sync, config.rollout)

    async def nothing(self) -> None: ...


def manifest(step: int) -> Manifest:
    return Manifest(PolicyVersion(0, step), "full", "", {})


Body = Callable[[World], Awaitable[Any]]


def drive(config: Config, engines: list[Engine], body: Body) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            return await body(World(engines, tasks, config))

    return asyncio.run(main())


def rewards_of(rewards: Rewards) -> Any:
    return rewards


def test_results_are_in_the_files_order_whoever_answers_first(functions: Path) -> None:
    config = config_of(samples=3, temperature=1.0)

    async def slow_first(place: int) -> None:
        await asyncio.sleep(0.05 if place == 0 else 0)

    async def body(world: World) -> Any:
        checker = Checker("f.py:right", functions)
        await checker.start()
        rewards = Rewards()
        validator = Validator(config, prompts(5), checker=checker, rewards=rewards_of(rewards))
        try:
            await world.sync.publish(manifest(7))
            return rewards, await validator.validate(world.sync, world.generation)
        finally:
            await checker.stop()

    engines = [Engine(slow_first), Engine()]
    rewards, (version, metrics) = drive(config, engines, body)
    assert version == 7
    assert metrics["accuracy"] == pytest.approx(1 / 3), "each completion met its own reference"
    assert metrics["pass@1"] == pytest.approx(1 / 3)
    assert metrics["pass@3"] == 1.0
    assert metrics["mean_tokens"] == 4.0
    assert (metrics["n"], metrics["unscored"], metrics["failed/r"]) == (5, 0, 0)
    assert {(scope, attempt) for scope, attempt, _ in rewards.seen} == {("validation", 7)}
    groups = sorted(texts for _, _, texts in rewards.seen)
    assert groups == [[f"a{i}.{j}" for j in range(3)] for i in range(5)]
    asked = sorted(place for engine in engines for place in engine.asked)
    assert asked == [0, 1, 2, 3, 4]
    json.dumps(metrics)


def test_a_refused_prompt_is_unscored_and_no_failure(functions: Path) -> None:
    config = config_of()

    async def refuse(place: int) -> None:
        if place == 1:
            raise RequestRefused("too long")

    async def body(world: World) -> Any:
        checker = Checker("f.py:right", functions)
        validator = Validator(config, prompts(3), checker=checker, rewards=rewards_of(Rewards()))
        try:
            return await validator.validate(world.sync, world.generation)
        finally:
            await checker.stop()

    version, metrics = drive(config, [Engine(refuse)], body)
    assert version == 0
    assert (metrics["accuracy"], metrics["n"], metrics["unscored"]) == (1.0, 3, 1)


def test_scoring_takes_a_fourth_of_the_narrowest_source_and_holds_no_publication_up() -> None:
    config = config_of(concurrency=16, samples=2, temperature=1.0)
    rewards = Rewards(delay=0.1)

    async def body(world: World) -> float:
        validator = Validator(config, prompts(12), rewards=rewards_of(rewards))
        task = asyncio.create_task(validator.validate(world.sync, world.generation))
        await asyncio.sleep(0)
        assert world.sync.lock.locked(), "pinned while answers are made"
        began = time.monotonic()
        await world.sync.publish(manifest(1))
        published = time.monotonic() - began
        assert not task.done()
        version, _ = await task
        assert version == 0, "of the version that was there when it began"
        return published

    engine = Engine()
    published = drive(config, [engine], body)
    assert rewards.most == 2  # 16 / 4 samples, 2 of one prompt
    assert len(rewards.seen) == 12
    assert published < 0.5, "12 prompts of 0.1 s, two at once, take longer"
    assert engine.loads == [1]


def test_scores_that_are_late_are_counted_as_failed_and_answers_that_are_late_end_it() -> None:
    config = config_of(deadline_seconds=0.5)

    async def late_scores(world: World) -> Any:
        validator = Validator(config, prompts(3), rewards=rewards_of(Rewards(delay=30)))
        return await validator.validate(world.sync, world.generation)

    _, metrics = drive(config, [Engine()], late_scores)
    assert metrics["failed/r"] == 3
    assert math.isnan(metrics["reward/r"])
    assert math.isnan(metrics["reward"])

    async def hang(place: int) -> None:
        await asyncio.sleep(30 if place == 2 else 0)

    async def late_answers(world: World) -> Any:
        validator = Validator(config, prompts(3))
        with pytest.raises(DeadlinePassed, match=r"2 of 3 prompts .* validate\.deadline_seconds"):
            await validator.validate(world.sync, world.generation)
        assert not world.sync.lock.locked()

    drive(config, [Engine(hang)], late_answers)


def test_answers_of_two_versions_are_an_error() -> None:
    config = config_of()

    async def body(world: World) -> Any:
        with pytest.raises(OffbeatError, match=r"versions \[0, 5\]"):
            await Validator(config, prompts(8)).validate(world.sync, world.generation)

    drive(config, [Engine(), Engine(version=PolicyVersion(0, 5))], body)


def test_answers_made_elsewhere_are_assessed_alike(functions: Path) -> None:
    config = config_of(samples=2, temperature=1.0)
    rewards = Rewards()

    async def main() -> dict[str, float]:
        checker = Checker("f.py:right", functions)
        validator = Validator(config, prompts(3), checker=checker, rewards=rewards_of(rewards))
        requests = validator.requests()
        assert [request.n for request in requests] == [2, 2, 2]
        assert {request.sampling.temperature for request in requests} == {1.0}
        answers = [
            Completion(request.request_id, i, f"a{place}.{i}", 1, 9, 9, "stop", None)
            for place, request in reversed(list(enumerate(requests)))
            for i in (1, 0)
            if place != 1
        ]
        try:
            return await validator.assess(answers)
        finally:
            await checker.stop()

    metrics = asyncio.run(main())
    assert (metrics["accuracy"], metrics["pass@2"], metrics["unscored"]) == (0.5, 1.0, 2)
    assert [attempt for _, attempt, _ in rewards.seen] == [9, 9]


# -- the checker -----------------------------------------------------------------------------------


def check(functions: Path, name: str, texts: list[str]) -> list[float | None]:
    async def main() -> list[float | None]:
        checker = Checker(f"f.py:{name}", functions)
        try:
            await checker.start()
            return await checker.check(
                [
                    (prompt, Completion("v/0", 0, text, 1, 0, 0, "stop", None))
                    for prompt, text in zip(prompts(len(texts)), texts, strict=True)
                ]
            )
        finally:
            await checker.stop()

    return asyncio.run(main())


def test_what_breaks_the_checker_is_unscored_and_its_neighbours_are_not(
    functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "CALL_SECONDS", 3.0)
    assert check(functions, "odd", ["x", "raise", "y", "none", "nan"]) == [1, None, 1, None, None]
    assert check(functions, "odd", ["x", "exit", "y"]) == [1, None, 1]
    assert check(functions, "odd", ["hang", "x", "raise"]) == [None, 1, None]


def test_a_checker_that_hangs_takes_bounded_time_and_no_neighbour_along(
    functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    async def call(self: WorkerProcess, items: Sequence[ScoreItem], deadline: float) -> Any:
        sizes.append(len(items))
        if any(item.completion == "hang" for item in items):
            raise WorkerFailed("timeout", "too late")
        return {"outcomes": [{"value": 1.0} for _ in items]}

    monkeypatch.setattr(checker_module.WorkerProcess, "call", call)
    texts = ["x", *["hang"] * 4, "y", "z"]
    for _ in range(len(texts)):
        texts = [*texts[1:], texts[0]]
        assert check(functions, "odd", texts) == [None if t == "hang" else 1 for t in texts]
    texts = [*["hang"] * 16, *["x"] * 48]
    assert check(functions, "odd", texts) == [None] * 16 + [1] * 48
    sizes.clear()
    with pytest.raises(UserError, match=r"failed on all 64 .* too late"):
        check(functions, "odd", ["hang"] * 64)
    assert sizes == [64, 1, 1, 1, 61, 1, 1, 1]


def answers_of(texts: list[str]) -> list[tuple[Prompt, Completion]]:
    return [
        (prompt, Completion(f"validation/{i}", 0, text, 1, 0, 0, "stop", None))
        for i, (prompt, text) in enumerate(zip(prompts(len(texts)), texts, strict=True))
    ]


@pytest.mark.parametrize("text", ["x", "hang"])
def test_a_checker_that_is_late_leaves_answers_unscored_and_the_validation_in_time(
    functions: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(deadline_seconds=2.0)

    async def main() -> tuple[dict[str, float], float]:
        checker = Checker("f.py:slow", functions)
        await checker.start()
        validator = Validator(config, prompts(60), checker=checker, rewards=rewards_of(Rewards()))
        before = asyncio.all_tasks()
        try:
            began = time.monotonic()
            found = await validator.assess([c for _, c in answers_of([text] * 60)])
            took = time.monotonic() - began
            assert asyncio.all_tasks() == before, "nothing goes on behind it"
            assert checker._worker.pid is None, "what it was in is ended"
            assert await checker.check(answers_of(["x", "y"])) == [1, 1], "it serves the next one"
            return found, took
        finally:
            await checker.stop()

    metrics, took = asyncio.run(main())
    assert 2 <= took < 20
    assert (metrics["unscored"], metrics["n"], metrics["failed/r"]) == (60, 60, 0)
    assert "60 of 60 completions were not checked" in caplog.text


def test_answers_that_are_slow_together_are_checked_alone_until_the_time_is_over(
    functions: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checker_module, "CALL_SECONDS", 1.0)

    async def main() -> tuple[list[float | None], int, list[float | None]]:
        checker = Checker("f.py:slow", functions)
        await checker.start()
        until = asyncio.get_running_loop().time() + 6.0
        try:
            cut = await checker.check(answers_of(["x"] * 64), until)
            limit = checker._limit
            return cut, limit, await checker.check(answers_of(["x"] * 8))
        finally:
            await checker.stop()

    cut, limit, whole = asyncio.run(main())
    assert 0 < cut.count(1.0) < 64, "what has its score keeps it"
    assert limit < 64, "later calls have fewer"
    assert whole == [1.0] * 8
    assert f"{cut.count(None)} of 64 completions were not checked" in caplog.text


def test_a_checker_that_is_slow_to_start_is_late_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("import time\ntime.sleep(3600)\ndef right(p, c): return [1]\n")

    async def main() -> tuple[list[float | None], float]:
        checker = Checker("f.py:right", tmp_path)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await checker.check(answers_of(["x"]), began + 1.0), loop.time() - began
        finally:
            await checker.stop()

    scores, took = asyncio.run(main())
    assert scores == [None]
    assert took < 20


def test_a_checker_that_fails_on_everything_or_is_none_is_the_users_to_mend(
    functions: Path,
) -> None:
    with pytest.raises(UserError, match=r"validate\.function failed on all 2 .* boom"):
        check(functions, "hopeless", ["x", "y"])
    with pytest.raises(UserError, match=r"validate\.function: .* has no function wright"):
        check(functions, "wright", ["x"])


def test_a_checker_that_holds_its_interpreter_holds_nobody_else_up(functions: Path) -> None:
    async def main() -> tuple[float, float]:
        checker = Checker("f.py:greedy_regex", functions)
        await checker.start()
        lag = 0.0
        answer = Completion("v/0", 0, "x", 1, 0, 0, "stop", None)
        began = time.monotonic()
        task = asyncio.create_task(checker.check([(prompts(1)[0], answer)]))
        while not task.done():
            before = time.monotonic()
            await asyncio.sleep(0.005)
            lag = max(lag, time.monotonic() - before)
        await checker.stop()
        return lag, time.monotonic() - began

    began = time.process_time()
    assert re.match("(a+)+$", "a" * 25 + "b") is None
    alone = time.process_time() - began
    lag, took = asyncio.run(main())
    assert took >= alone / 2
    assert lag < max(0.25, alone / 2), "in this process it would be as long as the match"


# -- engines of their own --------------------------------------------------------------------------


def dedicated(
    config: Config, engines: list[Engine], replace: Callable[[int], Awaitable[Any]] | None = None
) -> DedicatedEngines:
    async def never(index: int) -> Any:
        raise AssertionError("no engine is to be replaced")

    return DedicatedEngines(config, engines, ZERO, replace or never)


def own(**more: Any) -> Config:
    return config_of(on="dedicated", replicas=2, **more)


def test_engines_of_its_own_load_the_newest_version_and_rollout_never_sees_them() -> None:
    config = own()
    mine, rollouts = [Engine(), Engine()], [Engine()]

    async def body(world: World) -> Any:
        validator = Validator(config, prompts(9), dedicated=dedicated(config, mine))
        first, _ = await validator.validate(world.sync, world.generation)
        for step in (1, 2, 3):
            await world.sync.publish(manifest(step))
        third, _ = await validator.validate(world.sync, world.generation)
        return first, third

    assert drive(config, rollouts, body) == (0, 3)
    assert [engine.loads for engine in mine] == [[3], [3]]
    assert sorted(mine[0].asked + mine[1].asked) == sorted([*range(9), *range(9)])
    assert rollouts[0].asked == []
    assert rollouts[0].loads == [1, 2, 3]


def test_publications_go_on_while_engines_of_its_own_answer() -> None:
    config = own()
    asked, going = asyncio.Event(), asyncio.Event()

    async def wait(place: int) -> None:
        asked.set()
        if place == 4:
            await going.wait()

    async def body(world: World) -> Any:
        mine = [Engine(wait), Engine(wait)]
        validator = Validator(config, prompts(5), dedicated=dedicated(config, mine))
        await world.sync.publish(manifest(1))
        task = asyncio.create_task(validator.validate(world.sync, world.generation))
        await asked.wait()
        for step in range(2, 12):  # more than any transport keeps
            await world.sync.publish(manifest(step))
        assert not task.done()
        going.set()
        return await task

    version, metrics = drive(config, [Engine()], body)
    assert version == 1
    assert metrics["n"] == 5


@pytest.mark.parametrize(("engines", "newer", "by"), [(1, False, 1), (1, True, 2), (2, True, 1)])
def test_an_engine_that_dies_is_replaced_and_versions_are_never_mixed(
    engines: int, newer: bool, by: int
) -> None:
    """With a newer version out meanwhile, all is answered again by that, unless an engine is left
    that has the pinned one."""
    config = own()
    fresh: list[Engine] = []
    rewards = Rewards()

    async def body(world: World) -> Any:
        mine: list[Engine] = []

        async def die(place: int) -> None:
            if place == 5 and not any(engine.dead for engine in mine):
                if newer:
                    await world.sync.publish(manifest(2))
                next(engine for engine in mine if 5 in engine.asked).dead = True

        async def replace(index: int) -> Engine:
            fresh.append(Engine())
            return fresh[-1]

        mine += [Engine(die) for _ in range(engines)]
        validator = Validator(
            config, prompts(8), rewards=rewards_of(rewards),
            dedicated=dedicated(config, mine, replace),
        )  # fmt: skip
        await world.sync.publish(manifest(1))
        return await validator.validate(world.sync, world.generation)

    version, metrics = drive(config, [Engine()], body)
    assert version == by
    assert (metrics["n"], metrics["failed/r"], metrics["reward/r"]) == (8, 0, 0.5)
    if engines == 1:
        assert fresh[0].loads[-1:] == [by]
    counted = [texts for _, attempt, texts in rewards.seen if attempt == version]
    assert sorted(counted) == [[f"a{i}.0"] for i in range(8)]


def test_one_that_died_between_two_validations_is_replaced_before_the_next() -> None:
    config = own()
    mine = [Engine(), Engine()]

    async def replace(index: int) -> Engine:
        mine[index] = Engine()
        return mine[index]

    async def body(world: World) -> Any:
        validator = Validator(config, prompts(40), dedicated=dedicated(config, mine, replace))
        await world.sync.publish(manifest(1))
        await validator.validate(world.sync, world.generation)
        mine[0].dead = mine[1].dead = True
        await world.sync.publish(manifest(2))
        return await validator.validate(world.sync, world.generation)

    version, metrics = drive(config, [Engine()], body)
    assert version == 2
    assert metrics["n"] == 40
    assert not mine[0].dead
    assert not mine[1].dead


def test_one_that_cannot_be_replaced_ends_the_validation_with_its_name() -> None:
    config = config_of(on="dedicated")
    corpse = Engine()
    corpse.dead = True

    async def replace(index: int) -> Engine:
        raise ConnectionError("no room on the device")

    async def body(world: World) -> Any:
        validator = Validator(config, prompts(2), dedicated=dedicated(config, [corpse], replace))
        await world.sync.publish(manifest(1))
        with pytest.raises(OffbeatError, match=r"validation engine 0 failed 4 times.*no room"):
            await validator.validate(world.sync, world.generation)

    drive(config, [Engine()], body)
