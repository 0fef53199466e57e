"""Ready reward functions: `function = "offbeat.rewards:exact_number"` in a section [reward.NAME].

Their keyword arguments are set with `arguments = {...}`; docs/rewards.md has an example of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.rewards.number import exact_number
from offbeat.rewards.shape import format_match, overlong_penalty

if TYPE_CHECKING:
    from offbeat.rewards.mathematics import math_verify

__all__ = ["exact_number", "format_match", "math_verify", "overlong_penalty"]


def __getattr__(name: str) -> Any:
    """math_verify is imported when it is asked for: it needs an extra, and takes a second."""
    if name == "math_verify":
        from offbeat.rewards.mathematics import math_verify

        return math_verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
