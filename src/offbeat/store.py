"""Keeps the ledger and the groups' payload durably: one SQLite file, one writer, group commit.

The invariant: when the future of a `put` is resolved, all of it is committed, or none of it, and no
death of the process can take it back (a loss of power may take the last commits, never the file's
consistency: WAL, synchronous=NORMAL). Puts are committed in their order, so that whoever waits for
one has all before it. One process writes: a lock of the operating system, which ends with the
process, refuses a second.
"""

from __future__ import annotations

import fcntl
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from offbeat.disk import check_local
from offbeat.errors import RunFailed
from offbeat.faults import point
from offbeat.ledger import Counts, Row, State
from offbeat.store_work import PAYLOAD, Bytes, Put, gathered, insert, marks, split

GROUP_SECONDS = 0.004  # the longest that a put waits for company before its commit starts
LOCK_PAUSE_SECONDS = 0.1
SCHEMA = "2"
_TABLES = """
CREATE TABLE IF NOT EXISTS groups (
  ordinal INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, state TEXT NOT NULL,
  step INTEGER, reason TEXT, deadline INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS tokens (
  ordinal INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, packed BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS rewards (
  ordinal INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, packed BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class StoreError(RunFailed):
    """The store is closed, failed earlier, is another process's, or its file is not one that this
    version can read."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The payload of a group as `offbeat.recorded` packs it; `rewards` None: not scored yet."""

    attempt: int
    tokens: bytes
    rewards: bytes | None


class Store:
    """The durable ledger of one run. Methods may be called from any thread.

    `put` and `put_meta` never wait for the disk; all reads do, so call them in a thread. After one
    failed commit every later put fails: a ledger with a hole would lie.

    Args:
        path: the file, on a local disk (WAL does not work on network file systems). Created,
            without its folder, if it is not there.
        wait_seconds: how long another process's lock is waited for.

    Raises:
        UserError: the file is on a network file system.
        StoreError: the file is no ledger of this version, or another process writes it.
        sqlite3.Error: the file cannot be opened.
    """

    def __init__(self, path: Path | str, wait_seconds: float = 0.0) -> None:
        self.path = Path(path)
        check_local(self.path)
        self.busy_seconds = 0.0  # CPU time that the writer has used
        self._lock_fd = lock_file(self.path, wait_seconds)
        try:
            self._db = _prepare(self.path)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._queue: queue.SimpleQueue[Put | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="offbeat-store", daemon=True)
        self._thread.start()

    def put(
        self,
        rows: Iterable[Row],
        *,
        tokens: tuple[int, int, Bytes] | None = None,
        rewards: tuple[int, int, Bytes] | None = None,
        release: Iterable[int] = (),
        final_before: int | None = None,
    ) -> Future[None]:
        """Queues rows, the newest for an ordinal winning; resolved once they are committed.

        With them, in the same commit: a group's `tokens` and its `rewards` (ordinal, attempt, what
        packs them on the writer's thread), which replace those of an older attempt, and are read
        together only if they are of the same one; ordinals to `release`, whose payload goes; and
        the step `final_before` which that of trained groups goes.

        The future raises StoreError if the commit failed.

        Raises:
            StoreError: the store is closed.
        """
        put = Put(list(rows), [], tokens, rewards, tuple(release), final_before)
        return self._submit(put)

    def put_meta(self, key: str, value: str) -> Future[None]:
        """Queues one key of the table `meta`, in order with `put`. Result and errors: see `put`."""
        return self._submit(Put(meta=[(key, value)]))

    def close(self) -> None:
        """Commits what is queued and ends the writer. Again: nothing happens."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def payloads(self, ordinals: Iterable[int]) -> dict[int, Recorded]:
        """The committed payload of those that have any."""
        return read_payloads(self.path, ordinals)

    def read_all(self) -> list[Row]:
        """Every committed group, by ordinal."""
        return read_rows(self.path)

    def meta(self) -> dict[str, str]:
        """The committed table `meta`."""
        return dict(read_meta(self.path))

    def counts(self) -> Counts:
        """What `Ledger.counts` says, from the committed table alone."""
        return read_counts(self.path)

    def copy_to(self, path: Path | str) -> None:
        """Writes a consistent copy of all that is committed to `path`, as one plain file, with the
        payload of unfinished groups alone.

        Raises:
            sqlite3.Error: `path` exists and is no database, or cannot be written.
        """
        with closing(sqlite3.connect(path, isolation_level=None)) as target:
            target.executescript(_TABLES)
            target.execute("ATTACH ? AS source", (str(self.path),))
            target.execute("BEGIN")
            for table in ("groups", "meta"):
                target.execute(f"INSERT INTO {table} SELECT * FROM source.{table}")
            for table in PAYLOAD:
                target.execute(
                    f"INSERT INTO {table} SELECT * FROM source.{table} WHERE ordinal IN (SELECT "
                    "ordinal FROM source.groups WHERE state NOT IN ('trained', 'discarded'))"
                )
            target.execute("COMMIT")

    def _submit(self, put: Put) -> Future[None]:
        with self._lock:
            if self._closed:
                raise StoreError(f"{self.path} is closed")
            put.done.set_running_or_notify_cancel()  # whoever stops waiting leaves no hole
            self._queue.put(put)
        return put.done

    def _write(self) -> None:
        """Consumes queued puts, commits them together, resolves their futures; ends at None."""
        more = True
        while more:
            puts, more = self._gather()
            if puts:
                self._commit(puts)
            self.busy_seconds = time.thread_time()
        self._db.close()
        os.close(self._lock_fd)

    def _gather(self) -> tuple[list[Put], bool]:
        """The puts of the next commit, and whether there will be more."""
        puts: list[Put] = []
        item = self._queue.get()
        if item is not None:
            time.sleep(GROUP_SECONDS)  # one wake-up for all that come meanwhile
        while item is not None:
            puts.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return puts, True
        return puts, False

    def _commit(self, puts: list[Put]) -> None:
        if self._failure is None:
            try:
                self._transact(puts)
            except Exception as error:  # boundary: whatever it is, whoever waits is told
                self._failure = error
        for put in puts:
            if self._failure is None:
                put.done.set_result(None)
            else:
                failure = StoreError(f"{self.path}: a commit failed: {self._failure}")
                failure.__cause__ = self._failure
                put.done.set_exception(failure)

    def _transact(self, puts: list[Put]) -> None:
        work = gathered(puts)
        point("store.before_commit")
        with self._db as db:
            db.execute("BEGIN IMMEDIATE")
            insert(db, "groups", work.rows)
            insert(db, "meta", work.meta)
            insert(db, "tokens", work.tokens)
            insert(db, "rewards", work.rewards)
            if work.gone or work.final_before is not None:
                point("store.before_release")
            for table in PAYLOAD:
                for some in split(work.gone):
                    db.execute(f"DELETE FROM {table} WHERE ordinal IN ({marks(some)})", some)
                if work.final_before is not None:
                    db.execute(
                        f"DELETE FROM {table} WHERE ordinal IN (SELECT ordinal FROM {table} JOIN "
                        "groups USING (ordinal) WHERE state = 'trained' AND step < ?)",
                        (work.final_before,),
                    )
            point("store.in_commit")
        point("store.after_commit")


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


def read_payloads(path: Path | str, ordinals: Iterable[int]) -> dict[int, Recorded]:
    """The committed payload of those of `ordinals` that have any. Raises: see `read_rows`."""
    found: dict[int, Recorded] = {}
    query = (
        "SELECT t.attempt, t.packed, r.packed FROM tokens t LEFT JOIN rewards r "
        "ON r.ordinal = t.ordinal AND r.attempt = t.attempt WHERE t.ordinal = ?"
    )
    with _reader(Path(path)) as db:
        for ordinal in ordinals:
            row = db.execute(query, (ordinal,)).fetchone()
            if row is not None:
                found[ordinal] = Recorded(*row)
    return found


def read_meta(path: Path | str) -> Mapping[str, str]:
    """The table `meta` of a ledger file. Raises: see `read_rows`."""
    with _reader(Path(path)) as db:
        return dict(db.execute("SELECT key, value FROM meta"))


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


def lock_file(path: Path, wait_seconds: float = 0.0) -> int:
    """The open `<path>.lock`, locked; the system lets it go when it is closed or the process ends.

    Raises `StoreError` if another process has it after `wait_seconds`.
    """
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    until = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            return fd
        except BlockingIOError:
            if time.monotonic() >= until:
                owner = os.pread(fd, 20, 0).decode("ascii", "replace") or "unknown"
                os.close(fd)
                raise StoreError(f"{path}.lock is held by process {owner}") from None
            time.sleep(LOCK_PAUSE_SECONDS)


def _prepare(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA secure_delete=OFF")
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
