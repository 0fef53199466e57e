"""The protocol of a reward source: function, genrm and disrm stand behind it alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from offbeat.records import Reward, ScoreItem, Span
from offbeat.reward.parity import RowCheck


class RewardSource(Protocol):
    """A named source that turns samples into typed outcomes; it never raises for a sample."""

    @property
    def name(self) -> str:
        """The source's name in configuration, metrics and rewards."""
        ...

    async def start(self) -> None:
        """Ready to score when this returns; raises `UserError` for what the user must mend."""
        ...

    async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
        """One `Reward` per item, in order. Deadlines and retries are the source's own."""
        ...

    @property
    def down_since(self) -> float | None:
        """Since when (the event loop's time) nothing could be scored: no replica or server is
        there; calls wait meanwhile. None while the source serves."""
        ...

    def facts(self) -> Mapping[str, float]:
        """Running numbers about the source by name, for metrics (position_bias, limit, ...)."""
        ...

    async def drain_spans(self) -> list[Span]:
        """Compute spans since the last call."""
        ...

    async def stop(self) -> None:
        """Ends what the source started."""
        ...


@dataclass(frozen=True, slots=True)
class Logit:
    """What a scorer says to one text.

    `value` is the number that the source reads off the logits (`logits.Reading`), None where the
    text cannot be rendered, as `wrong` says, or is over length and the policy is to fail it; `raw`
    are all logits in words. `tokens` counts those of the whole text, `kept` those that were read.
    """

    value: float | None
    raw: str = ""
    tokens: int = 0
    kept: int = 0
    wrong: str = ""


class Scorer(Protocol):
    """A replica of a discriminative reward model: texts in, logits out."""

    async def start(self) -> None:
        """Loads the model."""
        ...

    async def logits(self, items: Sequence[ScoreItem]) -> list[Logit]:
        """What it says to each item, in order."""
        ...

    async def check_rows(self, items: Sequence[ScoreItem], *, reference: bool) -> RowCheck:
        """Scores a handful of rows, those of `items` among them, alone and together; with
        `reference` by plain transformers too. Raises `UserError` for a model it cannot score."""
        ...

    async def health(self) -> None:
        """Answers within milliseconds, also while it scores; raises what ended the scorer."""
        ...

    async def drain_spans(self) -> list[Span]:
        """Compute spans since the last call."""
        ...

    async def stop(self) -> None:
        """Frees the model."""
        ...
