"""What is kept of a judge's calls, expected values, and verdicts from the cache."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from judge_fakes import StubJudge, group, item, judged, section

from offbeat.records import ScoreItem, Transcript
from offbeat.reward.asking import RAW_KEPT
from offbeat.reward.cache import VerdictCache
from offbeat.reward.genrm import GenRM
from offbeat.reward.judge import Verdict
from offbeat.reward.judge_prompt import JudgeText
from offbeat.reward.pool import CallFailed


def test_every_call_is_kept() -> None:
    judge = StubJudge(
        Verdict("Score: 8", retries=1, prompt_tokens=40, completion_tokens=4, seconds=2)
    )
    (reward,), _ = judged(judge, [item()])
    assert reward.transcripts == (
        Transcript(
            judge.asked[0], "Score: 8", value=pytest.approx(7 / 9), cause=None,
            prompt_tokens=40, completion_tokens=4, seconds=2,
        ),
    )  # fmt: skip
    assert (reward.raw, reward.retries) == ("Score: 8", 1)


@pytest.mark.parametrize(
    ("said", "cause", "raw", "tokens"),
    [
        ("I refuse", "unparseable", "I refuse", 3),
        ("11", "out_of_range", "11", 3),
        (Verdict("1", "length", completion_tokens=1), "unparseable", "1", 1),
        (CallFailed("timeout", "no answer", retries=2), "timeout", "", 0),
        (CallFailed("refused", "bad key"), "refused", "", 0),
    ],
)
def test_failed_calls_are_kept_with_their_cause(
    said: Any, cause: str, raw: str, tokens: int
) -> None:
    judge = StubJudge(said)
    (reward,), _ = judged(judge, [item()])
    (call,) = reward.transcripts
    assert (reward.status, reward.cause, reward.value, reward.raw) == ("failed", cause, None, raw)
    assert (call.prompt, call.raw, call.value, call.cause) == (judge.asked[0], raw, None, cause)
    assert call.completion_tokens == tokens
    assert reward.reason
    assert call.seconds >= 0


def test_a_long_verdict_is_cut_where_it_is_kept() -> None:
    said = "x" * 3 * RAW_KEPT + "\n8"
    (reward,), _ = judged(StubJudge(said), [item()], parser="last_number")
    assert reward.value == pytest.approx(7 / 9)
    assert reward.raw == reward.transcripts[0].raw == "x" * RAW_KEPT


def test_the_judges_own_words_on_itself() -> None:
    async def main() -> None:
        judge = StubJudge()
        source = GenRM("judge", section(), judge)
        assert source.down_since is None
        assert source.facts() == {"limit": 7.0}
        judge.down_since = 12.5
        assert source.down_since == 12.5

    asyncio.run(main())


def test_an_expected_value() -> None:
    def shares(text: str, verdicts: Sequence[str]) -> list[float]:
        return [{"10": 0.6, "9": 0.2}.get(verdict, 0.0) for verdict in verdicts]

    judge = StubJudge(shares=shares)
    (reward,), _ = judged(judge, [item()], parser="expected")
    assert reward.value == pytest.approx((0.6 * 1 + 0.2 * 8 / 9) / 0.8)
    assert reward.raw == "10: 0.600, 9: 0.200 (mass 0.800)"
    assert reward.transcripts[0].raw == reward.raw
    assert reward.transcripts[0].prompt_tokens == 5
    choices = {"good": 5.0, "bad": -5.0}
    judge = StubJudge(shares=lambda text, verdicts: [0.25, 0.75])
    (reward,), _ = judged(judge, [item()], parser="expected", choices=choices)
    assert reward.value == pytest.approx(-2.5)  # as it is set, on no scale


def test_an_expected_value_without_mass() -> None:
    judge = StubJudge(shares=lambda text, verdicts: [0.04] * len(verdicts))
    (reward,), _ = judged(judge, [item()], parser="expected")
    assert (reward.status, reward.cause, reward.value) == ("failed", "unparseable", None)
    assert "mass 0.400" in reward.reason
    assert "(mass 0.400)" in reward.raw


@pytest.mark.parametrize(
    ("values", "said", "value"),
    [
        ({"good": 3.5, "bad": -2.0}, "good", 3.5),
        ({"good": 3.5, "bad": -2.0}, "Bad.", -2.0),
        ({"good": 1e300, "bad": 0.0}, "good", 1e300),
    ],
)
def test_choices_count_as_they_are_set(values: dict[str, float], said: str, value: float) -> None:
    (reward,), _ = judged(StubJudge(said), [item()], parser="choice", choices=values)
    assert (reward.status, reward.value) == ("scored", value)


# ---- the cache ----


def cached(tmp_path: Path, judge: StubJudge, items: Any, **settings: Any) -> list[Any]:
    return judged(judge, items, kept=VerdictCache(tmp_path / "v.sqlite"), **settings)[0]


def test_a_verdict_is_asked_for_once(tmp_path: Path) -> None:
    judge = StubJudge("8")
    (first,) = cached(tmp_path, judge, [item()])
    (second,) = cached(tmp_path, judge, [item()])  # another source, from the file
    assert len(judge.asked) == 1
    assert (first.value, first.raw) == (second.value, second.raw)
    assert not first.transcripts[0].cached
    assert replace(second.transcripts[0], seconds=0) == replace(
        first.transcripts[0], cached=True, prompt_tokens=0, completion_tokens=0, seconds=0
    )
    cached(tmp_path, judge, [item("5")])
    assert len(judge.asked) == 2


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1.0}, {"cache": False}, {"temperature": 0.5, "votes": 2}],
    ids=str,
)
def test_draws_are_never_cached(tmp_path: Path, settings: dict[str, Any]) -> None:
    judge = StubJudge("8")
    for _ in range(2):
        cached(tmp_path, judge, [item()], **settings)
    assert len(judge.asked) == 2 * settings.get("votes", 1)
    assert not (tmp_path / "v.sqlite").exists()


def test_what_cannot_be_read_is_asked_for_anew(tmp_path: Path) -> None:
    judge = StubJudge("I cannot say")
    assert cached(tmp_path, judge, [item()])[0].cause == "unparseable"
    judge.reply = CallFailed("timeout", "slow")
    assert cached(tmp_path, judge, [item()])[0].cause == "timeout"
    judge.reply = "9"
    assert cached(tmp_path, judge, [item()])[0].value == pytest.approx(8 / 9)
    assert len(judge.asked) == 3
    assert cached(tmp_path, judge, [item()])[0].transcripts[0].cached


def test_what_another_parser_reads_is_asked_for_anew(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ answer }}")
    judge = StubJudge("8")
    cached(tmp_path, judge, [item()], template=path)
    judge.reply = '{"score": 4}'
    (reward,) = cached(tmp_path, judge, [item()], template=path, parser="json")
    assert (reward.value, len(judge.asked)) == (pytest.approx(3 / 9), 2)


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 3},
        {"chat": True},
        {"stop": ["\n"]},
        {"dtype": "bfloat16"},
        {"engine": "vllm"},
    ],
    ids=str,
)
def test_what_a_verdict_follows_from_is_in_its_key(tmp_path: Path, change: dict[str, Any]) -> None:
    judge = StubJudge("8")
    cached(tmp_path, judge, [item()])
    cached(tmp_path, judge, [item()], **change)
    assert len(judge.asked) == 2


def test_an_engine_that_computes_otherwise_is_asked_itself(tmp_path: Path) -> None:
    judge = StubJudge("8")
    for arguments in ({}, {"quantization": "fp8"}, {"quantization": "fp8"}):
        cached(tmp_path, judge, [item()], engine="vllm", engine_args=arguments)
    assert len(judge.asked) == 2


def test_another_model_is_asked_itself(tmp_path: Path) -> None:
    cached(tmp_path, StubJudge("8"), [item()])
    other = StubJudge("3", identity="stub-2")
    (reward,) = cached(tmp_path, other, [item()])
    assert (reward.value, len(other.asked)) == (pytest.approx(2 / 9), 1)


def test_probabilities_are_cached(tmp_path: Path) -> None:
    judge = StubJudge("8", shares=lambda text, verdicts: [0.1] * len(verdicts))
    path = tmp_path / "t.jinja"
    path.write_text("{{ answer }}")
    for _ in range(2):
        (reward,) = cached(tmp_path, judge, [item()], parser="expected", template=path)
    assert len(judge.asked) == 1
    assert reward.value == pytest.approx(0.5)
    assert (reward.transcripts[0].cached, reward.transcripts[0].prompt_tokens) == (True, 0)
    (reward,) = cached(tmp_path, judge, [item()], template=path)  # words are not probabilities
    assert (reward.raw, len(judge.asked)) == ("8", 2)


def test_comparisons_are_cached(tmp_path: Path) -> None:
    judge = StubJudge("A")
    for _ in range(2):
        rewards = cached(tmp_path, judge, group("a", "b", "c"), pairwise="all")
        assert [reward.value for reward in rewards] == [0.5, 0.5, 0.5]
    assert len(judge.asked) == 6
    assert all(call.cached for reward in rewards for call in reward.transcripts)


def test_short_texts_are_rendered_on_the_loop_long_and_slow_ones_in_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = GenRM("judge", section(), StubJudge("8"))
    threads: list[bool] = []
    rendered = source._prompt.one
    busy = 0.0

    def render(first: ScoreItem) -> JudgeText:
        threads.append(threading.current_thread() is not threading.main_thread())
        until = time.perf_counter() + busy
        while time.perf_counter() < until:
            pass
        return rendered(first)

    monkeypatch.setattr(source._prompt, "one", render)

    async def where(answer: str) -> bool:
        (reward,) = await source.score([item(answer)])
        assert reward.status == "scored"
        return threads.pop()

    async def main() -> None:
        nonlocal busy
        assert [await where("4") for _ in range(3)] == [False] * 3
        assert await where("because " * 10_000)
        assert not await where("4")
        busy = 0.02
        assert [await where("4") for _ in range(6)] == [False] * 4 + [True] * 2

    asyncio.run(main())
