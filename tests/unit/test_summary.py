"""summary.json: exact keys, means of scored values only, redone steps counted once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.records import Span
from offbeat.track.drift import DriftWatch
from offbeat.track.metrics import MetricsWriter, read_metrics
from offbeat.track.summary import RunStats, build_summary, write_summary

KEYS = {
    "status", "steps", "wall_seconds", "groups", "staleness", "validation", "rewards",
    "throughput", "busy", "overlap", "sync", "drift", "health", "anchors", "starts",
    "store_seconds",
}  # fmt: skip


def record(step: int, judge: float | None, scored: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "type": "step", "step": step, "time": 1000.0 + step, "version": f"1.{step}",
        "seconds": 0.9, "wait_seconds": 0.1,
        "reward": {"total": judge, "judge": judge, "correct": 1.0},
        "scored": {
            "judge": {"scored": scored, "abstained": 1, "failed": {"timeout": 2}},
            "correct": {"scored": 8, "abstained": 0, "failed": {}},
        },
        "staleness": {"mean": 0.5, "max": 1, "histogram": {"0": 4, "1": 4}},
        "loss": 0.1, "grad_norm": 1.0, "learning_rate": 1e-6, "ratio_mean": 1.0,
        "clip_fraction": 0.0, "logprob_diff_mean": 0.0, "tokens": 100, "generated_tokens": 150,
        "groups": 2, "no_signal": 0, "applied": True,
        "groups_counts": {"admitted": 2 * step + 6, "trained": 2 * step + 2,
                          "discarded": {"min_scored": 1}, "live": 3},
        "loop_lag_ms": 1.0, "store_seconds": 0.25,
    } | more  # fmt: skip


def test_a_finished_run() -> None:
    stats = RunStats(bound=2, started=1000.0)
    for step in range(20):
        stats.step(record(step, judge=step / 10, scored=1 + 3 * (step % 2)))
    stats.validation({"step": 10, "version": "1.10", "metrics": {"accuracy": 0.5}})
    stats.validation({"step": 0, "version": "1.0", "metrics": {"accuracy": 0.25, "n": 40}})
    for pause in (0.1, 0.3):
        stats.sync({"version": "1.1", "replica": 0, "start": 1, "end": 2, "pause_seconds": pause})
    stats.spans([Span("train", 0, "train", 1000 + t, 1001 + t, 1.0) for t in range(20)])
    stats.spans([Span("rollout", 0, "decode", 1000, 1020, 10.0, tokens=9)])
    summary = build_summary(stats, status="finished", now=1020.0)
    assert set(summary) == KEYS
    assert summary["steps"] == 20
    assert summary["wall_seconds"] == 20
    assert summary["groups"] == {
        "admitted": 44, "trained": 40, "discarded": {"min_scored": 1}, "live": 3,
    }  # fmt: skip
    assert summary["staleness"] == {"max": 1, "mean": 0.5, "bound": 2}
    assert [v["step"] for v in summary["validation"]] == [0, 10]
    assert summary["validation"][0]["metrics"] == {"accuracy": 0.25, "n": 40}
    judge = summary["rewards"]["judge"]
    assert judge["scored"] == 50
    assert judge["abstained"] == 20
    assert judge["failed"] == {"timeout": 40}
    assert judge["mean_first"] == pytest.approx((0.0 * 1 + 0.1 * 4) / 5)
    assert judge["mean_last"] == pytest.approx((1.8 * 1 + 1.9 * 4) / 5)
    assert set(summary["rewards"]) == {"judge", "correct"}
    assert summary["throughput"] == {
        "trained_tokens_per_s": 100.0, "generated_tokens_per_s": 150.0,
    }  # fmt: skip
    assert summary["busy"] == pytest.approx({"train": 1.0, "rollout": 0.5})
    assert summary["overlap"]["train_and_rollout"] == pytest.approx(0.5)
    assert summary["overlap"]["n_train_spans"] == 18
    assert summary["sync"]["n"] == 2
    assert summary["sync"]["pause_mean_s"] == pytest.approx(0.2)
    assert summary["sync"]["pause_max_s"] == 0.3
    assert summary["sync"]["engines"] == {"0": {"n": 2, "pause_median_s": pytest.approx(0.2)}}
    assert stats.boundary.errors == 0


def test_drift_is_counted_by_cause_and_its_last_sentence_kept() -> None:
    stats = RunStats(bound=2, started=1000.0)
    said = [None, "temperature: 1.4 times", "temperature: 1.5 times", "stale KV cache: x", None]
    for step, drift in enumerate(said):
        stats.step(
            record(
                step, 0.5, drift=drift, logprob_diff_mean=float(step), logprob_diff_exact=step < 3
            )
        )
    stats.step(record(5, 0.5, logprob_diff_mean=None))  # nothing was compared
    summary = build_summary(stats, status="finished", now=1010.0)
    assert summary["drift"] == {
        "steps": 3,
        "causes": {"temperature": 2, "stale KV cache": 1},
        "last": "stale KV cache: x",
        "compared_steps": 3,
        "logprob_diff_mean": 1.0,
    }


def test_drift_is_said_when_it_begins_and_when_it_ends() -> None:
    watch = DriftWatch()
    said = ["a: 1", "a: 2", None, "a: 3", "b: 1", "a: 4", None, None, None, None, "a: 5"]
    lines = [watch.step(step, diagnosis) for step, diagnosis in enumerate(said)]
    assert [(step, line) for step, line in enumerate(lines) if line] == [
        (0, "drift at step 1: a: 1"),
        (4, "drift at step 5: b: 1"),
        (8, "drift has ended (a, b): engine and trainer agree for 3 steps"),
        (10, "drift at step 11: a: 5"),
    ]


def test_nothing_scored_is_no_value_and_not_zero() -> None:
    stats = RunStats(bound=2, started=1000.0)
    stats.step(record(0, judge=None, scored=0))
    stats.step(record(1, judge=0.7))
    judge = build_summary(stats, status="finished", now=1002.0)["rewards"]["judge"]
    assert judge["mean_first"] is None
    assert judge["mean_last"] == pytest.approx(0.7)


def test_a_redone_step_counts_once() -> None:
    stats = RunStats(bound=2, started=1000.0)
    for step in (0, 1, 2, 1, 2):
        stats.step(record(step, judge=0.5))
    summary = build_summary(stats, status="finished", now=1010.0)
    assert summary["steps"] == 3
    assert summary["rewards"]["judge"]["scored"] == 12
    assert summary["store_seconds"] == 0.75


def test_a_failed_run_says_why_and_how_far_it_came() -> None:
    stats = RunStats(bound=2, started=1000.0)
    empty = build_summary(stats, status="failed", now=1001.0, error="no engine")
    assert set(empty) == KEYS | {"error", "last_good_step"}
    assert empty["last_good_step"] is None
    assert empty["staleness"] == {"max": None, "mean": None, "bound": 2}
    assert empty["rewards"] == {}
    stats.step(record(0, judge=0.5))
    stats.step(record(1, judge=0.5, applied=False))
    failed = build_summary(stats, status="failed", now=1002.0, error="loss is NaN")
    assert failed["error"] == "loss is NaN"
    assert failed["last_good_step"] == 0
    assert build_summary(stats, status="failed", now=1.0, error="x", last_good_step=7)[
        "last_good_step"
    ] == 7  # fmt: skip


def test_a_resumed_run_counts_the_earlier_part(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(record(0, judge=0.1))
    writer.write(record(1, judge=0.2))
    writer.spans([Span("train", 0, "train", 0, 1, 1.0)])
    writer.write({"type": "sync", "pause_seconds": 0.5})
    writer.write({"type": "validation", "step": 0, "version": "1.0", "metrics": {"accuracy": 0.1}})
    writer.close()
    stats = RunStats(bound=2, started=5000.0)
    for line in read_metrics(writer.path):
        stats.feed(line)
    stats.step(record(1, judge=0.3, time=5005.0))
    summary = build_summary(stats, status="finished", now=5010.0)
    assert summary["steps"] == 2
    assert summary["rewards"]["judge"]["mean_last"] == pytest.approx(0.3)
    assert summary["throughput"]["trained_tokens_per_s"] == pytest.approx(10.0)
    assert summary["sync"]["n"] == 1
    assert len(summary["validation"]) == 1


def test_a_bad_record_never_raises() -> None:
    stats = RunStats(bound=2, started=0.0)
    stats.step({"type": "step"})
    stats.validation({})
    stats.sync({})
    assert stats.boundary.errors == 3


def test_the_file_is_whole_json_and_replaces_the_last(tmp_path: Path) -> None:
    write_summary(tmp_path, {"status": "failed", "x": float("nan")})
    write_summary(tmp_path, {"status": "finished", "error": "é"})
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "status": "finished", "error": "é",
    }  # fmt: skip
    write_summary(tmp_path, {"status": "failed", "error": "half \ud83d"})
    assert json.loads((tmp_path / "summary.json").read_text())["error"] == "half ?"
    with pytest.raises(OSError, match="nowhere"):
        write_summary(tmp_path / "nowhere", {})


def test_a_step_that_a_crash_left_untold_is_done_all_the_same() -> None:
    stats = RunStats(bound=2, started=0.0)
    stats.feed({"type": "start", "started": 0.0, "step": 0, "lineage": 0, "time": 0.0})
    assert build_summary(stats, status="failed", now=1.0)["steps"] == 0
    stats.feed({"type": "start", "started": 2.0, "step": 3, "lineage": 1, "time": 2.0})
    assert build_summary(stats, status="finished", now=3.0)["steps"] == 3
