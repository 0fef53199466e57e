"""Verdicts in a server's log-probs: pieces of text with their probabilities, added up (pure).

A server names the likeliest pieces at each place of what it wrote, as text. What a piece begins
with is a verdict, may become one, or is none. The probability of a verdict is that the judge's
words begin with it and with no longer one, as in `spelling`. Where a beginning could become
another verdict and no place was given behind it, it is open: `Tally.take` gives it out to be
followed, and what is still open at the end counts as what it is so far.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NEGLIGIBLE = 1e-4
"""The probability of a beginning that is not followed further."""

Place = tuple[str, Mapping[str, float]]
"""What was written at one place, and the probabilities of what could have been."""

_GOES_ON = re.compile(r"\w|[.,][0-9]")
"""Behind a verdict: it is another word or number."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Words with their probability; `verdict` is the number of the one that they are so far."""

    text: str = ""
    mass: float = 1.0
    verdict: int | None = None


class Tally:
    """Adds up how likely each of some verdicts is."""

    def __init__(self, verdicts: Sequence[str]) -> None:
        """Case is of no account, but for single letters and where verdicts differ by it alone."""
        lower = [verdict.lower() for verdict in verdicts]
        self._cased = [len(each) == 1 or lower.count(each) > 1 for each in lower]
        self._verdicts = [
            verdict if cased else verdict.lower()
            for verdict, cased in zip(verdicts, self._cased, strict=True)
        ]
        self._sums = [0.0] * len(lower)
        self._open: list[Beginning] = []

    @property
    def depth(self) -> int:
        """Characters of the longest verdict."""
        return max(map(len, self._verdicts), default=0)

    def add(self, places: Sequence[Place], begun: Beginning = Beginning()) -> None:
        """Counts what comes behind `begun`, along what was written there."""
        if not places:
            self._close(begun)
            return
        written, likely = places[0]
        left = begun.mass
        for piece, share in likely.items():
            found = self._read(begun.text + piece, begun.mass * share) if piece else None
            if found is None:
                continue
            left -= found.mass
            if not self._longer(found.text):
                self._close(found)
            elif piece == written and len(places) > 1:
                self.add(places[1:], found)
            else:
                self._open.append(found)
        if begun.verdict is not None:
            self._sums[begun.verdict] += max(0.0, left)

    def take(self) -> list[Beginning]:
        """What is open and counts; whoever takes it follows it (`add`)."""
        taken = [each for each in self._open if each.mass >= NEGLIGIBLE]
        self._open = [each for each in self._open if each.mass < NEGLIGIBLE]
        return taken

    def probabilities(self) -> tuple[float, ...]:
        """Of each verdict, in order; what is open counts as what it is so far."""
        for begun in self._open:
            self._close(begun)
        self._open.clear()
        return tuple(min(1.0, each) for each in self._sums)

    def _close(self, begun: Beginning) -> None:
        verdict = begun.verdict
        if verdict is None:
            reach = self._longer(begun.text)
            if len(reach) != 1:
                return  # several, and nobody knows how they share
            (verdict,) = reach
        self._sums[verdict] += begun.mass

    def _read(self, text: str, mass: float) -> Beginning | None:
        """What these words are, or may become; None for neither."""
        said = text.lstrip()
        within = [
            (len(verdict), number)
            for number, verdict in enumerate(self._verdicts)
            if self._same(number, said[: len(verdict)]) == verdict
        ]
        size, longest = max(within, default=(0, None))
        if _GOES_ON.match(said[size:]):
            longest = None
        if longest is None and not self._longer(text):
            return None
        return Beginning(text, mass, longest)

    def _longer(self, text: str) -> list[int]:
        """Verdicts that begin with these words and go on."""
        said = text.lstrip()
        return [
            number
            for number, verdict in enumerate(self._verdicts)
            if len(verdict) > len(said) and verdict.startswith(self._same(number, said))
        ]

    def _same(self, number: int, said: str) -> str:
        return said if self._cased[number] else said.lower()
