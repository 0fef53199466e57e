"""Several verdicts on one text become one value (pure)."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Vote = Literal["mean", "median", "majority"]


@dataclass(frozen=True, slots=True)
class Counted:
    """What votes come to: a value, or a cause where there is none.

    `spread` is the standard deviation of the votes that were read; None of a single vote.
    """

    value: float | None
    cause: str | None = None
    spread: float | None = None


def count_votes(votes: Sequence[float | None], causes: Sequence[str], how: Vote) -> Counted:
    """`votes` has None for each that failed, `causes` theirs, in any order.

    Failed votes are left out if more than half of all were read; else all fail by the causes'
    commonest. A majority is the most frequent value; two of them are `no_majority`.
    """
    read = [vote for vote in votes if vote is not None]
    spread = _deviation(read) if len(votes) > 1 and read else None
    if 2 * len(read) <= len(votes):
        return Counted(None, commonest(causes), spread)
    if how == "median":
        return Counted(statistics.median(read), None, spread)
    if how == "mean":
        return Counted(sum(vote / len(read) for vote in read), None, spread)
    (value, most), *others = Counter(read).most_common(2)
    if others and others[0][1] == most:
        return Counted(None, "no_majority", spread)
    return Counted(value, None, spread)


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation; of numbers of any size, so that it cannot overflow."""
    unit = max(map(abs, values)) or 1.0
    return unit * statistics.pstdev(value / unit for value in values)


def commonest(causes: Sequence[str]) -> str:
    """The cause that is there most often; of equals the first."""
    return Counter(causes).most_common(1)[0][0] if causes else "unparseable"
