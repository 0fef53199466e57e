"""What a run tells the world: console lines, metrics.jsonl, sample files and the summary."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from offbeat.config import RewardSourceSection
from offbeat.records import Batch, Reward, Span
from offbeat.track.console import Console
from offbeat.track.drift import DriftWatch
from offbeat.track.metrics import FILE_NAME, MetricsWriter, TelemetryBoundary, read_metrics
from offbeat.track.moments import mean
from offbeat.track.samples import SampleWriter
from offbeat.track.summary import FILE_NAME as SUMMARY
from offbeat.track.summary import RunStats, build_summary, write_summary
from offbeat.track.trust import Trust


class StepFacts(Protocol):
    """What the recorder reads of a trainer's step."""

    @property
    def applied(self) -> bool: ...
    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def no_signal(self) -> tuple[int, ...]: ...
    @property
    def staleness(self) -> tuple[int, ...]: ...
    @property
    def ratio_mean(self) -> float: ...
    @property
    def ratio_outside(self) -> float: ...
    @property
    def clip_fraction(self) -> float: ...
    @property
    def logprob_diff_mean(self) -> float: ...
    @property
    def logprob_diff_p99(self) -> float: ...
    @property
    def logprob_diff_max(self) -> float: ...
    @property
    def logprob_diff_outside(self) -> float: ...
    @property
    def logprob_diff_tokens(self) -> int: ...
    @property
    def logprob_diff_exact(self) -> bool: ...
    @property
    def drift(self) -> str | None: ...
    @property
    def seconds(self) -> float: ...


class SyncFacts(Protocol):
    """What the recorder reads of one engine's part of a publication."""

    @property
    def version(self) -> int: ...
    @property
    def replica(self) -> int: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def acknowledged(self) -> bool: ...
    @property
    def lineage(self) -> int: ...


class TallyFacts(Protocol):
    """What the recorder reads of the rollouter's numbers since the last step."""

    @property
    def generated_tokens(self) -> int: ...
    @property
    def loop_lag_seconds(self) -> float: ...
    @property
    def store_seconds(self) -> float: ...


class SourceFacts(Protocol):
    """What the recorder reads of a reward source's counts."""

    @property
    def scored(self) -> int: ...
    @property
    def abstained(self) -> int: ...
    @property
    def failed(self) -> Mapping[str, int]: ...
    @property
    def retries(self) -> int: ...
    @property
    def calls(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def spread(self) -> float | None: ...
    @property
    def facts(self) -> Mapping[str, float]: ...


class AnchorFacts(Protocol):
    """What the recorder reads of a look at a source's anchors."""

    @property
    def source(self) -> str: ...
    @property
    def warning(self) -> str | None: ...
    def record(self) -> dict[str, Any]: ...


class Recorder:
    """Feeds every sink. None of its methods raises into training.

    `replicas` says how many processes compute for a role (for shares of time); `started` is the
    launch, in seconds of `time.time()`; `sources` tell the reward sources' scales.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        bound: int,
        total_steps: int | None,
        stream: TextIO | None,
        replicas: Mapping[str, int],
        started: float,
        sources: Mapping[str, RewardSourceSection] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.started = started
        self._replicas = replicas
        self._metrics = MetricsWriter(run_dir)
        self._samples = SampleWriter(run_dir)
        self._drift = DriftWatch()
        self._trust = Trust(sources)
        self._boundary = TelemetryBoundary("health")
        self._counts_are_whole = True
        self._stats = RunStats(bound, self.started)
        self._console = Console(total_steps, stream, replicas=replicas, started=started)

    def recall(self) -> None:
        """Takes what earlier starts of this run have recorded; reads the disk."""
        self.rewards_begin_anew()
        with self._stats.boundary:
            for record in recorded(self.run_dir):
                self._stats.feed(record)
                with self._boundary:
                    self._trust.recall(record)

    def rewards_begin_anew(self) -> None:
        """Another rollouter than the run's first one counts what reward sources say."""
        self._counts_are_whole = False

    def begin(self, step: int, lineage: int) -> None:
        """This start begins with the weights after `step` steps."""
        record = {"type": "start", "started": self.started, "step": step, "lineage": lineage}
        self._metrics.write(record)
        self._stats.feed(record)

    @staticmethod
    def clock() -> float:
        """Seconds of `time.time()`."""
        return time.time()

    def say(self, message: str) -> None:
        """One line on the console and one event in the metrics."""
        self._console.say(message)
        self._metrics.event(message)

    def step(
        self,
        batch: Batch,
        result: StepFacts,
        wait_seconds: float,
        counts: Mapping[str, Any],
        spans: Sequence[Span],
        reports: Sequence[SyncFacts],
        tally: TallyFacts,
    ) -> None:
        """One trainer step: its line, its record, its samples."""
        self.tail(spans, reports, None)
        means, statuses = reward_record(batch)
        staleness = result.staleness
        record: dict[str, Any] = {
            "type": "step",
            "step": batch.step,
            "time": time.time(),
            "version": str(batch.step),
            "seconds": result.seconds,
            "wait_seconds": wait_seconds,
            "reward": means,
            **statuses,
            "staleness": {
                "mean": sum(staleness) / len(staleness) if staleness else None,
                "max": max(staleness, default=None),
                "histogram": {str(k): n for k, n in sorted(Counter(staleness).items())},
            },
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "ratio_mean": result.ratio_mean,
            "ratio_outside": result.ratio_outside,
            "clip_fraction": result.clip_fraction,
            "logprob_diff_mean": result.logprob_diff_mean,
            "logprob_diff_p99": result.logprob_diff_p99,
            "logprob_diff_max": result.logprob_diff_max,
            "logprob_diff_outside": result.logprob_diff_outside,
            "logprob_diff_tokens": result.logprob_diff_tokens,
            "logprob_diff_exact": result.logprob_diff_exact,
            "drift": result.drift or None,
            "tokens": result.tokens,
            "generated_tokens": tally.generated_tokens,
            "groups": len(batch.groups),
            "no_signal": len(result.no_signal),
            "applied": result.applied,
            "groups_counts": dict(counts),
            "loop_lag_ms": 1000 * tally.loop_lag_seconds,
            "store_seconds": tally.store_seconds,
            **self._trust_of(batch),
        }
        self._metrics.write(record)
        self._stats.step(record)
        self._console.step(record)
        told = self._drift.step(batch.step, record["drift"])
        if told is not None:
            self.say(told)
        self._samples.write(batch)

    def _trust_of(self, batch: Batch) -> dict[str, Any]:
        with self._boundary:
            return self._trust.step(batch)
        return {"health": None}  # it raised: telemetry is lost, and training goes on

    def tail(
        self, spans: Sequence[Span], reports: Sequence[SyncFacts], tally: TallyFacts | None
    ) -> None:
        """Spans and weight syncs since the last step."""
        self._metrics.spans(spans)
        self._stats.spans(spans)
        self._console.spans(spans)
        for report in reports:
            record = {
                "type": "sync",
                "version": report.version,
                "lineage": report.lineage,
                "replica": report.replica,
                "start": report.start,
                "end": report.end,
                "acknowledged": report.acknowledged,
                "pause_seconds": _pause(spans, report),
            }
            self._metrics.write(record)
            self._stats.sync(record)

    def books(self, counts: Mapping[str, Any], rewards: Mapping[str, SourceFacts]) -> None:
        """At the end, also of a failed run: the ledger's counts, and the reward sources' own,
        which hold also what was scored for groups that were discarded. After a resume, or the
        rollouter's death, these are not the whole run's: outcomes are counted over the steps."""
        self._stats.groups = dict(counts)
        found = {name: _outcome(source) for name, source in rewards.items()}
        if not self._counts_are_whole:
            left_out = ("scored", "abstained", "failed")
            found = {n: {k: v for k, v in o.items() if k not in left_out} for n, o in found.items()}
        self._stats.outcomes = found

    def validation(self, version: int, metrics: Mapping[str, float], by: str) -> None:
        """A validation pinned to one version; `by` says who answered: rollout, dedicated, train."""
        record = {
            "type": "validation",
            "step": version,
            "version": str(version),
            "by": by,
            "metrics": dict(metrics),
        }
        self._metrics.write(record)
        self._stats.validation(record)
        self._console.validation(record)
        with self._boundary:
            for warned in self._trust.validation(version, metrics):
                self._warn(warned.line, warned.record())

    def anchors(self, report: AnchorFacts) -> None:
        """A look at a reward source's anchors."""
        with self._boundary:
            record = {"type": "anchors", **report.record()}
            self._metrics.write(record)
            self._stats.anchors(record)
            if report.warning is not None:
                self._warn(report.warning, {"source": report.source, "line": report.warning})

    def _warn(self, line: str, health: Mapping[str, Any]) -> None:
        """A warning about a reward source's health: a line, and an event that says so."""
        self._console.say(line)
        event = {"type": "event", "message": line, "health": dict(health)}
        self._metrics.write(event)
        self._stats.warning(event)

    def close(self, status: str, error: str | None = None) -> dict[str, Any]:
        """Writes summary.json and ends the writers; returns the summary, empty if it failed."""
        self._metrics.write({"type": "end", "status": status})
        self._samples.close()
        self._metrics.close()
        summary: dict[str, Any] = {}
        with TelemetryBoundary(SUMMARY):
            summary = build_summary(
                self._stats, status=status, now=time.time(), error=error, replicas=self._replicas
            )
            write_summary(self.run_dir, summary)
        return summary


def recorded(run_dir: Path) -> Iterator[Mapping[str, Any]]:
    """What a run has recorded so far; reads the disk."""
    path = run_dir / FILE_NAME
    if path.exists():
        yield from read_metrics(path)


def _outcome(source: SourceFacts) -> dict[str, Any]:
    """Counts of a source, and what its judge's calls cost if it made any."""
    counts: dict[str, Any] = {
        "scored": source.scored,
        "abstained": source.abstained,
        "failed": dict(source.failed),
        "retries": source.retries,
    }
    if source.calls:
        counts |= {
            "calls": source.calls,
            "cached": source.cached,
            "prompt_tokens": source.prompt_tokens,
            "completion_tokens": source.completion_tokens,
            "seconds_mean": source.seconds,
        }
    if source.spread is not None:
        counts["spread_mean"] = source.spread
    return counts | ({"facts": dict(source.facts)} if source.facts else {})


def reward_record(batch: Batch) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Means by source over scored values only, and counts of the three outcomes by source."""
    totals: list[float] = []
    by_source: dict[str, list[Reward]] = {}
    for group in batch.groups:
        for sample in group.samples:
            if sample.total is not None:
                totals.append(sample.total)
            for name, reward in sample.rewards.items():
                by_source.setdefault(name, []).append(reward)
    means = {"total": _mean(totals)} | {
        name: _mean([r.value for r in rewards if r.value is not None])
        for name, rewards in by_source.items()
    }
    outcomes: dict[str, Any] = {}
    for name, rewards in by_source.items():
        causes = Counter(r.cause or "unknown" for r in rewards if r.status == "failed")
        outcomes[name] = {
            "scored": sum(r.status == "scored" for r in rewards),
            "abstained": sum(r.status == "abstained" for r in rewards),
            "failed": dict(causes),
        }
    return means, {"scored": outcomes}


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def _pause(spans: Sequence[Span], report: SyncFacts) -> float:
    """Seconds in which the engine generated nothing for this load, from its own spans."""
    return sum(
        span.end - span.start
        for span in spans
        if span.kind == "pause"
        and span.role == "rollout"  # engines of a validation load versions, too
        and span.replica == report.replica
        and span.version == report.version
    ) or (report.end - report.start)
