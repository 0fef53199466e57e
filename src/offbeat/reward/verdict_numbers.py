"""Grades that are written as numbers (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from offbeat.reward.grade import Unread

_SEPARATORS = re.compile(r"[\s*_()\[\]{}<>:;=\"'`#|!?~]+")
_NUMBER = re.compile(r"[-+\u2212\u2013]?[0-9]{1,40}(?:\.[0-9]{1,40})?", re.ASCII)
_RANGE = re.compile(r"([0-9.]{1,20})\s?(?:-|\u2013|to)\s?([0-9.]{1,20})", re.ASCII)
_QUOTED = re.compile('"[^"\n]*"|\u201c[^\u201d\n]*\u201d')
_BRACKETS = re.compile(r"[(\[][^()\[\]]*[)\]]|out of [0-9]{1,9}")
_LABELS = frozenset({"score", "grade", "rating"})
_NOT_NUMBERS = frozenset({"nan", "inf", "infinity", "-inf", "+inf"})
_NUMBERS_KEPT = 8
_LABEL_LETTERS, _LABEL_WORDS = 60, 3
_FIRST = re.compile(r"[^\w+\u2212\u2013-]*[-+\u2212\u2013]?[0-9]{1,40}(?:\.[0-9]+)?", re.ASCII)
_LAST = re.compile(r"(?<![0-9./])([0-9]{1,20})(\.[0-9]{0,40})?\Z", re.ASCII)
_REASON = re.compile(r"[*_`,;:]*\s+(?:as|because|since)(?!\w)", re.IGNORECASE)
_GOES_ON = re.compile(r"\s*(?:(?:or|to|and|out|of)(?!\w)|[-\u2013/])", re.IGNORECASE)


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
    grade = None if _quoted(text) else tokens.only
    if grade is None:
        grade = _labelled(text, scale[1])
    if grade is None:
        return _none(tokens)
    if truncated and not _whole(text, grade, scale):
        return Unread("unparseable", "cut before its grade is sure: raise max_tokens")
    return grade


def other_grade(before: str, after: str, grade: float, scale: tuple[float, float]) -> Unread | None:
    """What is wrong with a text that says `grade` between these two parts, if it says another
    one there: behind a label, or as any number afterwards."""
    tokens = _tokens(after, scale[1])
    labelled = {found for _, found in _labels(before.splitlines(), scale[1])}
    if labelled <= {grade} and {*tokens.numbers} <= {grade} and tokens.odd is None:
        return None
    return Unread("unparseable", "another number beside the JSON object")


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


def _quoted(text: str) -> bool:
    """Whether every number of a sentence stands in quotation marks: others' words, perhaps."""
    own = _QUOTED.sub(" ", text)
    return any(map(str.isalpha, own)) and not any(map(str.isnumeric, own))


def _labelled(text: str, high: float) -> float | None:
    """The one grade behind `Score:`, `Grade =` and the like, in the first or the last line; None
    if there are none or several."""
    lines = [line for line in text.splitlines() if any(map(str.isalnum, line))]
    labels = _labels(lines, high)
    grades = {grade for _, grade in labels}
    if len(grades) != 1 or (labels[0][0] != 0 and labels[-1][0] != len(lines) - 1):
        return None
    return grades.pop()


def _labels(lines: list[str], high: float) -> list[tuple[int, float | None]]:
    """The places of labelled lines with the one number behind each label, if it is one."""
    split = [_split(line) for line in lines]
    return [(place, _tokens(rest, high).only) for place, (head, rest) in enumerate(split) if head]


def _split(line: str) -> tuple[str, str]:
    """A line's label and what stands behind it; no label where its head is more than that: in
    `It says "Score: 10"` another one speaks."""
    head, mark, rest = line.partition(":" if ":" in line else "=")
    if not mark or len(head) > _LABEL_LETTERS or '"' in head or "\u201c" in head:
        return "", line
    bare = _BRACKETS.sub(" ", head.lower())
    words = [word for word in _SEPARATORS.split(bare) if any(map(str.isalnum, word))]
    if words[-1:] == ["is"]:
        words.pop()
    known = words and (words[0] in _LABELS or words[-1] in _LABELS)
    return (head, rest) if known and len(words) <= _LABEL_WORDS else ("", line)


def _whole(text: str, grade: float, scale: tuple[float, float]) -> bool:
    """Whether a text that was cut begins with its grade, and no more text could have changed it.

    On a scale of less than two steps a whole number may be the beginning of a fraction.
    """
    low, high = scale
    line, _, below = text.strip().partition("\n")
    label, rest = _split(line)
    number = _FIRST.match(rest)
    if number is None:
        return False
    end = re.compile(rf"\s*(?:/|out of)\s*{high:g}(?!\.?[0-9])").match(rest, number.end())
    behind = rest[number.end() if end is None else end.end() :]
    reasons = behind + below if behind.strip("*_` ") else ""
    if _GOES_ON.match(behind) or (
        not label and any(map(str.isalpha, reasons)) and not _REASON.match(behind)
    ):
        return False
    last = _LAST.search(text[-64:])
    if last is None or float(last[1]) != abs(int(grade)):
        return True
    digit = float(last[1]) != 0 and float(last[1]) * 10 <= max(abs(low), abs(high))
    fraction = last[2] is not None or (high - low < 2 and grade < high)
    return not (digit or fraction)
