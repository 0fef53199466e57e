"""The number that an answer ends in, and whether it is the reference's. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

_BOX = re.compile(r"\\boxed\s*\{\s*((?:(?!\\boxed\s*\{)[^\n])*)")
_FINAL = (
    re.compile(r"####[ \t]*((?:(?!####[ \t]*[^\s#])[^\n])*)"),
    _BOX,
    re.compile(r"^[ \t>*_#]*(?:A|(?:[Ff]inal )?[Aa]nswer)[*_]*:[*_]*[ \t]*([^\n]*)", re.MULTILINE),
)
"""Where an answer says which its last word is, strongest first: GSM8K's data, LaTeX, a line.

What a mark marks ends where the next one of its kind begins, or with the line. A `####` with
nothing behind it in its line only closes a heading.
"""

_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(\d{1,40})\s*\}\s*\{\s*(\d{1,40})\s*\}")
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]%.])[-\u2212\u2013])?(?:\\?[$\u20ac\u00a3\u00a5]\s?)?"
    r"(?P<minus>(?<=[$\u20ac\u00a3\u00a5])[-\u2212])?"
    r"(?:(?P<whole>\d{1,40}) (?=\d{1,40}/\d))?"
    r"(?P<digits>\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+(?![\d])|\d+)?(?P<part>\.\d+)?"
    r"(?(digits)|(?(part)|(?!)))"
    r"(?P<power>[eE][-+]?\d{1,3}(?!\w))?(?:/(?P<under>\d{1,40})(?![\d/]))?",
)
_GROUPING = re.compile(r"[^\d]+")


def exact_number(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    reference: Sequence[str | None],
    tolerance: float = 0.0,
    **columns: object,
) -> list[float | None]:
    """1.0 where the answer's number is the reference's, else 0.0; None for a reference without one.

    The number is the one behind the last `####`, else in the last `\\boxed{}`, else on the last
    line that begins with `A:` or `Answer:`, else the last one of the text. `1,600`, `$1600`,
    `1600.0`, `1600 dollars` and `3200/2` are the same number; a percent sign is a unit. Numbers are
    equal when they differ by `tolerance` at most, by default not at all.
    """
    wanted = [None if text is None else final_number(text) for text in reference]
    return [
        None if right is None else float(_near(final_number(text), right, tolerance))
        for text, right in zip(completions, wanted, strict=True)
    ]


def final_part(text: str) -> str | None:
    """What a text marks last as its final answer, of a box what is in it, else to the line's end.

    None where nothing is marked.
    """
    for mark in _FINAL:
        found = mark.findall(text)
        if found:
            part = str(found[-1])
            return _boxed(part) if mark is _BOX else part
    return None


def final_number(text: str) -> Fraction | None:
    """The number of the text's final answer: the first where it is marked, else the last of all.

    Of a marked equation it is the first behind the last `=`.
    """
    marked = final_part(text)
    if marked is not None:
        return next(numbers(marked.rpartition("=")[2]), None)
    matches = list(_NUMBER.finditer(_FRACTION.sub(r"\1/\2", text)))
    return next((n for match in reversed(matches) if (n := _value(match)) is not None), None)


def numbers(text: str) -> Iterator[Fraction]:
    """The numbers of a text, in their order."""
    for match in _NUMBER.finditer(_FRACTION.sub(r"\1/\2", text)):
        if (number := _value(match)) is not None:
            yield number


def _boxed(text: str) -> str:
    """Up to the brace that closes the box; all of it where none does."""
    depth = 1
    for brace in re.finditer(r"\\[{}]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[: brace.start()]
    return text


def _value(match: re.Match[str]) -> Fraction | None:
    """None where the digits are more than Python converts, or a fraction has 0 below its line."""
    digits = _GROUPING.sub("", match["digits"] or "0")
    try:
        number = Fraction(f"{digits}{match['part'] or ''}{match['power'] or ''}")
        if match["under"] is not None:
            number /= int(match["under"])
        number += int(match["whole"] or 0)
    except (ValueError, ZeroDivisionError):
        return None
    return -number if match["sign"] or match["minus"] else number


def _near(found: Fraction | None, right: Fraction, tolerance: float) -> bool:
    return found is not None and abs(found - right) <= Fraction(tolerance)
