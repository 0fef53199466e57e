"""From a judge's words to a grade (pure): strict, in bounded time, never raising.

A text gives a grade only if it can be read in one way. `8`, `Score: 8/10`, `**8**`, `8.0` and
`{"score": 8}` are an 8; `8 or 9`, `eight-ish` and `I cannot judge this` are `Unread`, and so is a
grade outside the scale. Where reasons surround the grade, it has to stand behind a label
(`Score: 8`) on a line of its own, the same grade wherever a label repeats.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from offbeat.config_reward import Parser

Cause = Literal["unparseable", "out_of_range"]

LONGEST = 20_000
"""A verdict of more characters is not read at all."""

_SEPARATORS = re.compile(r"[\s*_()\[\]{}<>:;=\"'`#|!?~]+")
_NUMBER = re.compile(r"[-+\u2212\u2013]?[0-9]{1,40}(?:\.[0-9]{1,40})?", re.ASCII)
_WORDS = re.compile(r"(?<![\w'\u2019-])(yes|no)(?![\w'\u2019-])", re.IGNORECASE)
_PHRASES = re.compile(r"[.:;!?\n]+")
_NOT = re.compile(
    r"(?<!\w)(?:not|never|neither|nor|cannot|without|hardly|\w+n['\u2019]t)(?!\w)", re.IGNORECASE
)
_LABELS = frozenset({"score", "grade", "rating"})
_KEYS = frozenset({*_LABELS, "verdict", "value"})
_NOT_NUMBERS = frozenset({"nan", "inf", "infinity", "-inf", "+inf"})
_OBJECTS_TRIED = 32
_NUMBERS_KEPT = 8


@dataclass(frozen=True, slots=True)
class Grade:
    """What was read: the grade on its scale, and `value`, (grade - low) / (high - low) in 0..1."""

    grade: float
    value: float


@dataclass(frozen=True, slots=True)
class Unread:
    """Why the text is not a grade."""

    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The distinct numbers of a text, and the first thing with digits that is not a number."""

    numbers: tuple[float, ...]
    odd: str | None

    @property
    def only(self) -> float | None:
        return self.numbers[0] if len(self.numbers) == 1 and self.odd is None else None


def parse_verdict(
    text: str, parser: Parser, scale: tuple[float, float], *, truncated: bool = False
) -> Grade | Unread:
    """The grade in a verdict. `yes_no` gives 1 and 0; `scale` bounds the two other parsers.

    A truncated text counts if it can be read alone; one cut right behind digits that could have
    gone on to another grade of the scale (`1` of a `10`) cannot.
    """
    if len(text) > LONGEST:
        return Unread("unparseable", f"verdict of {len(text)} characters")
    if parser == "yes_no":
        return _yes_no(text)
    found = _from_json(text, scale)
    if found is None and parser == "number" and not text.lstrip().startswith(("{", "```json")):
        found = _from_text(text, scale, truncated)
    if found is None:
        return Unread("unparseable", "no JSON object with a score, grade, rating or verdict")
    if isinstance(found, Unread):
        return found
    low, high = scale
    if not low <= found <= high:
        return Unread("out_of_range", f"{found:g} is not within {low:g} to {high:g}")
    return Grade(found, min(1.0, max(0.0, (found - low) / (high - low))))


def _yes_no(text: str) -> Grade | Unread:
    words: set[str] = set()
    for phrase in _PHRASES.split(text):
        found = list(_WORDS.finditer(phrase))
        words |= {match.group().lower() for match in found}
        denied = _NOT.search(phrase) if found else None
        if denied is not None and denied.start() < found[-1].start():
            return Unread("unparseable", f"a negated {found[-1].group().lower()}")
    if len(words) != 1:
        return Unread("unparseable", "both yes and no" if words else "neither yes nor no")
    value = 1.0 if words == {"yes"} else 0.0
    return Grade(value, value)


def _tokens(text: str, high: float) -> _Tokens:
    """Numbers of a text; `/10` and `out of 10` behind a grade name the scale's end."""
    words = [word.rstrip(".,").strip("$\\") for word in _SEPARATORS.split(text)]
    numbers: list[float] = []
    odd: str | None = None
    skip = -1
    for place, word in enumerate(words):
        if place <= skip:
            continue
        head, slash, tail = word.partition("/")
        if _NUMBER.fullmatch(head) and (not slash or _is(tail, high)):
            number = float(head.replace("\u2212", "-").replace("\u2013", "-"))
            if len(numbers) < _NUMBERS_KEPT and number not in numbers:
                numbers.append(number)
            skip = place + (0 if slash else _denominator(words[place + 1 : place + 4], high))
        elif odd is None and (
            word.lower() in _NOT_NUMBERS or any(character.isnumeric() for character in word)
        ):
            odd = word[:40]
    return _Tokens(tuple(numbers), odd)


def _is(word: str, high: float) -> bool:
    return _NUMBER.fullmatch(word) is not None and word[0].isdigit() and float(word) == high


def _denominator(after: list[str], high: float) -> int:
    """How many words behind a number only repeat the scale's end."""
    if len(after) >= 2 and after[0] == "/" and _is(after[1], high):
        return 2
    if len(after) == 3 and [after[0].lower(), after[1].lower()] == ["out", "of"]:
        return 3 if _is(after[2], high) else 0
    return 1 if after and after[0].startswith("/") and _is(after[0][1:], high) else 0


def _from_text(text: str, scale: tuple[float, float], truncated: bool) -> float | Unread:
    tokens = _tokens(text, scale[1])
    grade = tokens.only
    if grade is None:
        grade = _labelled(text, scale[1])
    if grade is None:
        if not tokens.numbers and tokens.odd is None:
            return Unread("unparseable", "no number")
        several = ", ".join(f"{number:g}" for number in tokens.numbers[:5])
        return Unread("unparseable", f"not one number alone: {several or tokens.odd}")
    if truncated and _could_go_on(text, grade, scale):
        return Unread("unparseable", "cut within a number: raise max_tokens")
    return grade


def _labelled(text: str, high: float) -> float | None:
    """The one grade behind `Score:`, `Grade =` and the like; None if there are none or several."""
    grades: set[float] = set()
    for line in text.splitlines():
        mark = ":" if ":" in line else "="
        head, found, rest = line.partition(mark)
        words = _SEPARATORS.split(head[-60:].lower()) if found else []
        if _LABELS.isdisjoint(words):
            continue
        grade = _tokens(rest, high).only
        if grade is None:
            return None
        grades.add(grade)
    return grades.pop() if len(grades) == 1 else None


def _could_go_on(text: str, grade: float, scale: tuple[float, float]) -> bool:
    """Whether the grade ends the text and one digit more makes another grade of the scale."""
    last = re.search(r"(?<![0-9./])[0-9]{1,20}$", text[-24:], re.ASCII)
    if last is None:
        return False
    number = float(last.group())
    return number == abs(grade) and number != 0 and number * 10 <= scale[1]


def _from_json(text: str, scale: tuple[float, float]) -> float | Unread | None:
    """The one grade in the text's JSON objects; None where no object has one."""
    grades: set[float] = set()
    start, tried = text.find("{"), 0
    decoder = json.JSONDecoder(
        parse_int=float, parse_constant=_refuse, object_pairs_hook=_without_repeats
    )
    while start >= 0 and tried < _OBJECTS_TRIED:
        tried += 1
        try:
            found, end = decoder.raw_decode(text, start)
            grade = _grade_of(found, scale)
        except (ValueError, RecursionError):
            grade, end = None, start + 1
        if isinstance(grade, Unread):
            return grade
        if grade is not None:
            grades.add(grade)
        start = text.find("{", start + 1 if grade is None else end)
    if len(grades) > 1:
        return Unread("unparseable", "several grades in JSON")
    return grades.pop() if grades else None


def _grade_of(found: dict[str, Any], scale: tuple[float, float]) -> float | Unread | None:
    values = [value for key, value in found.items() if key.lower() in _KEYS]
    if not values:
        return None
    if len(values) == 1 and isinstance(values[0], float):
        return values[0]
    if len(values) == 1 and isinstance(values[0], str):
        grade = _tokens(values[0], scale[1]).only
        if grade is not None:
            return grade
    return Unread("unparseable", f"the JSON object's grade is {str(values)[:80]}")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a grade")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key repeats")
    return found
