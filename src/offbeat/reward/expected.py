"""Verdicts that are read as probabilities, and the verdicts of a source by name (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from offbeat.config import RewardSourceSection
from offbeat.reward.grade import Grade, Unread
from offbeat.reward.structure import PREFERENCES

LEAST_MASS = 0.5
"""With less of the probability on the verdicts the judge was about to say another thing."""

_SHOWN = 0.001


def preferences(section: RewardSourceSection) -> dict[str, float]:
    """What a comparison may come to: the share of it that goes to the answer shown first."""
    return dict(section.choices) or dict(zip(PREFERENCES, (1.0, 0.0, 0.5), strict=True))


def weighed_verdicts(section: RewardSourceSection) -> dict[str, float]:
    """The verdicts of parser "expected" with what each counts: the whole grades of the scale from
    0 to 1, or the setting `choices`; of a comparison A and B."""
    if section.choices:
        return dict(section.choices)
    if section.pairwise is not None:
        return {"A": 1.0, "B": 0.0}
    low, high = map(int, section.scale)
    return {str(grade): (grade - low) / (high - low) for grade in range(low, high + 1)}


def expected_value(verdicts: Mapping[str, float], probabilities: Sequence[float]) -> Grade | Unread:
    """The verdicts' value weighted by their probabilities, as if there were no others.

    Where the others have more than half, nothing is read: the judge would not have said any.
    """
    if len(probabilities) != len(verdicts) or not all(
        math.isfinite(share) and share >= 0 for share in probabilities
    ):
        return Unread("unparseable", "probabilities that are none")
    mass = math.fsum(probabilities)
    if mass < LEAST_MASS:
        return Unread(
            "unparseable",
            f"mass {mass:.3f}: only so much of the probability is on {_named(verdicts)}",
        )
    value = sum(
        value * (share / mass)
        for value, share in zip(verdicts.values(), probabilities, strict=True)
    )
    return Grade(value, value)


def shown(verdicts: Sequence[str], probabilities: Sequence[float]) -> str:
    """The distribution in words, the likeliest first: `8: 0.620, 9: 0.301 (mass 0.921)`."""
    pairs = sorted(zip(probabilities, verdicts, strict=False), key=lambda pair: -pair[0])
    likely = [f"{verdict}: {share:.3f}" for share, verdict in pairs if share >= _SHOWN]
    return f"{', '.join(likely) or 'none'} (mass {math.fsum(probabilities):.3f})"


def _named(verdicts: Mapping[str, float]) -> str:
    names = list(verdicts)
    return ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])
