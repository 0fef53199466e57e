"""The form of an answer: its length, and whether it looks as asked. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence


def overlong_penalty(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    completion_tokens: Sequence[int | None],
    max_tokens: int,
    buffer: int,
) -> list[float | None]:
    """The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), 0 to -1.

    0 up to `max_tokens - buffer` tokens; from there it falls evenly, to -1 at `max_tokens` and
    beyond. None where the number of tokens is not known.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(
            f"buffer = {buffer} must be at least 1 and at most max_tokens = {max_tokens}"
        )
    free = max_tokens - buffer
    return [
        None if tokens is None else -min(1.0, max(0, tokens - free) / buffer) + 0.0
        for tokens in completion_tokens
    ]


def format_match(
    prompts: Sequence[str], completions: Sequence[str], *, pattern: str, anywhere: bool = False
) -> list[float]:
    """1.0 where the regular expression `pattern` matches the whole answer, else 0.0.

    White space at the answer's ends does not count, and `.` matches line ends too. With `anywhere`
    a match within the answer is enough.
    """
    compiled = re.compile(pattern, re.DOTALL)
    match = compiled.search if anywhere else compiled.fullmatch
    return [float(match(text.strip()) is not None) for text in completions]
