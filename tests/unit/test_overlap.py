"""Overlap and busy shares against a brute-force discretisation, and on schedules known by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.records import Span
from offbeat.track.overlap import busy, overlap, steady_window

ROLES = [
    ("train", "train"),
    ("train", "publish"),
    ("rollout", "prefill"),
    ("rollout", "decode"),
    ("rollout", "load"),
    ("reward/judge", "score"),
    ("reward/scorer", "score"),
    ("validate", "decode"),
]
HORIZON = 24


def span(role: str, kind: str, start: float, end: float, **more: float) -> Span:
    cpu = more.pop("cpu", end - start)
    return Span(role, int(more.get("replica", 0)), kind, start, end, cpu,
                tokens=int(more.get("tokens", 0)))  # fmt: skip


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    result = []
    for _ in range(draw(st.integers(0, 14))):
        role, kind = draw(st.sampled_from(ROLES))
        start = draw(st.integers(0, HORIZON))
        end = draw(st.integers(start, HORIZON))
        cpu = (end - start) * draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]))
        replica, tokens = draw(st.integers(0, 1)), draw(st.integers(0, 2))
        result.append(span(role, kind, start, end, cpu=cpu, replica=replica, tokens=tokens))
    return result


def brute(all_spans: list[Span], start: int, end: int) -> dict[str, float]:
    """The definitions, cell by cell of width 1: all edges are integers, so this is exact."""

    def density(s: Span) -> float:
        return min(1.0, s.cpu / (s.end - s.start))

    sums = dict.fromkeys(("train", "open", "rollout", "reward", "either", "company"), 0.0)
    for cell in range(start, end):
        here = [s for s in all_spans if s.start <= cell and s.end >= cell + 1]
        train = [s for s in here if (s.role, s.kind) == ("train", "train")]
        decode = [s for s in here if s.role == "rollout" and s.kind in ("prefill", "decode")]
        score = [s for s in here if s.role.startswith("reward/")]
        d_train, d_decode, d_score = (
            min(1.0, sum(map(density, x))) for x in (train, decode, score)
        )
        either = min(1.0, sum(map(density, decode + score)))
        sums["train"] += d_train
        sums["rollout"] += d_train * d_decode
        sums["reward"] += d_train * d_score
        sums["either"] += d_train * either
        sums["open"] += bool(train)
        sums["company"] += bool(train) and bool(decode or score)
    cells = {id(s): {c for c in range(start, end) if s.start <= c < s.end} for s in all_spans}
    trains = [s for s in all_spans if (s.role, s.kind) == ("train", "train") and cells[id(s)]]
    decoding = [s for s in all_spans if s.role == "rollout" and s.kind in ("prefill", "decode")]
    emitting = [s for s in decoding if s.tokens]
    fed = sum(any(cells[id(t)] & cells[id(d)] for d in emitting) for t in trains)
    compute, wall = sums["train"] or 1.0, sums["open"] or 1.0
    return {
        "train_and_rollout": sums["rollout"] / compute,
        "train_and_reward": sums["reward"] / compute,
        "train_and_decode_or_score": sums["either"] / compute,
        "open_decode_or_score": sums["company"] / wall,
        "train_spans_with_tokens": fed / (len(trains) or 1),
        "n_train_spans": len(trains),
    }


@settings(max_examples=150, deadline=None)
@given(spans(), st.integers(0, HORIZON), st.integers(0, HORIZON))
def test_overlap_is_what_cell_by_cell_counting_gives(
    all_spans: list[Span], one: int, other: int
) -> None:
    start, end = min(one, other), max(one, other)
    assert overlap(all_spans, start, end) == pytest.approx(brute(all_spans, start, end), abs=1e-9)


@settings(max_examples=80, deadline=None)
@given(spans(), st.integers(0, HORIZON - 1), st.integers(1, HORIZON))
def test_busy_is_what_cell_by_cell_counting_gives(
    all_spans: list[Span], start: int, length: int
) -> None:
    end = start + length
    shares = busy(all_spans, start, end)
    assert set(shares) == {s.role for s in all_spans}
    for role, share in shares.items():
        mine = [s for s in all_spans if s.role == role]
        used = sum(
            min(1.0, s.cpu / (s.end - s.start))
            for cell in range(start, end)
            for s in mine
            if s.start <= cell < s.end
        )
        replicas = len({s.replica for s in mine})
        assert share == pytest.approx(min(1.0, used / length / replicas))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 9.0), min_size=3, max_size=30), st.floats(0, 2e9))
def test_a_synchronous_schedule_gives_exactly_zero(lengths: list[float], at: float) -> None:
    taken = []
    for number, length in enumerate(lengths):
        role, kind = [("rollout", "decode"), ("reward/judge", "score"), ("train", "train")][
            number % 3
        ]
        taken.append(span(role, kind, at, at + length, tokens=9))
        at += length
    result = overlap(taken, taken[0].start, at)
    assert result.pop("n_train_spans") == len(lengths) // 3
    assert set(result.values()) == {0.0}


def test_a_fully_asynchronous_schedule_gives_one() -> None:
    taken = [span("train", "train", t, t + 1) for t in range(10)]
    taken += [span("rollout", "decode", 0, 10, tokens=100), span("reward/judge", "score", 0, 10)]
    assert set(overlap(taken, 0, 10).values()) == {1.0, 10.0}


def test_waiting_for_a_core_is_not_computing() -> None:
    taken = [span("train", "train", 0, 10, cpu=5), span("rollout", "decode", 0, 10, cpu=5)]
    result = overlap(taken, 0, 10)
    assert result["train_and_rollout"] == pytest.approx(0.5)
    assert result["open_decode_or_score"] == 1.0
    assert result["train_spans_with_tokens"] == 0.0
    assert busy(taken, 0, 10) == pytest.approx({"train": 0.5, "rollout": 0.5})


def test_no_spans_and_an_empty_window() -> None:
    assert set(overlap([], 0, 10).values()) == {0.0}
    assert set(overlap([span("train", "train", 0, 10)], 5, 5).values()) == {0.0}
    assert busy([], 0, 10) == {}
    assert busy([span("train", "train", 0, 10)], 5, 5) == {"train": 0.0}


def test_busy_divides_by_the_replicas_that_there_are() -> None:
    taken = [span("rollout", "decode", 0, 10)]
    assert busy(taken, 0, 10, {"rollout": 2, "train": 1}) == {"rollout": 0.5}
    assert busy(taken, 5, 15) == {"rollout": 0.5}


def test_steady_window_leaves_out_the_first_and_last_step() -> None:
    taken = [
        span("train", "train", 10 * k, 10 * k + 4, replica=r) for r in (1, 0) for k in range(5)
    ]
    taken += [span("train", "publish", 500, 600), span("rollout", "decode", 0, 700)]
    assert steady_window(taken) == (10, 34)
    assert steady_window(taken[5:8]) == (10, 14)
    assert steady_window(taken[5:7]) is None
