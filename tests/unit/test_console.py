"""The console: what a step's line says, that it fits, and that it names the bottleneck."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.records import Span
from offbeat.track.console import Console, bottleneck, duration, wrap


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "wait_seconds": 4.1, "tokens": 12_000, "applied": True,
        "reward": {"total": 0.6124, "judge": 0.55, "scorer": None, "correct": 0.4},
        "staleness": {"mean": 0.84, "max": 2, "histogram": {}},
    } | more  # fmt: skip


def lines_of(
    step: dict[str, Any], spans: list[Span], total: int | None = 200, width: int | None = 120
) -> list[str]:
    clock, stream = Clock(), io.StringIO()
    console = Console(total, stream, clock=clock, width=width)
    clock.now += 10
    console.spans(spans)
    console.step(step)
    return stream.getvalue().splitlines()


def test_a_step_is_one_line_unless_a_width_is_asked_for() -> None:
    spans = [Span("reward/judge", 0, "score", 1000, 1010, 9.4)]
    (line,) = lines_of(record(11), spans, width=None)
    assert line.startswith("step  12/200  reward 0.61")
    assert line.endswith("judge is the bottleneck: computes 94 %, trainer waits 41 %")


def test_a_step_says_all_of_it_within_120_columns() -> None:
    spans = [
        Span("train", 0, "train", 1000, 1005, 4.0),
        Span("rollout", 0, "decode", 1000, 1010, 8.8, tokens=5),
        Span("reward/judge", 0, "score", 1000, 1010, 9.4),
        Span("reward/scorer", 0, "score", 990, 1002, 12),
    ]
    lines = lines_of(record(11), spans)
    assert max(map(len, lines)) <= 120
    assert lines[0] == (
        "step  12/200  reward 0.61 (judge 0.55, scorer -, correct 0.40)  stale 0.8/2  "
        "1.2k tok/s  0:10, 31:20 left"
    )
    text = " ".join(" ".join(lines[1:]).split())
    assert text == (
        "computes: judge 94 %, scorer 20 %, rollout 88 %, trainer 40 % "
        "judge is the bottleneck: computes 94 %, trainer waits 41 %"
    )


def test_a_validation_has_its_line_and_is_on_the_next_steps_line() -> None:
    clock, stream = Clock(), io.StringIO()
    console = Console(3, stream, clock=clock)
    console.say("starting 2 engines")
    clock.now += 75
    console.validation({"step": 1, "version": "1.1", "metrics": {"accuracy": 0.4125, "n": 80}})
    console.step(record(1))
    console.step(record(2))
    lines = [line for line in stream.getvalue().splitlines() if not line.startswith(" ")]
    assert lines[0] == "[0:00] starting 2 engines"
    assert lines[1] == "[1:15] validation of version 1.1: accuracy 0.412, n 80"
    assert "acc 0.412" in lines[2]
    assert "acc" not in lines[3]
    metrics = {"accuracy": float("nan"), "n": 12.0, "failed/judge": 3.0, "reward/judge": 0.25}
    console.validation({"version": "2", "by": "train", "metrics": metrics})
    assert (
        stream.getvalue()
        .splitlines()[-1]
        .endswith(
            "validation of version 2 by the trainer: accuracy -, n 12, failed/judge 3, "
            "reward/judge 0.250"
        )
    )


def test_time_left_follows_the_pace_and_is_unknown_without_an_end() -> None:
    clock, stream = Clock(), io.StringIO()
    console = Console(10, stream, clock=clock)
    for step in range(10):
        clock.now += 6
        console.step(record(step))
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert "0:06, 0:54 left" in lines[0]
    assert "1:00, 0:00 left" in lines[-1]
    assert "left" not in "".join(lines_of(record(5), [], total=None))


def test_the_bottleneck_in_words() -> None:
    shares = {"reward/judge": 0.94, "rollout": 0.5, "train": 0.5}
    assert bottleneck(shares, 0.41) == (
        "judge is the bottleneck: computes 94 %, trainer waits 41 %"
    )
    assert bottleneck({"train": 0.95, "rollout": 0.97}, 0.02) == (
        "trainer is the bottleneck: computes 95 %, waits 2 %"
    )
    assert bottleneck({"rollout": 0.3}, 0.5) == "no role is saturated: trainer waits 50 %"
    assert bottleneck({}, 0.5) == "trainer waits 50 %"
    assert bottleneck({}, 0.0) == "trainer is the bottleneck: waits 0 %"


def test_an_update_that_was_not_applied_is_said() -> None:
    text = " ".join(lines_of(record(1, applied=False), []))
    assert text.endswith("update not applied")


def test_without_a_value_there_is_a_dash() -> None:
    empty = {"mean": None, "max": None, "histogram": {}}
    line = lines_of(record(1, reward={"total": None, "judge": None}, staleness=empty), [])[0]
    assert "reward - (judge -)" in line
    assert "stale -" in line


def test_without_a_stream_it_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Console(1).say("starting")
    assert caplog.messages == ["[0:00] starting"]
    assert caplog.records[0].name == "offbeat.track.console"


def test_nothing_raises_into_training() -> None:
    stream = io.StringIO()
    console = Console(10, stream)
    console.step({})
    console.validation({})
    stream.close()
    console.step(record(1))
    console.say("to a closed stream")


def test_half_a_character_costs_no_line() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8")
    Console(10, stream).say("half \ud83d")
    assert raw.getvalue().decode() == "[0:00] half ?\n"


def test_durations() -> None:
    texts = [duration(s) for s in (-1, 0, 59.6, 125, 3725)]
    assert texts == ["0:00", "0:00", "1:00", "2:05", "1:02:05"]


@given(st.lists(st.text("ab ", min_size=1, max_size=80).map(str.strip), max_size=8))
def test_wrapping_loses_nothing_and_fits(facts: list[str]) -> None:
    lines = wrap(facts, 90)
    assert all(len(line) <= 90 for line in lines)
    assert " ".join(lines).split() == " ".join(facts).split()
