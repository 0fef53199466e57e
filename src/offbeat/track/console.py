"""The run as text: one line a step, and a line for each phase. Never raises into training.

A step is one line, so that it can be searched for; with a `width`, a line that does not fit goes
on, indented, in the next one, broken between facts.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from offbeat.records import Span
from offbeat.texts import writable
from offbeat.track.metrics import TelemetryBoundary
from offbeat.track.overlap import busy

logger = logging.getLogger(__name__)

RECENT_STEPS = 20  # steps whose pace the time left is estimated from
SPANS_A_LINE = 50_000  # newest ones kept for the next line
SATURATED = 0.6  # of the time: a role that computes so much can be called a bottleneck
WAITS_LITTLE = 0.1  # of the time: a trainer that waits so little is itself the bottleneck
INDENT = "        "
ANSWERED_BY = {"dedicated": " by engines of its own", "train": " by the trainer"}
COUNTS = frozenset({"n", "unscored", "failed"})
"""Metrics of a validation that count, by the name before the slash."""
Record = Mapping[str, Any]


class Console:
    """Writes lines to `stream`, or to this module's logger (level info) if it is None.

    `total_steps` is the number of steps (None: unknown). `clock` gives seconds of `time.time()`.
    """

    def __init__(
        self,
        total_steps: int | None,
        stream: TextIO | None = None,
        *,
        width: int | None = None,
        clock: Callable[[], float] = time.time,
        replicas: Mapping[str, int] | None = None,
        started: float | None = None,
    ) -> None:
        self._total = total_steps
        self._stream = stream
        self._width = width
        self._clock = clock
        self._replicas = dict(replicas or {})
        self._last = clock()
        self._started = self._last if started is None else started
        self._paces: deque[float] = deque(maxlen=RECENT_STEPS)
        self._spans: deque[Span] = deque(maxlen=SPANS_A_LINE)
        self._validation: float | None = None
        self._boundary = TelemetryBoundary("console")

    def say(self, message: str) -> None:
        """One line with the time elapsed: a phase of the run, progress of a validation."""
        with self._boundary:
            self._write(f"[{duration(self._clock() - self._started)}] {message}")

    def spans(self, spans: Iterable[Span]) -> None:
        """Take spans for the next line's shares of time."""
        self._spans.extend(spans)

    def validation(self, record: Record) -> None:
        """Take a validation record: its own line, and its accuracy on the next step's line."""
        with self._boundary:
            metrics = record["metrics"]
            self._validation = metrics.get("accuracy")
            shown = ", ".join(f"{name} {_metric(name, value)}" for name, value in metrics.items())
            by = ANSWERED_BY.get(record.get("by", "rollout"), "")
            self.say(f"validation of version {record['version']}{by}: {shown}")

    def step(self, record: Record) -> None:
        """The line of one step, from its step record. Step 0 is the first: it shows as step 1/N."""
        with self._boundary:
            now = self._clock()
            wall = max(now - self._last, 1e-9)
            shares = busy(list(self._spans), self._last, now, self._replicas)
            waits = min(1.0, record["wait_seconds"] / wall)
            self._paces.append(wall)
            done = record["step"] + 1
            facts = [self._place(done), _rewards(record["reward"])]
            if self._validation is not None:
                facts.append(f"acc {_number(self._validation)}")
                self._validation = None
            facts += [
                _staleness(record["staleness"]),
                f"{_count(record['tokens'] / wall)} tok/s",
                self._times(done, now),
            ]
            if shares:
                computes = (f"{short(role)} {_percent(shares[role])}" for role in sorted(shares))
                facts.append("computes: " + ", ".join(computes))
            facts.append(bottleneck(shares, waits))
            lost = sum(record.get("groups_counts", {}).get("discarded", {}).values())
            if lost:
                facts.append(f"{lost} groups discarded so far")
            if not record["applied"]:
                facts.append("update not applied")
            self._last = now
            self._forget(now)
            self._write(*facts)

    def _forget(self, now: float) -> None:
        """Keep only the spans that reach into the next line's time."""
        later = [span for span in self._spans if span.end > now]
        self._spans.clear()
        self._spans.extend(later)

    def _place(self, done: int) -> str:
        if self._total is None:
            return f"step {done}"
        return f"step {done:>{len(str(self._total))}}/{self._total}"

    def _times(self, done: int, now: float) -> str:
        elapsed = duration(now - self._started)
        if self._total is None:
            return elapsed
        pace = sum(self._paces) / len(self._paces)
        return f"{elapsed}, {duration(max(0, self._total - done) * pace)} left"

    def _write(self, *facts: str) -> None:
        lines = ["  ".join(facts)] if self._width is None else wrap(facts, self._width)
        if self._stream is None:
            for line in lines:
                logger.info("%s", line)
            return
        self._stream.write(writable("".join(line + "\n" for line in lines)))
        self._stream.flush()


def bottleneck(shares: Mapping[str, float], waits: float) -> str:
    """In words, what holds the run up, from each role's share of time computing (0..1).

    `waits` is the share of the time that the trainer waited for its batch.
    """
    if waits <= WAITS_LITTLE:
        computes = f"computes {_percent(shares['train'])}, " if "train" in shares else ""
        return f"trainer is the bottleneck: {computes}waits {_percent(waits)}"
    others = {role: share for role, share in shares.items() if role not in ("train", "validate")}
    if not others:
        return f"trainer waits {_percent(waits)}"
    role = max(others, key=lambda name: others[name])
    if others[role] >= SATURATED:
        name, share = short(role), _percent(others[role])
        return f"{name} is the bottleneck: computes {share}, trainer waits {_percent(waits)}"
    return f"no role is saturated: trainer waits {_percent(waits)}"


def wrap(facts: Iterable[str], width: int) -> list[str]:
    """Facts on lines of at most `width` columns; one that is longer breaks at a space."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + 2 + len(fact) <= width:
            lines[-1] += "  " + fact
            continue
        line = INDENT if lines else ""
        for word in fact.split(" "):
            space = " " if line.strip() else ""
            if line.strip() and len(line) + len(space) + len(word) > width:
                lines.append(line)
                line, space = INDENT, ""
            line += space + word
        lines.append(line)
    return lines


def short(role: str) -> str:
    """A role's name as the console says it: `reward/judge` is judge, `train` is trainer."""
    return "trainer" if role == "train" else role.removeprefix("reward/")


def duration(seconds: float) -> str:
    """Minutes and seconds, 2:05; from an hour on with hours, 1:02:05."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _rewards(reward: Mapping[str, float | None]) -> str:
    sources = ", ".join(
        f"{name} {_number(value, 2)}" for name, value in reward.items() if name != "total"
    )
    text = f"reward {_number(reward.get('total'), 2)}"
    return f"{text} ({sources})" if sources else text


def _staleness(staleness: Mapping[str, Any]) -> str:
    mean, top = staleness["mean"], staleness["max"]
    return "stale -" if mean is None or top is None else f"stale {mean:.1f}/{top}"


def _metric(name: str, value: Any) -> str:
    """A validation's metric, counts without places; nan is the mean of nothing."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.0f}" if name.partition("/")[0] in COUNTS else _number(value)


def _number(value: Any, places: int = 3) -> str:
    """A value to some places; a dash for none, because a missing value is not 0."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.{places}f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def _count(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
