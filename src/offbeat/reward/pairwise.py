"""A group's answers compared in pairs become scores (pure).

Each pair is judged in both orders, and a judge that leans to the answer which it sees first gives
both answers of a pair the same share of that lean: it cancels. So a pair counts only if it was
read in both orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

Pair = tuple[int, int]
TIE = 0.5


def pairs(count: int, how: Literal["circular", "all"]) -> list[Pair]:
    """Which of `count` answers meet: each its next neighbour, in a ring, or every other one."""
    if how == "all" or count < 3:
        return list(combinations(range(count), 2))
    return [(place, (place + 1) % count) for place in range(count)]


def shares_won(
    count: int, met: Sequence[Pair], orders: Mapping[Pair, float | None]
) -> list[float | None]:
    """Each answer's share of its comparisons won, 0 to 1; None where none was read.

    `orders[a, b]` is the share of the comparison that showed a first which went to a (1, 0, or
    0.5 for a tie); None if it failed.
    """
    won: list[list[float]] = [[] for _ in range(count)]
    for one, other in met:
        there, back = orders[one, other], orders[other, one]
        if there is None or back is None:
            continue
        share = (there + 1 - back) / 2
        won[one].append(share)
        won[other].append(1 - share)
    return [sum(shares) / len(shares) if shares else None for shares in won]


@dataclass(slots=True)
class PositionBias:
    """How far a judge leans to the answer that it sees first, over all comparisons so far."""

    comparisons: int = 0
    decided: int = 0
    to_first: float = 0.0

    def add(self, share: float) -> None:
        """One comparison and the share of it that went to the answer shown first."""
        self.comparisons += 1
        if share != TIE:
            self.decided += 1
            self.to_first += share

    def facts(self) -> dict[str, float]:
        """The lean, -0.5 (always the second) to 0.5, once a comparison was decided."""
        lean = {"position_bias": self.to_first / self.decided - TIE} if self.decided else {}
        return {"comparisons": float(self.comparisons)} | lean
