"""A replica of a reward model that dies: the others answer, and its telemetry stops nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from tests.unit import test_disrm, test_genrm

from offbeat.records import Completion, GenerateRequest, Reward, Span
from offbeat.reward.disrm import DisRM
from offbeat.reward.genrm import GenRM
from offbeat.reward.judge_engines import EngineBackend
from offbeat.reward.replicas import SUSPECT_LIMIT_SECONDS, Life


class DeadEngine(test_genrm.FakeEngine):
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        raise ConnectionError("the actor died")
        yield

    async def drain_spans(self) -> list[Span]:
        raise ConnectionError("the actor died")


class DeadScorer(test_disrm.FakeScorer):
    async def drain_spans(self) -> list[Span]:
        raise ConnectionError("the actor died")


def test_a_dead_judge_replica_is_avoided_and_takes_no_spans_along() -> None:
    async def main() -> tuple[list[Reward], list[Span]]:
        config = test_genrm.section(temperature=1.0)
        backend = EngineBackend(
            [DeadEngine(), test_genrm.FakeEngine()], test_genrm.Letters(), config
        )
        source = GenRM("judge", config, backend)
        first = await source.score([test_genrm.item()])
        later = [await source.score([test_genrm.item()]) for _ in range(5)]
        return [*first, *(r for part in later for r in part)], await source.drain_spans()

    rewards, spans = asyncio.run(main())
    assert [r.status for r in rewards].count("failed") == 1
    assert {span.replica for span in spans} == {1}


def test_a_judge_that_fails_for_hours_is_avoided_for_its_limit() -> None:
    life = Life(0, DeadScorer(), 0.0)
    for _ in range(2000):
        life.failed(7.0)
    assert life.failures == 2000
    assert life.avoided_until == 7.0 + SUSPECT_LIMIT_SECONDS


def test_a_scorer_that_fails_for_hours_is_still_asked() -> None:
    scorer = DeadScorer()
    scorer.error = ConnectionError("gone")

    async def main() -> Reward:
        source = DisRM("scorer", test_disrm.section("m"), [scorer])
        await source.start()
        async with asyncio.timeout(20):
            for _ in range(1100):
                await source.score([test_disrm.item("x")])
            scorer.error = None
            (reward,) = await source.score([test_disrm.item("x")])
        assert await source.drain_spans() == []
        await source.stop()
        return reward

    assert asyncio.run(main()).status == "scored"
