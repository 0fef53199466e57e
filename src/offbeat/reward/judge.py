"""What a judge is to its reward source: whoever gives a verdict on a rendered text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from offbeat.records import Span


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's words, how they ended ("stop", "length"), and the retries they took."""

    text: str
    finish_reason: str = "stop"
    retries: int = 0


class VerdictBackend(Protocol):
    """Whoever gets a verdict on a text; raises `CallFailed` where there is none."""

    async def start(self) -> None:
        """Ready when this returns."""
        ...

    async def verdict(self, text_prompt: str) -> Verdict:
        """The judge's words on one rendered text."""
        ...

    async def drain_spans(self) -> list[Span]:
        """Compute spans since the last call."""
        ...

    async def stop(self) -> None:
        """Ends what was started."""
        ...
