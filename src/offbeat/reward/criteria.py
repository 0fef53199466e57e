"""The criteria of a rubric: a row's own, or the source's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from offbeat.records import ScoreItem
from offbeat.reward.template import TemplateFailed

COLUMN = "rubric"
_BULLET = re.compile(r"\s*(?:[-*\u2022]|[0-9]{1,3}[.)])\s+")


def criteria_of(item: ScoreItem, own: Sequence[str]) -> tuple[str, ...]:
    """The row's column `rubric` where there is one with something in it, else the source's own.

    The column is a list of texts, or one text with a criterion on each line, bulleted or not.
    Raises `TemplateFailed` for any other thing.
    """
    column = item.prompt.columns.get(COLUMN)
    if column is None:
        return tuple(own)
    if isinstance(column, str):
        found = [_BULLET.sub("", line, count=1).strip() for line in column.splitlines()]
    elif isinstance(column, list | tuple) and all(isinstance(one, str) for one in column):
        found = [one.strip() for one in column]
    else:
        raise TemplateFailed(
            f"the row's column {COLUMN} is {str(column)[:60]!r}; write a text or a list of texts"
        )
    return tuple(criterion for criterion in found if criterion) or tuple(own)
