"""Files of anchors: answers with known grades, one a row, refused with their line if malformed."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.config import RewardSourceSection
from offbeat.data import Row, read_rows
from offbeat.errors import UserError
from offbeat.records import Prompt

JUDGED = frozenset({"answer", "grade"})
"""Columns that are not the prompt's."""
YES_NO = {"yes": 1.0, "no": 0.0}


@dataclass(frozen=True, slots=True)
class Anchor:
    """An answer with its known grade as the source's value `known`; `place` counts the file's
    rows, `question` its distinct questions."""

    place: int
    question: int
    prompt: Prompt
    answer: str
    known: float


def read_anchors(name: str, section: RewardSourceSection) -> list[Anchor]:
    """The anchors of a source; none if it has none. Raises `UserError` with the file's line.

    A row has question, answer and grade, may have a reference, and its other columns are those of
    the prompt. The grade is on the source's own scale: of a judge what it would say (a number of
    `scale`, a word of `choices`, yes or no), of a scorer or a function its raw value.
    """
    path = section.anchors
    if path is None:
        return []
    try:
        rows = read_rows(path)
    except UserError as error:
        raise UserError(f"reward.{name}.anchors: {error}") from None
    anchors: list[Anchor] = []
    prompts: dict[str, tuple[int, Prompt]] = {}
    for place, row in enumerate(rows):
        where = f"reward.{name}.anchors: {path} line {row.line}"
        _check_texts(row, where)
        known = _known(row.columns["grade"], section, where)
        prompt = _prompt(row, place)
        question, first = prompts.setdefault(prompt.question, (len(prompts), prompt))
        prompt = first if section.grouped else prompt  # what is compared is of one prompt
        anchors.append(Anchor(place, question, prompt, str(row.columns["answer"]), known))
    if section.grouped:
        _check_compared(anchors, rows, f"reward.{name}.anchors: {path}")
    return anchors


def anchors_of(sources: Mapping[str, RewardSourceSection]) -> dict[str, list[Anchor]]:
    """The anchors of all sources that have some."""
    found = {name: read_anchors(name, section) for name, section in sources.items()}
    return {name: anchors for name, anchors in found.items() if anchors}


def anchors_mark(anchors: Sequence[Anchor]) -> str:
    """Tells a source's anchors from others: equal where all rows are."""
    rows = [(a.prompt.question, a.prompt.columns, a.answer, a.known) for a in anchors]
    return hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()[:32]


def _check_texts(row: Row, where: str) -> None:
    for column in ("question", "answer", "grade"):
        if row.columns.get(column) is None:
            there = ", ".join(map(str, row.columns)) or "none"
            raise UserError(
                f"{where} has no {column} (its columns: {there}); a row has question, answer and "
                "grade, and may have reference and others"
            )
        if column != "grade" and not isinstance(row.columns[column], str):
            raise UserError(f"{where}: {column} = {_short(row.columns[column])} must be a text")


def _prompt(row: Row, place: int) -> Prompt:
    reference = row.columns.get("reference")
    if reference is not None and not isinstance(reference, str):
        reference = json.dumps(reference, ensure_ascii=False, default=str)
    question = str(row.columns["question"])
    columns = {key: value for key, value in row.columns.items() if key not in JUDGED}
    nothing = np.zeros(0, dtype=np.int32)
    return Prompt(-2 - place, nothing, question, question, None, reference, columns)


def _known(grade: Any, section: RewardSourceSection, where: str) -> float:
    """A grade as the value that the source would give."""
    number = _number(grade)
    if section.kind != "genrm" or section.pairwise is not None:
        if number is None:
            raise UserError(f"{where}: grade = {_short(grade)} must be a finite number")
        return number
    words = section.choices if section.parser in {"choice", "expected"} else {}
    if section.parser == "yes_no":
        words = YES_NO
    if words:
        return _of_words(grade, number, words, where)
    low, high = section.scale
    if number is None or not low <= number <= high:
        raise UserError(
            f"{where}: grade = {_short(grade)} must be a number from {low:g} to {high:g}, the "
            "source's scale"
        )
    return (number - low) / (high - low)


def _of_words(grade: Any, number: float | None, words: Mapping[str, float], where: str) -> float:
    said = {word.casefold(): value for word, value in words.items()}
    # A number that is spelled as a word is what the judge would say: 1 may count 0.
    spelled = "" if number is None else f"{number:g}"
    spelled = grade.strip().casefold() if isinstance(grade, str) else spelled
    if spelled in said:
        return said[spelled]
    low, high = min(words.values()), max(words.values())
    if number is None or not low <= number <= high:
        raise UserError(
            f"{where}: grade = {_short(grade)} must be one of {', '.join(words)}, or a value from "
            f"{low:g} to {high:g}"
        )
    return number


def _check_compared(anchors: list[Anchor], rows: list[Row], where: str) -> None:
    counts = Counter(anchor.question for anchor in anchors)
    for anchor in anchors:
        if counts[anchor.question] < 2:
            raise UserError(
                f"{where} line {rows[anchor.place].line} is the only answer to its question, and "
                "a source with pairwise compares answers; give that question a second one"
            )


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:80]
