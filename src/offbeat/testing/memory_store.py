"""A store in memory, for simulations: commits come late, and a crash loses what they had not taken.

`Tables` are the disk: they outlive the process that writes them. `MemoryStore` is one process's
hold on them, with the interface of `offbeat.store.Store`. No threads: it wants a running loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.ledger import Row
from offbeat.store import Recorded, StoreError
from offbeat.store_work import Bytes

Pack = tuple[int, int, Bytes]


@dataclass(slots=True)
class Kept:
    """A group's committed payload. Bytes are made when they are read."""

    attempt: int
    tokens: Bytes
    rewards: Bytes | None = None


@dataclass(slots=True)
class Tables:
    """What is committed, and the copies that were made of it, by path."""

    groups: dict[int, Row] = field(default_factory=dict)
    payloads: dict[int, Kept] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    copies: dict[Path, dict[int, Row]] = field(default_factory=dict)


@dataclass(slots=True)
class _Put:
    rows: list[Row] = field(default_factory=list)
    meta: tuple[str, str] | None = None
    tokens: Pack | None = None
    rewards: Pack | None = None
    release: tuple[int, ...] = ()
    final_before: int | None = None


class MemoryStore:
    """One process's hold on `tables`. `delay()` gives the seconds until a commit; `seen(rows)` is
    told of every put, in order."""

    busy_seconds = 0.0  # it uses no thread

    def __init__(
        self, tables: Tables, delay: Callable[[], float], seen: Callable[[list[Row]], None]
    ) -> None:
        self.tables = tables
        self._delay, self._seen = delay, seen
        self._queue: list[_Put] = []
        self._timer: asyncio.TimerHandle | None = None
        self._dead = False
        self._done = _future()  # of all that is committed together

    def put(
        self,
        rows: Iterable[Row],
        *,
        tokens: Pack | None = None,
        rewards: Pack | None = None,
        release: Iterable[int] = (),
        final_before: int | None = None,
    ) -> Future[None]:
        """As `Store.put`; of a process that has died nothing comes any more."""
        found = list(rows)
        if not self._dead:
            self._seen(found)
        return self._submit(_Put(found, None, tokens, rewards, tuple(release), final_before))

    def put_meta(self, key: str, value: str) -> Future[None]:
        """As `Store.put_meta`."""
        return self._submit(_Put(meta=(key, value)))

    def payloads(self, ordinals: Iterable[int]) -> dict[int, Recorded]:
        """As `Store.payloads`."""
        found = {}
        for ordinal in ordinals:
            if (kept := self.tables.payloads.get(ordinal)) is not None:
                rewards = None if kept.rewards is None else kept.rewards()
                found[ordinal] = Recorded(kept.attempt, kept.tokens(), rewards)
        return found

    def read_all(self) -> list[Row]:
        """As `Store.read_all`."""
        return [row for _, row in sorted(self.tables.groups.items())]

    def meta(self) -> dict[str, str]:
        """As `Store.meta`."""
        return dict(self.tables.meta)

    def copy_to(self, path: Path | str) -> None:
        """As `Store.copy_to`: the rows alone."""
        self.tables.copies[Path(path)] = dict(self.tables.groups)

    def crash(self) -> None:
        """The process dies: what is not committed is lost."""
        self._dead = True
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        """Commits what is queued, and ends."""
        if not self._dead:
            self._commit()
            self._dead = True

    def _submit(self, put: _Put) -> Future[None]:
        if not self._dead:
            self._queue.append(put)
            if self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._delay(), self._commit)
        return self._done

    def _commit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        puts, self._queue, self._timer = self._queue, [], None
        done, self._done = self._done, _future()
        if self._dead:
            raise StoreError("a dead process commits nothing")
        for put in puts:
            self._apply(put)
        done.set_result(None)

    def _apply(self, put: _Put) -> None:
        tables = self.tables
        tables.groups.update((row.ordinal, row) for row in put.rows)
        if put.meta is not None:
            tables.meta[put.meta[0]] = put.meta[1]
        if put.tokens is not None:
            ordinal, attempt, pack = put.tokens
            tables.payloads[ordinal] = Kept(attempt, pack)
        if put.rewards is not None:
            ordinal, attempt, pack = put.rewards
            kept = tables.payloads.get(ordinal)
            if kept is not None and kept.attempt == attempt:
                kept.rewards = pack
        for ordinal in put.release:
            tables.payloads.pop(ordinal, None)
        if put.final_before is not None:
            for ordinal in list(tables.payloads):
                row = tables.groups.get(ordinal)
                if row is None or row.state != "trained" or row.step is None:
                    continue
                if row.step < put.final_before:
                    del tables.payloads[ordinal]


def _future() -> Future[None]:
    """What is queued is committed, whoever stops waiting for it."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future
