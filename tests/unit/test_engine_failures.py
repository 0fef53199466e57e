"""Engines that die, hang or are replaced while they generate: whoever is out is not asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.test_rollouter import (
    FakeEngine,
    FakeRewards,
    config_of,
    drive,
    manifest,
    prompt_answer,
    train_all,
)

from offbeat.errors import DeadlinePassed, RunFailed
from offbeat.records import (
    Completion,
    EngineHealth,
    GenerateRequest,
    Manifest,
    Payload,
    PolicyVersion,
    Progress,
)
from offbeat.rollout import validation
from offbeat.rollout.engine import Engine
from offbeat.rollout.rollouter import Rollouter


class Mortal(FakeEngine):
    """Dies at its `lives`-th request; then every call raises."""

    def __init__(self, lives: int) -> None:
        super().__init__(prompt_answer)
        self.lives = lives
        self.asked = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        self.asked += 1
        self.lives -= 1
        self.alive()
        async for completion in super().generate(request):
            yield completion

    async def health(self) -> EngineHealth:
        self.alive()
        return await super().health()

    async def load(self, manifest: Manifest) -> PolicyVersion:
        self.alive()
        return await super().load(manifest)

    def alive(self) -> None:
        if self.lives < 0:
            raise ConnectionError("the actor died")


async def counted(rollouter: Rollouter) -> Any:
    return await train_all(rollouter), await rollouter.counts()


def test_an_engine_that_dies_while_it_generates_leaves_routing_and_is_replaced(
    tmp_path: Path,
) -> None:
    dead = Mortal(3)
    other = FakeEngine(prompt_answer)
    replaced: list[int] = []

    async def replace(index: int) -> Engine:
        replaced.append(index)
        await asyncio.sleep(0.3)
        return FakeEngine(prompt_answer)

    steps, counts = drive(
        tmp_path, config_of(tmp_path), [dead, other], counted, total=120, replace=replace
    )
    assert counts["discarded"] == {}
    assert sorted(o for step in steps for o in step) == list(range(120))
    assert replaced == [0]
    assert dead.asked < 20, "a dead engine is not asked again and again"


def made(versions: list[int]) -> Payload:
    """The token arrays of a sample whose tokens these versions made."""
    count = len(versions)
    return Payload(
        np.arange(count, dtype=np.int32),
        np.full(count, -0.5, np.float32),
        np.array(versions, np.int32),
    )


class Teller(FakeEngine):
    """Makes four tokens of each sample, telling of each; with `mortal`, dies as soon as it has told
    of three groups that run."""

    def __init__(self, *, mortal: bool = False) -> None:
        super().__init__(prompt_answer)
        self.mortal = mortal
        self.dead = False
        self.told: set[str] = set()
        self.resumed: set[str] = set()

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Completion | Progress, None]:
        begun, name = dict(request.resume), request.request_id
        self.resumed |= {name} if begun else set()
        for index in sorted(set(range(request.n)) - request.done):
            tokens = list(begun.get(index, []))
            while True:
                await asyncio.sleep(0.002)
                self.alive()
                tokens.append(self.version.step)
                if len(tokens) == 4:
                    break
                self.told.add(name)
                self.dead = self.mortal and len(self.told) >= 3
                yield Progress(name, index, len(tokens), tuple(tokens))
            self.told.discard(name)
            yield Completion(name, index, "x", 4, min(tokens), max(tokens), "stop", made(tokens))

    async def health(self) -> EngineHealth:
        self.alive()
        return await super().health()

    def alive(self) -> None:
        if self.dead:
            raise ConnectionError("the actor died")


def test_groups_go_on_from_their_tokens_in_the_same_attempt_and_are_scored_once(
    tmp_path: Path,
) -> None:
    """Engine 0 dies in the middle of groups, again and again; its replacements do, too."""
    others = [Teller(mortal=True), Teller()]
    rewards = FakeRewards()

    async def replace(index: int) -> Engine:
        others.append(Teller(mortal=len(others) < 4))
        return others[-1]

    async def body(rollouter: Rollouter) -> Any:
        groups, samples = [], []
        for step in range(10):
            batch = await rollouter.batch(step)
            for group in batch.groups:
                groups.append((group.prompt.ordinal, group.attempt))
                samples += [sample.completion for sample in group.samples]
            ordinals = [group.prompt.ordinal for group in batch.groups]
            await rollouter.trained(step, {o: "signal" for o in ordinals})
            await rollouter.published(manifest(step + 1))
        return groups, samples, await rollouter.counts()

    config = config_of(tmp_path, rollout={"max_attempts": 4})
    groups, samples, counts = drive(
        tmp_path, config, others[:2], body, total=40, replace=replace, rewards=rewards
    )
    assert counts["trained"] == 40
    assert counts["discarded"] == {}
    names = {name for engine in others for name in engine.resumed}
    assert len(names) >= 3, "hardly anything was carried on: it shows nothing"
    assert names <= {f"{ordinal}.{attempt}" for ordinal, attempt in groups}
    assert len(samples) == rewards.seen == 80, "no sample that had ended was made or scored again"
    assert all(len(sample.ref.versions) == 4 for sample in samples)


def test_the_only_engine_dies_and_groups_wait_for_its_replacement(tmp_path: Path) -> None:
    async def replace(index: int) -> Engine:
        await asyncio.sleep(0.3)
        return FakeEngine(prompt_answer)

    _, counts = drive(
        tmp_path, config_of(tmp_path), [Mortal(5)], counted, total=40, replace=replace
    )
    assert counts["discarded"] == {}
    assert counts["trained"] == 40


def test_a_failure_of_one_request_leaves_a_healthy_engine_in_routing(tmp_path: Path) -> None:
    async def behave(ordinal: int, attempt: int) -> None:
        if attempt == 0:
            raise ValueError("once")

    _, counts = drive(tmp_path, config_of(tmp_path), [FakeEngine(behave)], counted, total=16)
    assert counts["trained"] == 16


def test_a_replacement_that_fails_is_tried_again(tmp_path: Path) -> None:
    tries: list[int] = []

    async def replace(index: int) -> Engine:
        tries.append(index)
        if len(tries) < 3:
            raise ConnectionError("no room yet")
        return FakeEngine(prompt_answer)

    _, counts = drive(
        tmp_path, config_of(tmp_path), [Mortal(5)], counted, total=24, replace=replace
    )
    assert counts["trained"] == 24
    assert len(tries) == 3


def test_an_engine_that_never_comes_back_ends_the_run_and_is_named(tmp_path: Path) -> None:
    async def replace(index: int) -> Engine:
        raise ConnectionError("no room")

    with pytest.raises(RunFailed, match=r"engine 0 failed 4 times.*no room"):
        drive(tmp_path, config_of(tmp_path), [Mortal(5)], train_all, total=24, replace=replace)


def test_a_straggler_that_is_discarded_stops_generating(tmp_path: Path) -> None:
    stopped: list[int] = []
    rewards = FakeRewards()

    async def behave(ordinal: int, attempt: int) -> None:
        if ordinal == 0:
            try:
                await asyncio.sleep(15)
            except asyncio.CancelledError:
                stopped.append(ordinal)
                raise

    async def body(rollouter: Rollouter) -> Any:
        await train_all(rollouter)
        await asyncio.sleep(0)
        return list(stopped), [r.outstanding for r in rollouter.replicas]

    config = config_of(tmp_path, straggler_patience_seconds=0.2)
    seen, outstanding = drive(
        tmp_path, config, [FakeEngine(behave)], body, total=40, rewards=rewards
    )
    assert seen == [0]
    assert outstanding == [0]
    assert rewards.seen == 2 * 39, "nothing of a discarded group is scored"


class HungDrain(FakeEngine):
    async def drain_spans(self) -> list[Any]:
        await asyncio.sleep(60)
        return []


class DeadScorers(FakeRewards):
    async def drain_spans(self) -> list[Any]:
        raise ConnectionError("the scorer's actor died")


def test_telemetry_of_dead_and_hung_replicas_never_stops_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.rollout.parts.DRAIN_SECONDS", 0.2)

    async def body(rollouter: Rollouter) -> Any:
        await rollouter.batch(0)
        return await rollouter.drain()

    spans, _, tally = drive(
        tmp_path, config_of(tmp_path), [HungDrain(prompt_answer)], body, total=16,
        rewards=DeadScorers(),
    )  # fmt: skip
    assert spans == []
    assert tally.generated_tokens > 0


def test_news_of_a_replaced_engine_does_not_take_out_its_replacement(tmp_path: Path) -> None:
    async def replace(index: int) -> Engine:
        return FakeEngine(prompt_answer)

    async def body(rollouter: Rollouter) -> Any:
        replica = rollouter.replicas[0]
        old = replica.engine
        rollouter.sync.take_out(replica, old, "first")
        rollouter.sync.take_out(replica, old, "again")
        await asyncio.sleep(0.2)
        await rollouter.sync.check(replica, old, ConnectionError("late news"))
        return replica.routable, replica.restarts

    config = config_of(tmp_path)
    assert drive(tmp_path, config, [Mortal(0)], body, total=400, replace=replace) == (True, 1)


def test_a_validation_outlives_an_engine(tmp_path: Path) -> None:
    class Validator(Mortal):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
            if request.request_id.startswith("validation"):
                self.lives = -1
            self.alive()
            yield Completion(request.request_id, 0, "x", 1, 0, 0, "stop", None)

    class Answering(FakeEngine):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
            yield Completion(request.request_id, 0, "x", 1, 0, 0, "stop", None)

    async def replace(index: int) -> Engine:
        return Answering(prompt_answer)

    async def body(rollouter: Rollouter) -> Any:
        held_out = [rollouter.prompts.prompt(i) for i in range(6)]
        rollouter._validator = validation.Validator(config, held_out)
        return await rollouter.validate()

    config = config_of(tmp_path, min_scored=1)
    version, metrics = drive(tmp_path, config, [Validator(9)], body, total=4, replace=replace)
    assert version == 0
    assert (metrics["n"], metrics["mean_tokens"]) == (6, 1.0)


def test_a_hung_validation_is_named_and_holds_up_no_publication(tmp_path: Path) -> None:
    class Slow(FakeEngine):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
            if request.request_id.startswith("validation"):
                await asyncio.sleep(60)
            async for completion in super().generate(request):
                yield completion

    async def body(rollouter: Rollouter) -> Any:
        rollouter._validator = validation.Validator(config, [rollouter.prompts.prompt(0)])
        with pytest.raises(DeadlinePassed, match=r"0 of 1 prompts answered at validate.deadline"):
            await rollouter.validate()
        await rollouter.batch(0)
        return await rollouter.published(manifest(1))

    config = config_of(tmp_path)
    limit = config.validation.model_copy(update={"deadline_seconds": 0.3})
    config = config.model_copy(update={"validation": limit})
    assert drive(tmp_path, config, [Slow(prompt_answer)], body, total=16) == 1
