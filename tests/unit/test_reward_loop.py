"""The loop over sources: retries in one place, typed failures, counters, spans."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests import virtual

from offbeat.config import RewardSourceSection
from offbeat.errors import DeadlinePassed, RewardsDown, UserError
from offbeat.records import Prompt, Reward, ScoreItem, Span, Transcript
from offbeat.reward import loop as reward_loop
from offbeat.reward.loop import RewardLoop, Scored
from offbeat.track.transcripts import TranscriptWriter


class Fake:
    """Answers from a script, then with its last answer; counts its calls."""

    def __init__(self, name: str, *script: float | str | Exception | None) -> None:
        self.name = name
        self.script = list(script)
        self.calls = 0
        self.started = self.stopped = False
        self.problem: Exception | None = None
        self.start_seconds = 0.0
        self.down_since: float | None = None
        self.seen: list[list[ScoreItem]] = []

    def facts(self) -> dict[str, float]:
        return {"calls": float(self.calls)}

    async def start(self) -> None:
        await asyncio.sleep(self.start_seconds)
        if self.problem:
            raise self.problem
        self.started = True

    async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
        answer = self.script[min(self.calls, len(self.script) - 1)]
        self.calls += 1
        self.seen.append(list(items))
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            return [Reward.abstained(self.name) for _ in items]
        if isinstance(answer, str):
            return [Reward.failed(self.name, answer, reason="scripted") for _ in items]
        return [Reward(self.name, "scored", answer) for _ in items]

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
        ({"kind": "genrm", "base_url": "http://x/v1"}, "unparseable"),  # greedy
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


@pytest.mark.parametrize("settings", [{"model": "m"}, {"base_url": "http://x/v1"}])
def test_a_judge_that_draws_is_asked_for_another_verdict(settings: dict[str, Any]) -> None:
    a = Fake("a", "unparseable", 1.0)
    (scored,), _ = score([a], {"a": {"kind": "genrm", "temperature": 0.5, **settings}})
    assert (scored.total, a.calls, scored.rewards["a"].retries) == (1.0, 2, 1)


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
    within = Fake("a", ExceptionGroup("tasks", [RuntimeError("boom")]))
    (scored,), _ = score([within], {"a": {"retries": 0}})
    assert scored.rewards["a"].reason == "RuntimeError: boom", "not that a group of tasks failed"


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


def prompt(**columns: Any) -> Prompt:
    return Prompt(7, np.zeros(1, np.int32), "p", "q", columns=columns)


def items(n: int, **columns: Any) -> list[ScoreItem]:
    return [ScoreItem(prompt(**columns), f"answer {i}", index=i) for i in range(n)]


def test_a_row_picks_its_sources_and_others_are_not_asked() -> None:
    a, b, c = Fake("a", 1.0), Fake("b", 0.5), Fake("c", 0.25)
    config = {
        "a": section(),
        "b": section(when={"task": ["math", "code"]}),
        "c": section(when={"task": "chat"}),
    }

    async def main() -> list[Scored]:
        loop = await RewardLoop.create({"a": a, "b": b, "c": c}, config)
        rows: list[dict[str, Any]] = [{"task": "math"}, {"task": "chat"}, {"reward": "c"}, {}]
        return [(await loop.score_group(items(1, **row)))[0] for row in rows]

    found = asyncio.run(main())
    assert [set(one.rewards) for one in found] == [{"a", "b"}, {"a", "c"}, {"c"}, {"a"}]
    assert [one.total for one in found] == [1.5, 1.25, 0.25, 1.0]


def test_a_source_that_compares_sees_the_whole_group_once() -> None:
    alone, pairs = Fake("alone", 1.0), Fake("pairs", 0.5)
    config = {
        "alone": section(),
        "pairs": section(kind="genrm", pairwise="circular", parser="choice"),
    }

    async def main() -> tuple[list[Scored], dict[str, Any]]:
        loop = await RewardLoop.create({"alone": alone, "pairs": pairs}, config)
        return await loop.score_group(items(3)), loop.stats()

    found, stats = asyncio.run(main())
    assert [len(call) for call in alone.seen] == [1, 1, 1]
    assert [[item.index for item in call] for call in pairs.seen] == [[0, 1, 2]]
    assert [one.total for one in found] == [1.5] * 3
    assert (stats["pairs"].scored, stats["pairs"].facts) == (3, {"calls": 1.0})


def test_scopes_are_counted_apart_and_judges_cost_is_told(tmp_path: Path) -> None:
    call = Transcript("read", "8", 0.8, None, 100, 2, 0.5)
    again = Transcript("read", "8", 0.8, cached=True)

    class Judge(Fake):
        async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
            said = (call,) if not self.calls else (again,)
            self.calls += 1
            more = {"transcripts": said, "spread": 0.25}
            return [Reward.scored(self.name, 0.8, **more) for _ in items]

    async def main() -> tuple[RewardLoop, list[Scored]]:
        writer = TranscriptWriter(tmp_path)
        loop = await RewardLoop.create({"j": Judge("j", 1.0)}, {"j": section()}, transcripts=writer)
        found = await loop.score_group(items(2), attempt=1)
        found += await loop.score_group(items(1), scope="validation")
        await loop.stop()
        return loop, found

    loop, found = asyncio.run(main())
    train, held_out = loop.stats()["j"], loop.stats("validation")["j"]
    assert (train.scored, train.calls, train.cached, train.prompt_tokens) == (2, 2, 1, 100)
    assert (train.completion_tokens, train.seconds, train.spread) == (2, 0.5, 0.25)
    assert (held_out.scored, held_out.cached, held_out.seconds) == (1, 1, None)
    assert loop.drain()["j"].scored == 2
    assert all(one.rewards["j"].transcripts == () for one in found)
    rows = pq.read_table(tmp_path / "transcripts" / "part-000000.parquet").to_pylist()
    assert [(r["scope"], r["ordinal"], r["attempt"], r["index"]) for r in rows] == [
        ("train", 7, 1, 0), ("train", 7, 1, 1), ("validation", 7, 0, 0),
    ]  # fmt: skip
    assert (rows[0]["prompt"], rows[0]["raw"], rows[0]["value"]) == ("read", "8", 0.8)


def test_the_calls_of_every_try_are_kept_and_counted(tmp_path: Path) -> None:
    class Judge(Fake):
        async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
            self.calls += 1
            said = "8" if self.calls == 3 else "hm"
            call = (Transcript("read", said, prompt_tokens=100, completion_tokens=self.calls),)
            if self.calls < 3:
                return [Reward.failed("j", "unparseable", transcripts=call) for _ in items]
            return [Reward.scored("j", 0.8, transcripts=call) for _ in items]

    async def main() -> RewardLoop:
        config = {"j": section(kind="genrm", temperature=0.7, retries=2)}
        writer = TranscriptWriter(tmp_path)
        loop = await RewardLoop.create({"j": Judge("j")}, config, transcripts=writer)
        (found,) = await loop.score_group(items(1))
        assert (found.total, found.rewards["j"].retries) == (0.8, 2)
        await loop.stop()
        return loop

    stats = asyncio.run(main()).stats()["j"]
    assert (stats.scored, stats.calls) == (1, 3)
    assert (stats.prompt_tokens, stats.completion_tokens) == (300, 6)
    rows = pq.read_table(tmp_path / "transcripts" / "part-000000.parquet").to_pylist()
    assert [row["raw"] for row in rows] == ["hm", "hm", "8"]


def test_normalisation_has_one_constant_for_a_group_and_learns_from_training_only() -> None:
    source = Fake("s", 1.0, 3.0, 5.0, 100.0, 7.0)

    async def main() -> tuple[list[Scored], list[Scored], list[Scored], RewardLoop]:
        config = {"s": section(kind="disrm", normalize="running")}
        loop = await RewardLoop.create({"s": source}, config)
        first = await loop.score_group(items(3))
        held_out = await loop.score_group(items(1), scope="validation")
        return first, held_out, await loop.score_group(items(1)), loop

    first, held_out, last, loop = asyncio.run(main())
    values = [one.rewards["s"].value or 0.0 for one in first]
    assert sum(values) == pytest.approx(0.0, abs=1e-6)
    assert values[1] - values[0] == pytest.approx(values[2] - values[1])
    assert (held_out[0].total or 0) > 40, "the mean and deviation are those of training"
    assert (last[0].total or 0) < 2, "a validation teaches nothing"
    assert loop.stats()["s"].facts["normalize_mean"] == pytest.approx(4.0)
    assert loop.stats()["s"].mean == pytest.approx(4.0), "the mean told is that of raw values"


def watched(
    source: Fake, settings: dict[str, Any], body: Callable[[RewardLoop], Coroutine[Any, Any, None]]
) -> list[str]:
    """Runs `body` beside the watch under a virtual clock; returns what was said."""
    changes: list[tuple[str, ...]] = []

    async def main() -> list[str]:
        loop = await RewardLoop.create({"s": source}, {"s": section(**settings)})

        async def changed() -> None:
            changes.append(loop.stalled)

        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(loop.watch(changed))
            await body(loop)
            watch.cancel()
        assert changes[:1] in ([], [("s",)])
        return loop.notices()

    return virtual.run(main())


def test_a_source_that_is_down_stalls_admission_until_it_is_back() -> None:
    source = Fake("s", 1.0)

    async def body(loop: RewardLoop) -> None:
        await asyncio.sleep(1)
        assert loop.stalled == ()
        source.down_since = asyncio.get_running_loop().time()
        await asyncio.sleep(20)
        assert loop.stalled == ("s",)
        source.down_since = None
        await asyncio.sleep(1)
        assert loop.stalled == ()
        assert loop.stalled_seconds == pytest.approx(20, abs=0.6)

    down, back = watched(source, {"patience_seconds": 30}, body)
    assert "reward.s: nobody is there" in down
    assert "patience_seconds" in down
    assert "reward.s is back after 20 s" in back


def test_past_its_patience_a_source_ends_the_run() -> None:
    source = Fake("s", 1.0)
    source.down_since = 0.0

    async def body(loop: RewardLoop) -> None:
        await asyncio.sleep(1000)

    with pytest.raises(ExceptionGroup) as caught:
        watched(source, {"patience_seconds": 30}, body)
    assert isinstance(caught.value.exceptions[0], RewardsDown)
    assert "patience_seconds = 30" in str(caught.value.exceptions[0])


def test_servers_that_are_gone_are_named_without_their_passwords() -> None:
    source = Fake("s", 1.0)
    source.down_since = 0.0
    settings = {
        "kind": "genrm",
        "base_url": ["http://me:secret@a:8000/v1", "https://b/v1"],
        "patience_seconds": 30,
    }

    async def body(loop: RewardLoop) -> None:
        await asyncio.sleep(1000)

    with pytest.raises(ExceptionGroup) as caught:
        watched(source, settings, body)
    told = str(caught.value.exceptions[0])
    assert "reward.s: nobody is there to score at http://a:8000/v1 or https://b/v1, for 30" in told


def test_a_source_over_its_budget_is_asked_again_until_it_is_well() -> None:
    source = Fake("s", *["timeout"] * 25, 1.0)

    async def body(loop: RewardLoop) -> None:
        for _ in range(20):
            await loop.score(ITEM)
        await asyncio.sleep(1)
        assert loop.stalled == ("s",)
        await asyncio.sleep(60)
        assert loop.stalled == (), "its last failed samples were asked again, and it is well"

    over, back = watched(source, {"retries": 0, "patience_seconds": 100}, body)
    assert re.search(r"100% of its last scores failed \(timeout \d+\)", over)
    assert "max_failed_share = 0.5" in over
    assert "is back" in back


def test_a_sample_that_fails_for_good_keeps_no_well_source_away() -> None:
    """It was the last one that failed before the source got well."""

    class Choosy(Fake):
        well = False

        async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
            good = self.well and items[0].completion != "odd"
            return [Reward.scored("s", 1.0) if good else Reward.failed("s", "unparseable")]

    source = Choosy("s", 1.0)

    async def body(loop: RewardLoop) -> None:
        for answer in [*"abcdefghijklmnopqrs", "odd"]:
            await loop.score(replace(ITEM, completion=answer))
        source.well = True
        await asyncio.sleep(30)
        assert loop.stalled == ()

    watched(source, {"retries": 0, "patience_seconds": 100}, body)


def test_a_source_is_stalled_from_the_score_that_tips_its_budget() -> None:
    """No group is admitted between that and the next look."""

    async def body(loop: RewardLoop) -> None:
        for number in range(16):
            assert loop.stalled == (), number
            await loop.score(ITEM)
        assert loop.stalled == ("s",)

    (said,) = watched(Fake("s", "timeout"), {"retries": 0, "patience_seconds": 100}, body)
    assert "no group is admitted" in said


def test_failures_that_no_waiting_mends_end_the_run_at_once() -> None:
    source = Fake("s", "raised")

    async def body(loop: RewardLoop) -> None:
        for _ in range(20):
            await loop.score(ITEM)
        await asyncio.sleep(1)

    with pytest.raises(ExceptionGroup) as caught:
        watched(source, {"retries": 0}, body)
    assert "100% of its last scores failed (raised" in str(caught.value.exceptions[0])
    assert "mend it" in str(caught.value.exceptions[0])
