"""Functions written for other trainers, as they are: verl's compute_score, TRL's reward_funcs."""

from __future__ import annotations

import re
from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """verl: 1 for the number behind the last `####` or `A:`; what else is in the dict is kept."""
    wanted, found = final(ground_truth), final(solution_str)
    return {"score": float(found is not None and found == wanted), "found": found}


def final(text: str) -> str | None:
    """The digits behind the last `####` or `A:`."""
    found = re.findall(r"(?:####|^A:)\s*\$?(-?[\d,.]*\d)", text, re.MULTILINE)
    return found[-1].replace(",", "") if found else None


def steps_reward(completions: list[Any], **columns: Any) -> list[float]:
    """TRL: a tenth for each line of reasoning, 1 at most."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [min(1.0, sum(map(bool, text.splitlines())) / 10) for text in texts]
