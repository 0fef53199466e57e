"""The starts of one run, from its metrics.jsonl: when each began, where, how long it went.

A start that was killed has no `end` record: it lasted until the last record that it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]


@dataclass(slots=True)
class Start:
    """One start; times in seconds of `time.time()`. `status` None: it was killed, or goes on."""

    started: float
    step: int
    lineage: int
    last: float
    status: str | None = None


@dataclass(slots=True)
class Starts:
    """All starts so far, oldest first; the newest is the one that goes on."""

    found: list[Start] = field(default_factory=list)

    def feed(self, record: Record) -> None:
        """Takes any record of metrics.jsonl, in their order."""
        if record["type"] == "start":
            began = float(record["started"])
            self.found.append(Start(began, int(record["step"]), int(record["lineage"]), began))
        elif self.found:
            newest = self.found[-1]
            newest.last = max(newest.last, float(record.get("time", record.get("end", 0.0))))
            if record["type"] == "end":
                newest.status = str(record["status"])

    @property
    def first(self) -> float | None:
        """When the first known start began."""
        return self.found[0].started if self.found else None

    def earlier_seconds(self) -> float:
        """Seconds that all starts but the newest took."""
        return sum(start.last - start.started for start in self.found[:-1])

    def table(self, now: float, status: str) -> list[dict[str, Any]]:
        """For the summary: the newest start has gone on until `now`, and ends with `status`."""
        rows = []
        for start in self.found:
            newest = start is self.found[-1]
            rows.append(
                {
                    "time": start.started,
                    "from_step": start.step,
                    "lineage": start.lineage,
                    "wall_seconds": (now if newest else start.last) - start.started,
                    "status": status if newest else start.status or "killed",
                }
            )
        return rows
