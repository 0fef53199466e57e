"""From a row of answers to what reward sources are asked, and back to columns (pure).

A row has the columns of [data], a column with the answer, and perhaps `completion_tokens` and
`finish_reason`, which say of the answer what an engine would.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from offbeat.config import Config
from offbeat.data import Row, check_pick, check_row, plain_prompt
from offbeat.errors import UserError
from offbeat.pick import BadPick, picked
from offbeat.records import FinishReason, Reward, ScoreItem
from offbeat.reward.loop import Scored
from offbeat.texts import writable

LARGEST_GROUP = 1024
"""Rows of one group: more are likelier a mistake than samples of one prompt."""
DIGITS = 6
OUTCOME = ("value", "status", "cause", "reason", "raw", "spread")
_OF_ANSWER = ("completion_tokens", "finish_reason")


@dataclass(frozen=True, slots=True)
class Entry:
    """A row to score: its place in the file (from 0), its line, its group. `item` is None for a
    row that none of the chosen sources scores."""

    place: int
    line: int
    key: str
    item: ScoreItem | None


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are read: `config` as it is, `chosen` the same with the sources to ask.

    `group_column` None: rows on end with equal prompts are a group.
    """

    config: Config
    chosen: Config
    path: Path
    answer_column: str
    group_column: str | None
    into: str

    def __post_init__(self) -> None:
        """Refuses a prompt in a column that is read as the answer's."""
        prompt = self.config.data.prompt_column
        if prompt == self.answer_column:
            raise UserError(
                f"--answer-column {prompt} is the prompt's column (data.prompt_column); name the "
                "column of the answers"
            )
        if prompt in _OF_ANSWER:
            raise UserError(
                f"data.prompt_column = {prompt!r} is the name of a column that says something of "
                "the answer; set it to the prompt's, renamed if need be"
            )

    @property
    def grouped(self) -> bool:
        """Whether a source's scores or the total depend on a row's group."""
        sources = self.chosen.active_rewards.values()
        return any(source.grouped or source.role == "veto" for source in sources)

    def entries(self, rows: Iterable[Row]) -> Iterator[Entry]:
        """The rows as entries; raises `UserError` with the line of one that cannot be scored."""
        for place, row in enumerate(rows):
            yield self._entry(place, row)

    def groups(self, rows: Iterable[Row]) -> Iterator[list[Entry]]:
        """The rows by groups: each alone where nothing depends on its group.

        Raises `UserError` for a group that is too large, or whose rows are not on end.
        """
        group: list[Entry] = []
        seen: set[int] = set()
        for entry in self.entries(rows):
            if group and (not self.grouped or entry.key != group[0].key):
                yield group
                group = []
            if not group and self.grouped and self.group_column is not None:
                if hash(entry.key) in seen:
                    raise UserError(
                        f"{self._where(entry.line)} belongs to a group that ended before; sort the "
                        f"rows by {self.group_column}"
                    )
                seen.add(hash(entry.key))
            group.append(entry)
            if len(group) > LARGEST_GROUP:
                raise UserError(
                    f"{self.path} lines {group[0].line} to {entry.line} are more than "
                    f"{LARGEST_GROUP} rows of one group; name what tells groups apart with "
                    "--group-column"
                )
        if group:
            yield group

    def _entry(self, place: int, row: Row) -> Entry:
        check_row(self.config, self.path, row)
        for name in (self.into, f"{self.into}s"):
            if name in row.columns:
                raise UserError(
                    f"{self._where(row.line)} has a column {name!r} already; name another one for "
                    "the scores with --into"
                )
        answer = self._answer(row)
        own = {self.answer_column, *_OF_ANSWER}
        columns = {name: value for name, value in row.columns.items() if name not in own}
        rest = Row(row.line, columns)
        check_pick(self.config, self.path, rest)
        prompt = plain_prompt(self.config, rest)
        names = self._names(prompt.columns)
        item = None
        if names:
            item = ScoreItem(prompt, answer, self._finish(row), self._tokens(row))
        return Entry(place, row.line, json.dumps([self._group(row), names], default=str), item)

    def _names(self, columns: Mapping[str, Any]) -> tuple[str, ...]:
        """The chosen sources that score a row with these columns."""
        chosen = self.chosen
        try:
            return picked(
                columns, chosen.active_rewards, chosen.data.reward_column, tuple(chosen.reward)
            )
        except BadPick:  # it is scored by sources that were not chosen
            return ()

    def _group(self, row: Row) -> Any:
        column = self.group_column
        if column is None:
            return row.columns[self.config.data.prompt_column]
        if column not in row.columns:
            raise UserError(
                f"{self._where(row.line)} has no column {column!r}; set --group-column to one that "
                f"every row has: {', '.join(map(str, row.columns))}"
            )
        return str(row.columns[column])

    def _answer(self, row: Row) -> str:
        """The answer: a text, or the text of a list of one message."""
        column = self.answer_column
        if column not in row.columns:
            raise UserError(
                f"{self._where(row.line)} has no column {column!r}; it has: "
                f"{', '.join(map(str, row.columns))}; set --answer-column to the answers'"
            )
        value = row.columns[column]
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            value = value[0].get("content")
        if not isinstance(value, str):
            raise UserError(
                f"{self._where(row.line)}: column {column!r} must be a text (the answer), and is "
                f"{value!r:.40}"
            )
        return value

    def _finish(self, row: Row) -> FinishReason:
        value = row.columns.get("finish_reason")
        known: tuple[FinishReason, ...] = get_args(FinishReason)
        for reason in known:
            if value == reason or value is None:
                return reason
        raise UserError(
            f"{self._where(row.line)}: finish_reason = {value!r:.40} must be one of "
            f"{', '.join(known)}; mend or rename that column"
        )

    def _tokens(self, row: Row) -> int:
        value = row.columns.get("completion_tokens")
        if isinstance(value, float):  # what pandas makes of whole numbers in a column with gaps
            value = None if math.isnan(value) else int(value) if value.is_integer() else value
        if value is None:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UserError(
                f"{self._where(row.line)}: completion_tokens = {value!r:.40} must be a number of "
                "tokens; mend or rename that column"
            )
        return value

    def _where(self, line: int) -> str:
        return f"{self.path} line {line}"


def items_of(group: Sequence[Entry]) -> list[ScoreItem]:
    """A group's items as samples of one prompt; none if no source scores it."""
    first = group[0].place
    return [
        replace(entry.item, index=index, prompt=replace(entry.item.prompt, ordinal=first))
        for index, entry in enumerate(group)
        if entry.item is not None
    ]


def result_of(scored: Scored | None, config: Config, into: str) -> dict[str, Any]:
    """The columns that scoring adds to a row: the total, and each source's outcome or None.

    Numbers have 6 significant digits, and there are no times, so that scoring the same twice
    writes the same bytes. A failure is called one also where on_failure = "abstain" lets it pass.
    """
    rewards = {} if scored is None else scored.rewards
    outcomes = {
        name: outcome_of(rewards[name], exact=section.kind == "genrm") if name in rewards else None
        for name, section in config.active_rewards.items()
    }
    total = None if scored is None else scored.total
    return {into: rounded(total), f"{into}s": outcomes}


def outcome_of(reward: Reward, *, exact: bool) -> dict[str, Any]:
    """One source's outcome as plain values; `exact`: its raw text is a judge's own words."""
    failed = reward.cause is not None
    return {
        "value": rounded(reward.value),
        "status": "failed" if failed else reward.status,
        "cause": reward.cause,
        "reason": writable(reward.reason),
        "raw": writable(reward.raw if exact else _shortened(reward.raw)),
        "spread": rounded(reward.spread),
    }


def rounded(value: float | None) -> float | None:
    """With 6 significant digits: what a batch's size does to a logit's last digits is not kept."""
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _shortened(raw: str) -> str:
    """A raw text that is a number, rounded as values are."""
    try:
        return repr(rounded(float(raw)))
    except ValueError:
        return raw
