"""What a judge's words were read as (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cause = Literal["unparseable", "out_of_range"]

LONGEST = 20_000
"""A verdict of more characters is not read at all."""


@dataclass(frozen=True, slots=True)
class Grade:
    """What was read: the grade as it was said, and `value`, what it counts.

    Of a grade on a scale `value` is (grade - low) / (high - low), 0 to 1; of a choice both are the
    choice's value; of a rubric both are means over the criteria.
    """

    grade: float
    value: float


@dataclass(frozen=True, slots=True)
class Unread:
    """Why the text is not a grade."""

    cause: Cause
    reason: str


def on_scale(grade: float, scale: tuple[float, float]) -> Grade | Unread:
    """The grade's place on the scale; `out_of_range` where it has none."""
    low, high = scale
    if not low <= grade <= high:
        return Unread("out_of_range", f"{grade:g} is not within {low:g} to {high:g}")
    return Grade(grade, min(1.0, max(0.0, (grade - low) / (high - low))))
