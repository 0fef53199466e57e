"""The loop over sources: retries in one place, typed failures, counters, spans."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from offbeat.config import RewardSourceSection
from offbeat.errors import DeadlinePassed, UserError
from offbeat.records import Prompt, Reward, ScoreItem, Span
from offbeat.reward import loop as reward_loop
from offbeat.reward.loop import RewardLoop, Scored


class Fake:
    """Answers from a script, then with its last answer; counts its calls."""

    def __init__(self, name: str, *script: float | str | Exception | None) -> None:
        self.name = name
        self.script = list(script)
        self.calls = 0
        self.started = self.stopped = False
        self.problem: Exception | None = None
        self.start_seconds = 0.0

    async def start(self) -> None:
        await asyncio.sleep(self.start_seconds)
        if self.problem:
            raise self.problem
        self.started = True

    async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
        answer = self.script[min(self.calls, len(self.script) - 1)]
        self.calls += 1
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            return [Reward.abstained(self.name)]
        if isinstance(answer, str):
            return [Reward.failed(self.name, answer, reason="scripted")]
        return [Reward(self.name, "scored", answer)]

    async def drain_spans(self) -> list[Span]:
        return [Span(f"reward/{self.name}", 0, "score", 0.0, 1.0, 0.5)]

    async def stop(self) -> None:
        self.stopped = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_loop, "BACKOFF_SECONDS", 0.001)


ITEM = ScoreItem(Prompt(0, np.zeros(1, np.int32), "p", "q"), "answer")


def section(**settings: Any) -> RewardSourceSection:
    kind = settings.get("kind", "function")
    needed = {"function": "r.py:f"} if kind == "function" else {"model": "m"}
    return RewardSourceSection.model_validate({"kind": "function"} | needed | settings)


def score(
    sources: list[Fake], settings: dict[str, dict[str, Any]] | None = None, times: int = 1
) -> tuple[list[Scored], RewardLoop]:
    config = {s.name: section(**(settings or {}).get(s.name, {})) for s in sources}

    async def main() -> tuple[list[Scored], RewardLoop]:
        loop = await RewardLoop.create({s.name: s for s in sources}, config)
        return [await loop.score(ITEM) for _ in range(times)], loop

    return asyncio.run(main())


def test_all_sources_one_total() -> None:
    (scored,), loop = score([Fake("a", 1.0), Fake("b", 0.5)], {"b": {"weight": 2.0}})
    assert (scored.total, scored.verdict) == (2.0, "keep")
    assert {name: r.value for name, r in scored.rewards.items()} == {"a": 1.0, "b": 0.5}
    assert loop.stats()["b"].mean == 0.5


def test_failures_are_retried_then_counted() -> None:
    a = Fake("a", "timeout", "timeout", 0.5)
    (scored,), loop = score([a], {"a": {"retries": 2}})
    assert (scored.total, scored.rewards["a"].retries, a.calls) == (0.5, 2, 3)
    assert loop.stats()["a"].retries == 2
    a = Fake("a", "timeout", "timeout", 0.5)
    (scored,), loop = score([a], {"a": {"retries": 1}})
    assert (scored.total, scored.verdict) == (None, "drop_sample")
    assert loop.stats()["a"].failed == {"timeout": 1}


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"kind": "genrm", "base_url": "http://x/v1"}, "timeout"),  # the pool retried already
        ({"kind": "genrm"}, "unparseable"),  # greedy: the same words again
        ({"kind": "disrm"}, "non_finite"),
        ({"kind": "disrm"}, "too_long"),
        ({}, "template_error"),
    ],
)
def test_what_is_not_retried(settings: dict[str, Any], cause: str) -> None:
    a = Fake("a", cause, 1.0)
    (scored,), _ = score([a], {"a": settings})
    assert a.calls == 1
    assert scored.verdict == "drop_sample"


def test_on_failure_policies() -> None:
    def verdict(policy: str) -> Scored:
        sources = [Fake("a", 0.4), Fake("b", "timeout")]
        (scored,), _ = score(sources, {"b": {"on_failure": policy, "retries": 0}})
        return scored

    assert verdict("retry_then_drop_sample").verdict == "drop_sample"
    assert verdict("retry_then_drop_sample").total is None
    assert verdict("drop_group").verdict == "drop_group"
    kept = verdict("abstain")
    assert (kept.verdict, kept.total) == ("keep", pytest.approx(0.8))
    assert (kept.rewards["b"].status, kept.rewards["b"].cause) == ("abstained", "timeout")


def test_all_abstained() -> None:
    (scored,), loop = score([Fake("a", None), Fake("b", None)])
    assert (scored.total, scored.verdict) == (None, "drop_sample")
    assert loop.stats()["a"].abstained == 1
    assert loop.stats()["a"].mean is None


def test_g3_non_finite_enters_no_mean() -> None:
    """Rewards 0.2, NaN, 0.8, 0.5 of one source: NaN is a failure, the rest keep their own."""
    source = Fake("a", 0.2, math.nan, 0.8, 0.5)
    results, loop = score([source], {"a": {"retries": 0}}, times=4)
    assert [scored.total for scored in results] == [0.2, None, 0.8, 0.5]
    assert (results[1].rewards["a"].status, results[1].rewards["a"].cause) == (
        "failed",
        "non_finite",
    )
    stats = loop.stats()["a"]
    assert (stats.scored, stats.failed, stats.mean) == (3, {"non_finite": 1}, pytest.approx(0.5))


def test_a_source_that_raises_is_a_failure() -> None:
    (scored,), _ = score([Fake("a", RuntimeError("boom"))], {"a": {"retries": 0}})
    assert scored.rewards["a"].cause == "source_error"
    assert "boom" in scored.rewards["a"].reason


def test_drain_is_a_steps() -> None:
    async def main() -> None:
        loop = await RewardLoop.create({"a": Fake("a", 1.0, 3.0)}, {"a": section()})
        await loop.score(ITEM)
        assert loop.drain()["a"].mean == 1.0
        await loop.score(ITEM)
        assert (loop.drain()["a"].mean, loop.stats()["a"].mean) == (3.0, 2.0)
        assert loop.drain()["a"].scored == 0
        assert [span.role for span in await loop.drain_spans()] == ["reward/a"]
        await loop.stop()

    asyncio.run(main())


def test_create_starts_at_once_and_stops_the_others_on_a_failure() -> None:
    good, bad = Fake("good", 1.0), Fake("bad", 1.0)
    bad.problem = UserError("reward.bad.base_url: nobody answers")
    with pytest.raises(UserError, match="nobody answers"):
        score([good, bad])
    assert good.stopped
    slow = [Fake(name, 1.0) for name in "abcdef"]
    for source in slow:
        source.start_seconds = 0.3

    async def main() -> float:
        began = asyncio.get_running_loop().time()
        await RewardLoop.create({s.name: s for s in slow}, {s.name: section() for s in slow})
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(main()) < 1.5


def test_create_has_a_deadline() -> None:
    slow = Fake("slow", 1.0)
    slow.start_seconds = 60

    async def main() -> None:
        await RewardLoop.create({"slow": slow}, {"slow": section()}, deadline_seconds=0.1)

    with pytest.raises(DeadlinePassed, match="slow"):
        asyncio.run(main())
    assert slow.stopped
    with pytest.raises(UserError, match="do not match: b"):
        asyncio.run(RewardLoop.create({}, {"b": section()}))
