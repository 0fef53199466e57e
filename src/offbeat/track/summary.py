"""summary.json: what a run came to, from its step records, validations, syncs and spans.

A step that is trained again after a restart replaces its first record, so nothing counts twice.
Means are over scored values only: a failed or abstained reward enters none of them.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from offbeat.records import Span
from offbeat.texts import writable
from offbeat.track.drift import drift_summary
from offbeat.track.health import WINDOW
from offbeat.track.metrics import TelemetryBoundary, plain, write_whole
from offbeat.track.overlap import busy, overlap, steady_window
from offbeat.track.starts import Starts
from offbeat.track.truth import truth_agreement

SPAN_LIMIT = 200_000  # newest spans that busy and overlap are made of: about 60 MB
FILE_NAME = "summary.json"
WARNINGS_KEPT = 100
ANCHOR_KEYS = frozenset({"type", "time", "source"})
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Step:
    """What the summary needs of one step record."""

    time: float
    tokens: int
    generated: int
    applied: bool
    means: Mapping[str, float | None]
    scored: Mapping[str, int]
    abstained: Mapping[str, int]
    failed: Mapping[str, Mapping[str, int]]
    staleness: Mapping[int, int]
    staleness_max: int | None
    drift: str | None
    difference: float | None
    store: float


class RunStats:
    """Collects what `build_summary` needs. Its feeding methods never raise (telemetry).

    `bound` is max_staleness in steps, `started` the process's start in seconds of `time.time()`.
    To resume, feed the records of the run's metrics.jsonl first, by `feed`: steps, rewards,
    staleness, validations, syncs, wall time and throughput are then of the whole run (without the
    time between two starts); busy and overlap are of what happened since `started`. Spans are kept
    up to `SPAN_LIMIT`, newest ones.
    """

    def __init__(self, bound: int, started: float) -> None:
        self.bound = bound
        self.started = started
        self.boundary = TelemetryBoundary(FILE_NAME)
        self.steps: dict[int, _Step] = {}
        self.groups: dict[str, Any] = {"admitted": 0, "trained": 0, "discarded": {}, "live": 0}
        self.outcomes: dict[str, dict[str, Any]] = {}  # of reward sources; else from the steps
        self.validations: dict[int, dict[str, Any]] = {}
        self.pauses: list[tuple[int, float]] = []  # of (engine, seconds), one a sync
        self.health: dict[int, Mapping[str, Any]] = {}  # of the first full window, and the newest
        self.warnings: list[dict[str, Any]] = []
        self.looks: dict[str, list[dict[str, Any]]] = {}  # at anchors: the first and the newest
        self.look_counts: Counter[str] = Counter()
        self.starts = Starts()
        self._spans: deque[Span] = deque(maxlen=SPAN_LIMIT)

    @property
    def recent_spans(self) -> list[Span]:
        """The spans kept that ended since `started`."""
        return [span for span in self._spans if span.end > self.started]

    @property
    def steps_done(self) -> int:
        """Steps that were told, or that a start found done: a crash may come before one is told."""
        told = (step + 1 for step in self.steps)
        return max([0, *told, *(start.step for start in self.starts.found)])

    @property
    def last_good_step(self) -> int | None:
        """The newest step whose update was applied; None if there is none."""
        return max((step for step, kept in self.steps.items() if kept.applied), default=None)

    def feed(self, record: Record) -> None:
        """Take any record of metrics.jsonl; spans and most events are passed over."""
        with self.boundary:
            self.starts.feed(record)
        match record.get("type"):
            case "step":
                self.step(record)
            case "validation":
                self.validation(record)
            case "sync":
                self.sync(record)
            case "anchors":
                self.anchors(record)
            case "event":
                self.warning(record)

    def step(self, record: Record) -> None:
        """Take the record of one trainer step."""
        with self.boundary:
            kept, before = _kept(record), self.steps.get(record["step"])
            if before is not None:  # done again: what was generated for it in between is no less
                kept = replace(kept, generated=kept.generated + before.generated)
            self.steps[record["step"]] = kept
            self.groups = dict(record["groups_counts"])
            if record.get("health"):
                self._note_health(record["step"], record["health"])

    def _note_health(self, step: int, health: Mapping[str, Any]) -> None:
        """Keeps the first window that is full, and the newest; one of a step done again is new."""
        known = {**self.health, step: health}
        full = sorted(number for number, of in known.items() if of["steps"] >= WINDOW)
        self.health = {number: known[number] for number in sorted({*full[:1], max(known)})}

    def warning(self, record: Record) -> None:
        """Take an event; one about a source's health has `health`."""
        with self.boundary:
            if record.get("health"):
                self.warnings = [*self.warnings, dict(record["health"])][-WARNINGS_KEPT:]

    def anchors(self, record: Record) -> None:
        """Take the record of a look at a source's anchors."""
        with self.boundary:
            source = str(record["source"])
            look = {key: value for key, value in record.items() if key not in ANCHOR_KEYS}
            self.looks[source] = [*self.looks.get(source, ())[:1], look]
            self.look_counts[source] += 1

    def validation(self, record: Record) -> None:
        """Take a validation record: step, version, who answered, metrics."""
        with self.boundary:
            self.validations[record["step"]] = {
                "step": record["step"],
                "version": str(record["version"]),
                "by": record.get("by", "rollout"),
                "metrics": dict(record["metrics"]),
            }

    def sync(self, record: Record) -> None:
        """Take a weight sync's record: pause_seconds of one engine."""
        with self.boundary:
            self.pauses.append((int(record.get("replica", 0)), float(record["pause_seconds"])))

    def spans(self, spans: Iterable[Span]) -> None:
        """Take spans."""
        self._spans.extend(spans)


def _kept(record: Record) -> _Step:
    """`scored` of a record is {source: {"scored": n, "abstained": n, "failed": {cause: n}}}."""
    outcomes = record["scored"]
    reward = record["reward"]
    staleness = record["staleness"]
    return _Step(
        time=float(record["time"]),
        tokens=int(record["tokens"]),
        generated=int(record["generated_tokens"]),
        applied=bool(record["applied"]),
        means={name: value for name, value in reward.items() if name != "total"},
        scored={name: counts["scored"] for name, counts in outcomes.items()},
        abstained={name: counts["abstained"] for name, counts in outcomes.items()},
        failed={name: counts["failed"] for name, counts in outcomes.items()},
        staleness={int(key): count for key, count in staleness["histogram"].items()},
        staleness_max=staleness["max"],
        drift=record.get("drift"),
        difference=_difference(record),
        store=float(record.get("store_seconds", 0.0)),
    )


def _difference(record: Record) -> float | None:
    """The mean |trainer - engine| of a step that was compared under the tokens' own weights."""
    value = record.get("logprob_diff_mean")
    if value is None or not math.isfinite(value) or not record.get("logprob_diff_exact", True):
        return None
    return float(value)


def build_summary(
    stats: RunStats,
    *,
    status: str,
    now: float,
    error: str | None = None,
    last_good_step: int | None = None,
    replicas: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The summary as a dict of plain values. `now` is in seconds of `time.time()`.

    With an `error` (a failed run) the keys `error` and `last_good_step` are added; the latter is
    by default the newest step (the first is 0) whose update was applied. `replicas`
    is that of `overlap.busy`.
    """
    steps = [stats.steps[step] for step in sorted(stats.steps)]
    wall = max(0.0, now - stats.started) + stats.starts.earlier_seconds()
    first = stats.started if stats.starts.first is None else stats.starts.first
    spans = stats.recent_spans
    window = steady_window(spans) or _whole(spans)
    summary: dict[str, Any] = {
        "status": status,
        "steps": stats.steps_done,
        "wall_seconds": wall,
        "starts": stats.starts.table(now, status),
        "groups": stats.groups,
        "staleness": _staleness(steps, stats.bound),
        "validation": [stats.validations[step] for step in sorted(stats.validations)],
        "rewards": _rewards(steps, stats.outcomes),
        "throughput": _throughput(steps, first, wall),
        "busy": busy(spans, *window, replicas),
        "overlap": overlap(spans, *window),
        "store_seconds": math.fsum(step.store for step in steps),
        "sync": _sync(stats.pauses),
        "drift": drift_summary([(step.drift, step.difference) for step in steps]),
        "health": _health(stats),
        "anchors": {
            name: {"looks": stats.look_counts[name], "first": looks[0], "last": looks[-1]}
            for name, looks in sorted(stats.looks.items())
        },
    }
    if error is not None:
        summary["error"] = error
        good = stats.last_good_step if last_good_step is None else last_good_step
        summary["last_good_step"] = good
    values: dict[str, Any] = plain(summary)
    return values


def _health(stats: RunStats) -> dict[str, Any]:
    """The sources' health over the first and the last window of steps, and what was warned of."""
    first, last = min(stats.health, default=None), max(stats.health, default=None)
    return {
        "first": None if first is None else {"step": first, **stats.health[first]},
        "last": None if last is None else {"step": last, **stats.health[last]},
        "truth": truth_agreement(
            stats.validations[step]["metrics"] for step in sorted(stats.validations)
        ),
        "warnings": stats.warnings,
    }


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write `<run_dir>/summary.json` by an atomic rename; OSError if that fails."""
    text = json.dumps(plain(summary), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_whole(run_dir / FILE_NAME, writable(text))


def _whole(spans: Sequence[Span]) -> tuple[float, float]:
    start = min((span.start for span in spans), default=0.0)
    return start, max((span.end for span in spans), default=0.0)


def _staleness(steps: Sequence[_Step], bound: int) -> dict[str, float | int | None]:
    total: dict[int, int] = {}
    for step in steps:
        for value, count in step.staleness.items():
            total[value] = total.get(value, 0) + count
    samples = sum(total.values())
    weighted = sum(value * count for value, count in total.items())
    return {
        "max": max((s.staleness_max for s in steps if s.staleness_max is not None), default=None),
        "mean": weighted / samples if samples else None,
        "bound": bound,
    }


def _rewards(
    steps: Sequence[_Step], outcomes: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Counts from `outcomes` where they are known, which hold discarded groups too."""
    names = {name for step in steps for name in (*step.means, *step.scored)} | set(outcomes)
    tenth = max(1, len(steps) // 10)
    result: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        failed: dict[str, int] = {}
        for step in steps:
            for cause, count in step.failed.get(name, {}).items():
                failed[cause] = failed.get(cause, 0) + count
        result[name] = {
            "scored": sum(step.scored.get(name, 0) for step in steps),
            "abstained": sum(step.abstained.get(name, 0) for step in steps),
            "failed": failed,
            **outcomes.get(name, {}),
            "mean_first": _mean(name, steps[:tenth]),
            "mean_last": _mean(name, steps[-tenth:]),
        }
    return result


def _mean(name: str, steps: Sequence[_Step]) -> float | None:
    """Mean of a source's scored values, each step's mean weighted by how many it is of."""
    total, count = 0.0, 0
    for step in steps:
        mean, scored = step.means.get(name), step.scored.get(name, 0)
        if mean is not None and scored > 0:
            total += mean * scored
            count += scored
    return total / count if count else None


def _throughput(steps: Sequence[_Step], started: float, wall: float) -> dict[str, float]:
    recent = [step for step in steps if step.time >= started]
    seconds = wall or 1.0
    return {
        "trained_tokens_per_s": sum(step.tokens for step in recent) / seconds,
        "generated_tokens_per_s": sum(step.generated for step in recent) / seconds,
    }


def _sync(pauses: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """How long generation stood still for a weight sync: over all, and of each engine."""
    all_of_them = [seconds for _, seconds in pauses]
    engines = {
        replica: [seconds for which, seconds in pauses if which == replica]
        for replica in sorted({replica for replica, _ in pauses})
    }
    return {
        "n": len(pauses),
        "pause_mean_s": sum(all_of_them) / len(pauses) if pauses else None,
        "pause_max_s": max(all_of_them, default=None),
        "engines": {
            str(replica): {"n": len(found), "pause_median_s": median(found)}
            for replica, found in engines.items()
        },
    }
