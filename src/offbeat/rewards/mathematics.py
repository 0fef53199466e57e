"""Mathematical equality by the library math-verify: LaTeX, fractions, intervals, sets, equations.

The library's own timeouts work by signals and are off: the reward source's worker process is killed
at the call's deadline instead, whatever hangs in it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from offbeat.rewards.number import final_part

try:
    from math_verify import parse, verify
except ImportError as missing:
    raise ImportError(
        "offbeat.rewards:math_verify needs the library math-verify, which is not installed; "
        "install the extra of Offbeat's folder: pip install -e '.[math]'"
    ) from missing

_DELIMITED = re.compile(r"\$[^$]+\$|\\boxed\b|\\fbox\b|\\\(|\\\[|\\begin\{")
_WORD = re.compile(r"\b[A-Za-z]{2,}")
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off


def math_verify(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    reference: Sequence[str | None],
    precision: int = 6,
    **columns: object,
) -> list[float | None]:
    """1.0 where the answer is mathematically equal to the reference, else 0.0.

    The answer's expression is what it marks as final (`####`, a line that begins with `A:`), else
    what the library finds: a `\\boxed{}`, LaTeX between its delimiters, a plain number. A reference
    may be bare LaTeX, delimited LaTeX, a number, or a worked solution that ends in `#### n`. Floats
    are compared to `precision` decimal places. None where the reference cannot be read.
    """
    return [
        _equal(text, wanted, precision) for text, wanted in zip(completions, reference, strict=True)
    ]


def _equal(text: str, reference: str | None, precision: int) -> float | None:
    gold = [] if reference is None else _gold(reference)
    if not gold:
        return None
    marked = _marked(text)
    found = _parsed(text) if marked is None else _expression(marked)
    return float(bool(verify(gold, found, float_rounding=precision, timeout_seconds=None)))


@lru_cache(maxsize=1024)
def _gold(reference: str) -> list[Any]:
    """What a reference is read as: [] where it cannot be."""
    return _expression(_marked(reference) or reference)


def _expression(text: str) -> list[Any]:
    """A text that is an expression and little else. Bare LaTeX is read as if it were boxed; a
    number among words is that number."""
    text = text.strip().rstrip(".")
    in_words = "\\" not in text and bool(_WORD.search(text) and re.search(r"\d", text))
    if in_words or "\n" in text or _DELIMITED.search(text):
        return _parsed(text)
    return _parsed(f"\\boxed{{{text}}}") or _parsed(text)


def _marked(text: str) -> str | None:
    """What stands behind `####` or `A:`, unless a box is marked, which is the library's to find."""
    return None if "\\boxed" in text else final_part(text)


def _parsed(text: str) -> list[Any]:
    found: list[Any] = parse(text, parsing_timeout=None)
    return found
