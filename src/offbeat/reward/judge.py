"""What a judge is to its reward source: whoever gives a verdict on a rendered text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from offbeat.records import Span


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's words, how they ended ("stop", "length"), and what they cost.

    `retries` and tokens are those of all calls that it took, `seconds` from asking to the answer.
    """

    text: str
    finish_reason: str = "stop"
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    cached: bool = False

    def free(self) -> Verdict:
        """The same for one who asked while another's call was under way: that one pays for it."""
        return replace(self, retries=0, prompt_tokens=0, completion_tokens=0)


@dataclass(frozen=True, slots=True)
class Weighed:
    """How likely each of some verdicts is as the judge's next words, in their order.

    They sum to at most 1: the rest is what the judge would say instead. `verdict` is what it said
    (its `text` the likeliest or sampled one) and what that cost.
    """

    probabilities: tuple[float, ...]
    verdict: Verdict

    def free(self) -> Weighed:
        """As `Verdict.free`."""
        return replace(self, verdict=self.verdict.free())


class VerdictBackend(Protocol):
    """Whoever gets a verdict on a text; raises `CallFailed` where there is none."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """The judge's special tokens as text, known once started; empty for a server."""
        ...

    @property
    def identity(self) -> str:
        """The model and its version: verdicts of equal identity may stand for one another."""
        ...

    @property
    def down_since(self) -> float | None:
        """Since when (the event loop's time) there is nobody to ask; None if there is."""
        ...

    def facts(self) -> Mapping[str, float]:
        """Running numbers for metrics (limit, ...)."""
        ...

    async def start(self) -> None:
        """Ready when this returns."""
        ...

    async def verdict(self, text_prompt: str, *, vote: int = 0, criteria: int = 0) -> Verdict:
        """The judge's words on one rendered text; `vote` tells draws of one text apart.

        `criteria` is how many a rubric has for this text: the verdict's form depends on it
        (`structure_of`, `server_fields`).
        """
        ...

    async def weigh(self, text_prompt: str, verdicts: Sequence[str]) -> Weighed:
        """The probability of each of the verdicts, from the judge's log-probs (temperature 1)."""
        ...

    async def drain_spans(self) -> list[Span]:
        """Compute spans since the last call."""
        ...

    async def stop(self) -> None:
        """Ends what was started."""
        ...
