"""What a scored file comes to, by source: the table that `offbeat score` ends with (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.reward.stats import SourceStats

HEAD = (
    "source", "scored", "abstained", "failed", "mean", "calls", "cached", "tokens", "calls/s",
)  # fmt: skip
_REASON_SHOWN = 160


class Tally:
    """Counts of one source over the rows of a file."""

    def __init__(self) -> None:
        self.scored = self.abstained = 0
        self.failed: Counter[str] = Counter()
        self.first: dict[str, tuple[int, str]] = {}
        self.mean: float | None = None

    def add(self, line: int, outcome: Mapping[str, Any]) -> None:
        """Counts the outcome of the row at a line."""
        if outcome["status"] == "scored":
            self.scored += 1
            before = self.mean or 0.0
            self.mean = before + (outcome["value"] - before) / self.scored
        elif outcome["status"] == "abstained":
            self.abstained += 1
        else:
            cause = outcome["cause"] or "unknown"
            self.failed[cause] += 1
            self.first.setdefault(cause, (line, outcome["reason"]))


class Tallies:
    """Counts of all sources, and of the totals."""

    def __init__(self, sources: Sequence[str], into: str) -> None:
        self.of = {name: Tally() for name in sources}
        self._into = into
        self.rows = self.rewarded = 0
        self.mean: float | None = None

    def add(self, line: int, result: Mapping[str, Any]) -> None:
        """Counts a row's result."""
        self.rows += 1
        total = result[self._into]
        if total is not None:
            self.rewarded += 1
            before = self.mean or 0.0
            self.mean = before + (total - before) / self.rewarded
        for name, outcome in result[f"{self._into}s"].items():
            if outcome is not None:
                self.of[name].add(line, outcome)

    def text(self, stats: Mapping[str, SourceStats], seconds: float) -> str:
        """The table. `stats` are of what was scored in these `seconds`: calls, those that the
        verdict cache answered, tokens."""
        mean = "" if self.mean is None else f", mean {self.mean:.4g}"
        lines = [f"{self.rows} rows, {self.rewarded} with a reward{mean}"]
        table = [HEAD, *(self._row(name, stats.get(name), seconds) for name in self.of)]
        widths = [max(len(row[column]) for row in table) for column in range(len(HEAD))]
        for row in table:
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join(cells).rstrip())
        for name, tally in self.of.items():
            for cause, count in tally.failed.most_common():
                line, reason = tally.first[cause]
                said = " ".join(reason.split())[:_REASON_SHOWN]
                why = f"{name} failed({cause}) {count}, first at line {line}"
                lines.append(f"{why}: {said}" if said else why)
        return "\n".join(lines)

    def _row(self, name: str, stats: SourceStats | None, seconds: float) -> tuple[str, ...]:
        tally = self.of[name]
        mean = "-" if tally.mean is None else f"{tally.mean:.4g}"
        counts = (str(tally.scored), str(tally.abstained), str(tally.failed.total()), mean)
        if stats is None:
            return (name, *counts, *["-"] * 4)
        answers = stats.scored + stats.abstained + sum(stats.failed.values())
        calls = stats.calls - stats.cached if stats.calls else answers
        tokens = stats.prompt_tokens + stats.completion_tokens
        costs = (str(count) if stats.calls else "-" for count in (stats.cached, tokens))
        return (name, *counts, str(calls), *costs, f"{calls / max(seconds, 1e-9):.1f}")
