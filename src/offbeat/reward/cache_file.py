"""The thread and the file of the verdict cache: what it is asked, and how it reads and writes.

Whatever is wrong with the disk ends the thread and turns its owner off; a damaged file is set
aside once, and a new one begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

COMMIT_SECONDS = 0.2
COMMIT_ROWS = 256
CLOSING_SECONDS = 1.5  # that a close waits for other processes that write
MOST_WAITING = 20_000  # rows that wait for a commit while other processes write
IDLE_SECONDS = 5.0  # then the thread ends and the file is closed, until it is needed again
_SCHEMA = 1
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TABLE = """
CREATE TABLE IF NOT EXISTS verdicts (
  id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, verdict TEXT NOT NULL);
"""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Get:
    """Made by who waits: `found` is of that event loop."""

    key: str
    found: asyncio.Future[str | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(slots=True)
class Put:
    key: str
    verdict: str


@dataclass(slots=True)
class Close:
    done: Future[None] = field(default_factory=Future)


Job = Get | Put | Close
Answer = tuple[asyncio.Future[str | None], str | None]


class Owner(Protocol):
    """The cache, as its thread sees it."""

    def next_jobs(self, seconds: float) -> list[Job]:
        """The next jobs; none after so long without one."""
        ...

    def leave(self) -> bool:
        """Whether the thread may end: nothing came meanwhile."""
        ...

    def turn_off(self, why: str) -> None:
        """The cache is off from here on."""
        ...


class Keeper:
    """One life of the cache's thread: reads, and writes in batches."""

    def __init__(self, path: Path, most: int, owner: Owner) -> None:
        self._path, self._most, self._owner = path, most, owner
        self._db: sqlite3.Connection | None = None
        self._waiting: dict[str, str] = {}
        self._found: list[Answer] = []
        self._commit_at = 0.0
        self._untrimmed = 0
        self._set_aside = False

    def run(self) -> None:
        """Until nothing has come for a while, or the cache is turned off."""
        jobs: deque[Job] = deque()
        try:
            while True:
                pause = self._commit_at - time.monotonic() if self._waiting else IDLE_SECONDS
                jobs.extend(self._owner.next_jobs(pause))
                if not jobs:
                    self._guard(None)
                    if not self._waiting and self._owner.leave():
                        break
                while jobs:
                    self._guard(jobs[0])
                    if isinstance(job := jobs.popleft(), Close):
                        self._close()
                        _answer(job.done)
                self._tell()
        except (sqlite3.Error, OSError) as error:
            self._owner.turn_off(str(error) or type(error).__name__)
            self._tell()
            dismiss(jobs)
            while (late := self._owner.next_jobs(0.0)) or not self._owner.leave():
                dismiss(late)
        self._close()

    def _tell(self) -> None:
        """Hands what was found to those who wait."""
        found, self._found = self._found, []
        _tell(found)

    def _guard(self, job: Job | None) -> None:
        """Does the job; a damaged file is set aside, once, and the job done with a new one."""
        try:
            self._do(job)
        except sqlite3.DatabaseError as error:
            if _code(error) not in _DAMAGED:
                raise
            self._close()
            self._replace_file(str(error))
            self._do(job)

    def _do(self, job: Job | None) -> None:
        if isinstance(job, Get):
            text = self._waiting.get(job.key) or self._find(job.key)
            self._found.append((job.found, text))
        elif isinstance(job, Put):
            if not self._waiting:
                self._commit_at = time.monotonic() + COMMIT_SECONDS
            self._waiting[job.key] = job.verdict
        due = time.monotonic() >= self._commit_at or len(self._waiting) >= COMMIT_ROWS
        if self._waiting and due and not isinstance(job, Close):
            self._tell()
            self._commit()
        until = time.monotonic() + CLOSING_SECONDS
        while self._waiting and isinstance(job, Close) and time.monotonic() < until:
            self._commit()

    def _find(self, key: str) -> str | None:
        query = "SELECT verdict FROM verdicts WHERE key = ?"
        try:
            row = self._open().execute(query, (_blob(key),)).fetchone()
        except sqlite3.OperationalError as error:
            if _code(error) not in _BUSY:
                raise
            return None  # another process makes or mends the file
        return None if row is None else str(row[0])

    def _commit(self) -> None:
        rows = [(_blob(key), text) for key, text in self._waiting.items()]
        try:
            db = self._open()
            with db:
                db.execute("BEGIN IMMEDIATE")
                db.executemany("INSERT OR REPLACE INTO verdicts (key, verdict) VALUES (?, ?)", rows)
                self._untrimmed += len(rows)
                if self._untrimmed > min(10_000, self._most // 10):
                    self._trim(db)
        except sqlite3.OperationalError as error:
            if _code(error) not in _BUSY:
                raise
            self._commit_at = time.monotonic() + COMMIT_SECONDS  # another process writes
            for key in list(self._waiting)[: max(0, len(self._waiting) - MOST_WAITING)]:
                del self._waiting[key]
            return
        self._waiting.clear()

    def _trim(self, db: sqlite3.Connection) -> None:
        """A row that is written anew is the newest, so there are never more rows than ids."""
        oldest = "SELECT max(id) - ? FROM verdicts"
        db.execute(f"DELETE FROM verdicts WHERE id <= ({oldest})", (self._most,))
        self._untrimmed = 0

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self._path, timeout=COMMIT_SECONDS, isolation_level=None)
            try:
                _prepare(db)
            except BaseException:
                db.close()
                raise
            self._db = db
            self._untrimmed = self._most  # what another start left is trimmed by the first commit
        return self._db

    def _replace_file(self, why: str) -> None:
        """Sets the file aside, unless another process has done that already."""
        if self._set_aside:
            raise OSError(why)
        self._set_aside = True
        if _sound(self._path):
            return
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.time():.0f}")
        log.warning("the verdict cache %s is set aside as %s: %s", self._path, aside.name, why)
        self._path.replace(aside)
        for end in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                self._path.with_name(self._path.name + end).unlink()

    def _close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    (schema,) = db.execute("PRAGMA user_version").fetchone()
    if schema == 0:
        with db:
            db.execute("BEGIN IMMEDIATE")
            db.execute(_TABLE)
            db.execute(f"PRAGMA user_version={_SCHEMA}")
    elif schema != _SCHEMA:
        raise OSError(f"it is of version {schema}, and this Offbeat writes {_SCHEMA}")


def _sound(path: Path) -> bool:
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=COMMIT_SECONDS)) as db:
            (said,) = db.execute("PRAGMA quick_check(1)").fetchone()
            return bool(said == "ok")
    except sqlite3.Error:
        return False


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary code; 0 where Python's module raised by itself."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _blob(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _answer(done: Future[None]) -> None:
    """Unless who waited has gone."""
    if done.set_running_or_notify_cancel():
        done.set_result(None)


def _tell(answers: Iterable[Answer]) -> None:
    """Answers those who wait, each event loop once."""
    loops: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
    for answer in answers:
        loops.setdefault(answer[0].get_loop(), []).append(answer)
    for loop, of_loop in loops.items():
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(_resolve, of_loop)


def _resolve(answers: Iterable[Answer]) -> None:
    for found, text in answers:
        if not found.done():
            found.set_result(text)


def dismiss(jobs: Iterable[Job]) -> None:
    """Nobody waits for a cache that is off."""
    _tell((job.found, None) for job in jobs if isinstance(job, Get))
    for job in jobs:
        if isinstance(job, Close):
            _answer(job.done)
