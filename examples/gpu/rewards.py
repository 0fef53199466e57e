"""The exact checker of this example: 1.0 for the right number, otherwise 0.0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")
MARK = "####"


def exact(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    reference: Sequence[str | None],
    **columns: object,
) -> list[float | None]:
    """Compares the final number of each completion with the `reference` column.

    A row without a reference abstains (None). A completion without a number is wrong.
    """
    return [
        None if wanted is None else float(_same(final_number(text), final_number(wanted)))
        for text, wanted in zip(completions, reference, strict=True)
    ]


def final_number(text: str) -> Fraction | None:
    """GSM8K's convention: the number behind the last `####`; without a mark, the last number.

    `$`, `%`, units and thousands separators do not matter: 1,000 and 1000.0 are the same number.
    A mark with no number behind it has none.
    """
    _, mark, behind = text.rpartition(MARK)
    found = NUMBER.findall(behind)
    if not found:
        return None
    return Fraction((found[0] if mark else found[-1]).replace(",", ""))


def _same(left: Fraction | None, right: Fraction | None) -> bool:
    return left is not None and left == right
