"""Health and truth of one run together, going on where its records end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.config import RewardSourceSection
from offbeat.records import Batch
from offbeat.track.health import Health
from offbeat.track.truth import TruthWatch, Warned


class Trust:
    """Takes steps and validations. What a step says by itself is in its record, as `evidence`, so
    that a run that goes on is told, and warned of, what it would have been without a break."""

    def __init__(self, sources: Mapping[str, RewardSourceSection] | None = None) -> None:
        self._health = Health(sources)
        self._truth = TruthWatch(self._health.deviation)

    def step(self, batch: Batch) -> dict[str, Any]:
        """Takes a step's batch; `health` and `evidence` of its record."""
        groups = self._truth.step(batch)
        health = self._health.step(batch)
        return {"health": health, "evidence": self._health.evidence() | {"groups": groups}}

    def validation(self, version: int, metrics: Mapping[str, float]) -> list[Warned]:
        """Takes a validation; what is new to be warned of."""
        return self._truth.validation(version, metrics)

    def recall(self, record: Mapping[str, Any]) -> None:
        """Takes a record of an earlier start; of a step without evidence nothing is known."""
        if record["type"] == "validation":
            known = {name: n for name, n in record["metrics"].items() if n is not None}
            self._truth.validation(record["step"], known)  # what it warns of was said then
        elif record["type"] == "step" and record.get("evidence"):
            self._truth.recall(record["step"], record["evidence"]["groups"])
            self._health.recall(record["step"], record["evidence"])
