"""Grades that are written as JSON (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from offbeat.reward.grade import Grade, Unread, on_scale
from offbeat.reward.verdict_numbers import lone_number

_KEYS = frozenset({"score", "grade", "rating", "verdict", "value"})
_REMARKS = frozenset(
    {"reason", "reasons", "reasoning", "why", "explanation", "comment", "comments"}
)
_OBJECTS_TRIED = 32

_BEGINS = re.compile(r"\{\s*[\"}]")
"""An object, not a brace of a formula. One that begins so and is none was meant to be."""
_FENCE = re.compile(r"```(?:json)?", re.IGNORECASE)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InJson:
    """The grade of a text's JSON objects, and the text around them."""

    grade: float
    before: str
    after: str


def grade_in_json(text: str, scale: tuple[float, float], truncated: bool) -> InJson | Unread | None:
    """The one grade in the text's JSON objects; None where no object has one."""
    found: _Read[float | Unread] | Unread | None
    found = _read(text, lambda one: _grade_of(one, scale), truncated)
    if found is None or isinstance(found, Unread):
        return found
    grades: set[float] = set()
    for grade in found.values:
        if isinstance(grade, Unread):
            return grade
        grades.add(grade)
    if len(grades) > 1:
        return Unread("unparseable", "several grades in JSON")
    return InJson(grades.pop(), found.before, found.after)


def rubric_in_json(
    text: str, criteria: Sequence[str], scale: tuple[float, float], truncated: bool
) -> Grade | Unread:
    """The mean of the grades in the text's one JSON object that grades criteria.

    Its keys are the criteria's numbers from 1, or their texts; each must be there once, and
    nothing else but remarks in words (`reason`, `comment`, ...).
    """
    names = {str(number): number for number in range(1, len(criteria) + 1)}
    for number, criterion in enumerate(criteria, 1):
        names.setdefault(_bare(criterion), number)
    read = _read(text, lambda found: found if _any_of(found, names) else None, truncated)
    if isinstance(read, Unread):
        return read
    objects = [] if read is None else read.values
    if len(objects) != 1:
        return Unread("unparseable", f"{len(objects) or 'no'} JSON objects with the criteria")
    grades: dict[int, Grade] = {}
    for key, value in objects[0].items():
        place = names.get(_bare(key))
        if place is None and _bare(key) in _REMARKS and isinstance(value, str):
            continue
        if place is None or place in grades:
            what = "not among the criteria" if place is None else "graded twice"
            return Unread("unparseable", f"{key[:40]!r} is {what}")
        grade = _on_scale(value, scale)
        if isinstance(grade, Unread):
            return Unread(grade.cause, f"criterion {place}: {grade.reason}")
        grades[place] = grade
    missing = [str(number) for number in range(1, len(criteria) + 1) if number not in grades]
    if missing:
        return Unread("unparseable", f"no grade for criterion {', '.join(missing[:10])}")
    count = len(grades)
    return Grade(
        sum(grade.grade / count for grade in grades.values()),
        sum(grade.value for grade in grades.values()) / count,
    )


@dataclass(frozen=True, slots=True)
class _Read(Generic[T]):
    """What was made of a text's JSON objects, and the text around these."""

    values: list[T]
    before: str
    after: str


def _read(
    text: str, read: Callable[[dict[str, Any]], T | None], truncated: bool
) -> _Read[T] | Unread | None:
    """What `read` makes of the text's JSON objects, those inside others if it takes not the outer
    one; None if it takes none.

    The judge's own object stands at the beginning of its words, or at their end: one in their
    midst may be quoted, and so may any where another one is not whole. Some objects are tried, not
    all, so that no text takes long.
    """
    decoder = json.JSONDecoder(
        parse_int=float, parse_constant=_refuse, object_pairs_hook=_without_repeats
    )
    values: list[T] = []
    first = last = at = tried = 0
    broken = False
    while (begins := _BEGINS.search(text, at)) is not None:
        tried += 1
        if tried > _OBJECTS_TRIED:
            broken = True
            break
        at = begins.start() + 1
        try:
            found, end = decoder.raw_decode(text, begins.start())
            taken = list(_taken(found, read))
        except (ValueError, RecursionError):
            broken = True
            continue
        at = end
        if taken:
            first = first if values else begins.start()
            last = end
            values += taken
    if not values:
        return None
    if broken:
        return Unread("unparseable", "several JSON objects, not all of them whole")
    before, after = text[:first], text[last:]
    if _words(before) and (truncated or _words(after)):
        return Unread("unparseable", "a JSON object amid words")
    if _words(after.partition("\n")[0]):
        return Unread("unparseable", "words on the line of the JSON object")
    return _Read(values, before, after)


def _taken(found: Any, read: Callable[[dict[str, Any]], T | None]) -> Iterator[T]:
    """What `read` makes of a value, or else of those in it."""
    value = read(found) if isinstance(found, dict) else None
    if value is not None:
        yield value
        return
    inner = found.values() if isinstance(found, dict) else found
    for one in inner if isinstance(found, dict | list) else ():
        yield from _taken(one, read)


def _words(text: str) -> bool:
    return any(map(str.isalnum, _FENCE.sub("", text)))


def _grade_of(found: dict[str, Any], scale: tuple[float, float]) -> float | Unread | None:
    values = [value for key, value in found.items() if key.lower() in _KEYS]
    if not values:
        return None
    grade = _number(values[0], scale) if len(values) == 1 else None
    if grade is None:
        return Unread("unparseable", f"the JSON object's grade is {str(values)[:80]}")
    return grade


def _on_scale(value: Any, scale: tuple[float, float]) -> Grade | Unread:
    grade = _number(value, scale)
    if grade is None:
        return Unread("unparseable", f"{str(value)[:40]!r} is not a number")
    return on_scale(grade, scale)


def _number(value: Any, scale: tuple[float, float]) -> float | None:
    if isinstance(value, float):
        return value
    return lone_number(value, scale[1]) if isinstance(value, str) else None


def _any_of(found: dict[str, Any], names: dict[str, int]) -> bool:
    return any(_bare(key) in names for key in found)


def _bare(key: str) -> str:
    return " ".join(key.casefold().split()).rstrip(".:;")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a grade")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key repeats")
    return found
