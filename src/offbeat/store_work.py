"""What one commit of the store writes: the puts that came together, and few statements for them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from offbeat.ledger import Row

PART = 1000  # rows of one statement: SQLite takes 32,766 values
PAYLOAD = ("tokens", "rewards")
"""The tables of payloads."""

T = TypeVar("T")
Bytes = Callable[[], bytes]
"""Makes bytes on the writer's thread."""


@dataclass(slots=True)
class Put:
    """What one call brings; `done` is resolved once it is committed, see `Store.put`."""

    rows: list[Row] = field(default_factory=list)
    meta: list[tuple[str, str]] = field(default_factory=list)
    tokens: tuple[int, int, Bytes] | None = None  # ordinal, attempt
    rewards: tuple[int, int, Bytes] | None = None
    release: tuple[int, ...] = ()
    final_before: int | None = None
    done: Future[None] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Work:
    """What one commit writes, as the parameters of its statements."""

    rows: list[tuple[int, int, str, int | None, str | None, int]]
    meta: list[tuple[str, str]]
    tokens: list[tuple[int, int, bytes]]
    rewards: list[tuple[int, int, bytes]]
    gone: list[int]
    final_before: int | None


def gathered(puts: Iterable[Put]) -> Work:
    """All puts in their order: of each group the newest row, tokens and rewards alone."""
    rows: dict[int, Row] = {}
    meta: dict[str, str] = {}
    tokens: dict[int, tuple[int, int, Bytes]] = {}
    rewards: dict[int, tuple[int, int, Bytes]] = {}
    gone: set[int] = set()
    final_before: int | None = None
    for put in puts:
        for row in put.rows:
            rows[row.ordinal] = row
        meta.update(put.meta)
        if put.tokens is not None:
            tokens[put.tokens[0]] = put.tokens
            gone.discard(put.tokens[0])
        if put.rewards is not None:
            rewards[put.rewards[0]] = put.rewards
        for ordinal in put.release:
            tokens.pop(ordinal, None)
            rewards.pop(ordinal, None)
            gone.add(ordinal)
        if put.final_before is not None:
            final_before = max(put.final_before, final_before or 0)
    return Work(
        [(r.ordinal, r.attempt, r.state, r.step, r.reason, r.deadline) for r in rows.values()],
        list(meta.items()),
        [(ordinal, attempt, pack()) for ordinal, attempt, pack in tokens.values()],
        [(ordinal, attempt, pack()) for ordinal, attempt, pack in rewards.values()],
        list(gone),
        final_before,
    )


def insert(db: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """All rows by few statements: at each one the thread waits for its turn behind the event loop,
    for up to 5 ms."""
    for some in split(rows):
        places = ", ".join([f"({marks(some[0])})"] * len(some))
        values = [value for row in some for value in row]
        db.execute(f"INSERT OR REPLACE INTO {table} VALUES {places}", values)


def split(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """In parts that one statement takes."""
    return (items[i : i + PART] for i in range(0, len(items), PART))


def marks(values: Sequence[Any]) -> str:
    """A question mark for each."""
    return ", ".join("?" * len(values))
