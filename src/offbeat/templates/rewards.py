"""Reward functions of this run. `offbeat check run.toml` runs them on three rows of the data."""

from __future__ import annotations

from collections.abc import Sequence


def correct(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    reference: Sequence[str],
    **columns: object,
) -> list[float | None]:
    """1.0 where the first line of the answer is the reference, else 0.0; None: no opinion.

    Every column of the data arrives as a list of its own, here `reference`.
    """
    return [
        None if wanted is None else float(completion.strip().split("\n")[0].strip() == wanted)
        for completion, wanted in zip(completions, reference, strict=True)
    ]
