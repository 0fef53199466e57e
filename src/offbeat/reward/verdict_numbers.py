"""Grades that are written as numbers (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from offbeat.reward.grade import Unread

_SEPARATORS = re.compile(r"[\s*_()\[\]{}<>:;=\"'`#|!?~]+")
_NUMBER = re.compile(r"[-+\u2212\u2013]?[0-9]{1,40}(?:\.[0-9]{1,40})?", re.ASCII)
_RANGE = re.compile(r"([0-9.]{1,20})\s?(?:-|\u2013|to)\s?([0-9.]{1,20})", re.ASCII)
_LABELS = frozenset({"score", "grade", "rating"})
_NOT_NUMBERS = frozenset({"nan", "inf", "infinity", "-inf", "+inf"})
_NUMBERS_KEPT = 8


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The distinct numbers of a text, how often one stands there, and the first thing with digits
    that is not a number."""

    numbers: tuple[float, ...]
    count: int
    odd: str | None

    @property
    def only(self) -> float | None:
        return self.numbers[0] if len(self.numbers) == 1 and self.odd is None else None


def grade_in_text(text: str, scale: tuple[float, float], truncated: bool) -> float | Unread:
    """The one number of a text, or the one behind its labels."""
    tokens = _tokens(text, scale[1])
    grade = tokens.only
    if grade is None:
        grade = _labelled(text, scale[1])
    if grade is None:
        return _none(tokens)
    if truncated and _could_go_on(text, grade, scale):
        return Unread("unparseable", "cut within a number: raise max_tokens")
    return grade


def grade_in_line(line: str, scale: tuple[float, float]) -> float | Unread:
    """The one number of a line. A label may repeat the scale: `Score (1-10): 8`."""
    tokens = _tokens(_without_scale(line, scale), scale[1])
    return _none(tokens) if tokens.only is None or tokens.count > 1 else tokens.only


def lone_number(text: str, high: float) -> float | None:
    """The one number of a short text such as `8/10`; None where there is another thing."""
    return _tokens(text, high).only


def _none(tokens: _Tokens) -> Unread:
    if not tokens.numbers and tokens.odd is None:
        return Unread("unparseable", "no number")
    several = ", ".join(f"{number:g}" for number in tokens.numbers[:5])
    return Unread("unparseable", f"not one number alone: {several or tokens.odd}")


def _tokens(text: str, high: float) -> _Tokens:
    """Numbers of a text; `/10` and `out of 10` behind a grade name the scale's end."""
    words = [word.rstrip(".,").strip("$\\") for word in _SEPARATORS.split(text)]
    numbers: list[float] = []
    odd: str | None = None
    count, skip = 0, -1
    for place, word in enumerate(words):
        if place <= skip:
            continue
        head, slash, tail = word.partition("/")
        if _NUMBER.fullmatch(head) and (not slash or _is(tail, high)):
            number = float(head.replace("\u2212", "-").replace("\u2013", "-"))
            count += 1
            if len(numbers) < _NUMBERS_KEPT and number not in numbers:
                numbers.append(number)
            skip = place + (0 if slash else _denominator(words[place + 1 : place + 4], high))
        elif odd is None and (
            word.lower() in _NOT_NUMBERS or any(character.isnumeric() for character in word)
        ):
            odd = word[:40]
    return _Tokens(tuple(numbers), count, odd)


def _is(word: str, high: float) -> bool:
    return _NUMBER.fullmatch(word) is not None and word[0].isdigit() and float(word) == high


def _denominator(after: list[str], high: float) -> int:
    """How many words behind a number only repeat the scale's end."""
    if len(after) >= 2 and after[0] == "/" and _is(after[1], high):
        return 2
    if len(after) == 3 and [after[0].lower(), after[1].lower()] == ["out", "of"]:
        return 3 if _is(after[2], high) else 0
    return 1 if after and after[0].startswith("/") and _is(after[0][1:], high) else 0


def _without_scale(line: str, scale: tuple[float, float]) -> str:
    """The line without a range in front of its `:` or `=` that is the scale."""
    mark = ":" if ":" in line else "="
    head, found, rest = line.rpartition(mark)
    for match in _RANGE.finditer(head):
        ends = [_NUMBER.fullmatch(end) for end in match.groups()]
        if all(ends) and (float(match[1]), float(match[2])) == scale:
            head = head[: match.start()] + head[match.end() :]
            break
    return head + found + rest


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
