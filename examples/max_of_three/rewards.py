"""The rule reward of this example: 1.0 for exactly the right answer, otherwise 0.0."""

from __future__ import annotations

from collections.abc import Sequence


def correct(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    reference: Sequence[str],
    **columns: object,
) -> list[float | None]:
    """Score completions against the `reference` column.

    The answer is the text before the first newline, stripped. Without a newline it is
    wrong, so keep the newline in the completion when you stop at it. A row without a
    reference abstains (None).
    """
    scores: list[float | None] = []
    for completion, wanted in zip(completions, reference, strict=True):
        line, end, _ = completion.partition("\n")
        right = bool(end) and line.strip() == wanted
        scores.append(None if wanted is None else float(right))
    return scores
