"""Grades that are written as JSON (pure)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from offbeat.reward.grade import Grade, Unread, on_scale
from offbeat.reward.verdict_numbers import lone_number

_KEYS = frozenset({"score", "grade", "rating", "verdict", "value"})
_REMARKS = frozenset(
    {"reason", "reasons", "reasoning", "why", "explanation", "comment", "comments"}
)
_OBJECTS_TRIED = 32

T = TypeVar("T")


def grade_in_json(text: str, scale: tuple[float, float]) -> float | Unread | None:
    """The one grade in the text's JSON objects; None where no object has one."""
    grades: set[float] = set()
    found: Iterator[float | Unread] = _objects(text, lambda found: _grade_of(found, scale))
    for grade in found:
        if isinstance(grade, Unread):
            return grade
        grades.add(grade)
    if len(grades) > 1:
        return Unread("unparseable", "several grades in JSON")
    return grades.pop() if grades else None


def rubric_in_json(
    text: str, criteria: Sequence[str], scale: tuple[float, float]
) -> Grade | Unread:
    """The mean of the grades in the text's one JSON object that grades criteria.

    Its keys are the criteria's numbers from 1, or their texts; each must be there once, and
    nothing else but remarks in words (`reason`, `comment`, ...).
    """
    names = {str(number): number for number in range(1, len(criteria) + 1)}
    for number, criterion in enumerate(criteria, 1):
        names.setdefault(_bare(criterion), number)
    objects = list(_objects(text, lambda found: found if _any_of(found, names) else None))
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
        read = _on_scale(value, scale)
        if isinstance(read, Unread):
            return Unread(read.cause, f"criterion {place}: {read.reason}")
        grades[place] = read
    missing = [str(number) for number in range(1, len(criteria) + 1) if number not in grades]
    if missing:
        return Unread("unparseable", f"no grade for criterion {', '.join(missing[:10])}")
    count = len(grades)
    return Grade(
        sum(grade.grade / count for grade in grades.values()),
        sum(grade.value for grade in grades.values()) / count,
    )


def _objects(text: str, read: Callable[[dict[str, Any]], T | None]) -> Iterator[T]:
    """What `read` makes of the text's JSON objects, those inside others if it takes not the outer
    one. Some are tried, not all, so that no text takes long."""
    decoder = json.JSONDecoder(
        parse_int=float, parse_constant=_refuse, object_pairs_hook=_without_repeats
    )
    start = text.find("{")
    for _ in range(_OBJECTS_TRIED):
        if start < 0:
            return
        try:
            found, end = decoder.raw_decode(text, start)
            value = read(found)
        except (ValueError, RecursionError):
            value, end = None, start + 1
        if value is not None:
            yield value
        start = text.find("{", start + 1 if value is None else end)


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
