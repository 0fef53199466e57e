"""The starts of a run, from its records."""

from __future__ import annotations

from typing import Any

from offbeat.track.starts import Starts
from offbeat.track.summary import RunStats, build_summary


def fed(*records: dict[str, Any]) -> Starts:
    starts = Starts()
    for record in records:
        starts.feed(record)
    return starts


def test_a_killed_start_lasted_until_its_last_record() -> None:
    starts = fed(
        {"type": "span", "end": 1.0},
        {"type": "start", "time": 101.0, "started": 100.0, "step": 0, "lineage": 0},
        {"type": "event", "time": 110.0},
        {"type": "span", "start": 111.0, "end": 112.5},
        {"type": "start", "time": 201.0, "started": 200.0, "step": 4, "lineage": 1},
        {"type": "end", "time": 230.0, "status": "interrupted"},
        {"type": "start", "time": 301.0, "started": 300.0, "step": 9, "lineage": 2},
    )
    assert starts.first == 100.0
    assert starts.earlier_seconds() == 12.5 + 30.0
    rows = starts.table(305.0, "finished")
    assert [(r["from_step"], r["lineage"], r["wall_seconds"], r["status"]) for r in rows] == [
        (0, 0, 12.5, "killed"),
        (4, 1, 30.0, "interrupted"),
        (9, 2, 5.0, "finished"),
    ]


def step(number: int, time: float, generated: int) -> dict[str, Any]:
    return {
        "type": "step", "step": number, "time": time, "tokens": 10, "generated_tokens": generated,
        "applied": True, "reward": {"total": 1.0, "rule": float(number)},
        "scored": {"rule": {"scored": 2, "abstained": 0, "failed": {}}},
        "staleness": {"mean": 0, "max": number, "histogram": {str(number): 2}},
        "groups_counts": {},
    }  # fmt: skip


def test_a_summary_covers_all_starts_and_no_step_twice() -> None:
    stats = RunStats(2, 200.0)
    for record in (
        {"type": "start", "time": 101.0, "started": 100.0, "step": 0, "lineage": 0},
        step(0, 104.0, 30),
        step(1, 108.0, 30),
        step(2, 110.0, 40),
        {"type": "start", "time": 201.0, "started": 200.0, "step": 1, "lineage": 1},
        step(1, 202.0, 0),
        step(2, 203.0, 0),
        step(3, 205.0, 20),
    ):
        stats.feed(record)
    summary = build_summary(stats, status="finished", now=210.0)
    assert summary["steps"] == 4
    assert summary["wall_seconds"] == 20.0, "without the time between two starts"
    assert summary["throughput"] == {
        "trained_tokens_per_s": 40 / 20.0,
        "generated_tokens_per_s": 120 / 20.0,
    }
    assert summary["staleness"]["max"] == 3
    assert summary["rewards"]["rule"]["scored"] == 8


def test_a_run_without_records_of_starts_has_none() -> None:
    assert fed({"type": "event", "time": 1.0}).table(2.0, "finished") == []
    assert build_summary(RunStats(0, 1.0), status="failed", now=3.0)["wall_seconds"] == 2.0
