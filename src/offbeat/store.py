"""Keeps ledger rows durably: one SQLite file, one writer thread, group commit.

The invariant: when the future of a `put` is resolved, its rows are committed, all or none of them,
and no death of the process can take them back (a loss of power may take the last commits, never the
file's consistency: WAL, synchronous=NORMAL). Rows are committed in the order of the puts.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from offbeat.ledger import Counts, Row, State

GROUP_SECONDS = 0.004  # the longest that a put waits for company before its commit starts
SCHEMA = "1"
_TABLES = """
CREATE TABLE IF NOT EXISTS groups (
  ordinal INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, state TEXT NOT NULL,
  step INTEGER, reason TEXT, deadline INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class StoreError(ValueError):
    """The store is closed, failed earlier, or its file is not one that this version can read."""


@dataclass(slots=True)
class _Put:
    rows: list[Row]
    meta: list[tuple[str, str]]
    done: Future[None] = field(default_factory=Future)


class Store:
    """The durable ledger of one run. Methods may be called from any thread.

    `put` and `put_meta` never wait for the disk; all reads do, so call them in a thread. After one
    failed commit every later put fails: a ledger with a hole would lie.

    Args:
        path: the file, on a local disk (WAL does not work on network file systems). Created,
            without its folder, if it is not there.

    Raises:
        StoreError: the file is no ledger of this version.
        sqlite3.Error: the file cannot be opened.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._queue: queue.SimpleQueue[_Put | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._failure: Exception | None = None
        self._db = _prepare(self.path)
        self._thread = threading.Thread(target=self._write, name="offbeat-store", daemon=True)
        self._thread.start()

    def put(self, rows: Iterable[Row]) -> Future[None]:
        """Queues rows, the newest for an ordinal winning; resolved once they are committed.

        The future raises StoreError if the commit failed.

        Raises:
            StoreError: the store is closed.
        """
        return self._submit(_Put(list(rows), []))

    def put_meta(self, key: str, value: str) -> Future[None]:
        """Queues one key of the table `meta`, in order with `put`. Result and errors: see `put`."""
        return self._submit(_Put([], [(key, value)]))

    def close(self) -> None:
        """Commits what is queued and ends the writer. Again: nothing happens."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def read_all(self) -> list[Row]:
        """Every committed group, by ordinal."""
        return read_rows(self.path)

    def meta(self) -> dict[str, str]:
        """The committed table `meta`."""
        with _reader(self.path) as db:
            return dict(db.execute("SELECT key, value FROM meta"))

    def counts(self) -> Counts:
        """What `Ledger.counts` says, from the committed table alone."""
        return read_counts(self.path)

    def copy_to(self, path: Path | str) -> None:
        """Writes a consistent copy of all that is committed to `path`, as one plain file.

        Raises:
            sqlite3.Error: `path` exists and is no database, or cannot be written.
        """
        with _reader(self.path) as db, closing(sqlite3.connect(path)) as target:
            db.backup(target)
            target.execute("PRAGMA journal_mode=DELETE")

    def _submit(self, put: _Put) -> Future[None]:
        with self._lock:
            if self._closed:
                raise StoreError(f"{self.path} is closed")
            self._queue.put(put)
        return put.done

    def _write(self) -> None:
        """Consumes queued puts, commits them together, resolves their futures; ends at None."""
        more = True
        while more:
            puts, more = self._gather()
            if puts:
                self._commit(puts)
        self._db.close()

    def _gather(self) -> tuple[list[_Put], bool]:
        puts: list[_Put] = []
        item = self._queue.get()
        until = time.monotonic() + GROUP_SECONDS
        while item is not None:
            puts.append(item)
            try:
                item = self._queue.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return puts, True
            if time.monotonic() >= until and item is not None:
                puts.append(item)
                return puts, True
        return puts, False

    def _commit(self, puts: list[_Put]) -> None:
        live = [put for put in puts if put.done.set_running_or_notify_cancel()]
        if self._failure is None:
            try:
                self._transact(live)
            except (sqlite3.Error, OverflowError, UnicodeError) as error:
                self._failure = error
        for put in live:
            if self._failure is None:
                put.done.set_result(None)
            else:
                failure = StoreError(f"{self.path}: a commit failed: {self._failure}")
                failure.__cause__ = self._failure
                put.done.set_exception(failure)

    def _transact(self, puts: list[_Put]) -> None:
        rows = [
            (row.ordinal, row.attempt, row.state, row.step, row.reason, row.deadline)
            for put in puts
            for row in put.rows
        ]
        meta = [pair for put in puts for pair in put.meta]
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?)", rows)
            self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta)


def read_rows(path: Path | str) -> list[Row]:
    """Every committed group of a ledger file, by ordinal; its writer may be alive or dead.

    Raises:
        sqlite3.Error: the file is missing or is no database.
    """
    with _reader(Path(path)) as db:
        found = db.execute(
            "SELECT ordinal, attempt, state, step, reason, deadline FROM groups ORDER BY ordinal"
        )
        return [Row(o, a, cast(State, s), step, why, due) for o, a, s, step, why, due in found]


def read_counts(path: Path | str) -> Counts:
    """The counts of a ledger file. Raises: see `read_rows`."""
    query = "SELECT state, reason, COUNT(*) FROM groups GROUP BY state, reason"
    with _reader(Path(path)) as db:
        found = db.execute(query).fetchall()
    ends = ("trained", "discarded")
    return Counts(
        admitted=sum(n for _, _, n in found),
        trained=sum(n for state, _, n in found if state == "trained"),
        no_signal=sum(n for state, why, n in found if (state, why) == ("trained", "no_signal")),
        discarded={why or "unknown": n for state, why, n in found if state == "discarded"},
        live=sum(n for state, _, n in found if state not in ends),
    )


def _prepare(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(_TABLES)
        db.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (SCHEMA,))
        (schema,) = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        if schema != SCHEMA:
            raise StoreError(f"{path} has ledger schema {schema}; this version reads {SCHEMA}")
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def _reader(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that only reads."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        yield db
