"""What a chat completion costs in tokens: estimated before it, and told by the server after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHARACTERS_A_TOKEN = 4


def estimate(body: Mapping[str, Any]) -> float:
    """Tokens that a request may take: a quarter of its characters, and all it may be answered."""
    messages = body.get("messages") or ()
    characters = sum(len(str(message.get("content") or "")) for message in messages)
    answers = int(body.get("n") or 1) * int(body.get("max_tokens") or 0)
    return characters / CHARACTERS_A_TOKEN + answers


def spent(answer: Any, estimated: float) -> tuple[int, int]:
    """Tokens of prompt and completion as the answer's `usage` has them.

    From a server that does not count them the estimate stands, as tokens of the prompt.
    """
    try:
        usage = answer["usage"]
        prompt, completion = usage["prompt_tokens"], usage.get("completion_tokens", 0)
        if min(prompt, completion) >= 0:
            return int(prompt), int(completion)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        pass
    return int(estimated), 0
