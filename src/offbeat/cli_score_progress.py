"""What `offbeat score` has scored so far, durably: one SQLite file beside the output.

Invariant: a row is there with all that is written of it, or not at all; the rows of a group are
there together. The file belongs to what the scores follow from (`key`: settings, files, options)
and to one process at a time, also when that is killed.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import UserError

_TABLES = """
CREATE TABLE IF NOT EXISTS key (facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS done (place INTEGER PRIMARY KEY, failed INTEGER NOT NULL,
                                 result TEXT NOT NULL);
"""
_SHOWN = 60


class Progress:
    """The rows that are done, by their place in the file (from 0)."""

    def __init__(self, path: Path, key: Mapping[str, Any]) -> None:
        """Opens or begins it. Raises `UserError` where it is another's: of other settings, of a
        process that runs, or no such file at all."""
        self._path = path
        try:
            self._db = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise UserError(f"{path} cannot be opened: {error}; choose another -o") from None
        try:
            self._begin(dict(key))
        except sqlite3.OperationalError as error:
            self._db.close()
            if "locked" in str(error):
                raise UserError(
                    f"{path} is in use: another offbeat score writes the same output; wait for it, "
                    "or choose another -o"
                ) from None
            raise UserError(
                f"{path} cannot be written: {error}; make room, or choose another -o"
            ) from None
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise UserError(
                f"{path} is no progress of offbeat score ({error}); delete it, or choose another -o"
            ) from None
        except BaseException:
            self._db.close()
            raise

    def _begin(self, key: dict[str, Any]) -> None:
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")  # holds through a kill; a power cut may undo
        self._db.execute("BEGIN IMMEDIATE")
        for statement in filter(str.strip, _TABLES.split(";")):
            self._db.execute(statement)
        found = self._db.execute("SELECT facts FROM key").fetchone()
        if found is None or self._empty():  # of a start that came to nothing, whatever its settings
            found = None
            self._db.execute("DELETE FROM key")
            self._db.execute("INSERT INTO key VALUES (?)", (json.dumps(key),))
        self._db.execute("COMMIT")
        if found is not None:
            changed = difference(json.loads(found[0]), json.loads(json.dumps(key)))
            if changed is not None:
                raise UserError(
                    f"{self._path} holds what was scored with another {changed}; put that back to "
                    f"go on, or delete {self._path} to begin anew"
                )

    def done(self, rows: int) -> bytearray:
        """1 for each of the rows that is done, else 0."""
        found = bytearray(rows)
        with self._told():
            for (place,) in self._db.execute("SELECT place FROM done"):
                found[place] = 1
        return found

    def put(self, results: Mapping[int, tuple[bool, str]]) -> None:
        """Commits rows: whether a source failed, and the result as JSON."""
        rows = [(place, failed, result) for place, (failed, result) in results.items()]
        with self._told():
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR REPLACE INTO done VALUES (?, ?, ?)", rows)
            self._db.execute("COMMIT")

    def forget_failed(self) -> int:
        """Drops the rows in which a source failed; returns how many."""
        with self._told():
            return self._db.execute("DELETE FROM done WHERE failed").rowcount

    def results(self) -> Iterator[tuple[int, Any]]:
        """Places and results in the file's order."""
        with self._told():
            found = self._db.execute("SELECT place, result FROM done ORDER BY place")
            yield from ((place, json.loads(result)) for place, result in found)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Makes one sentence of what SQLite meets; what was committed before stays."""
        try:
            yield
        except sqlite3.Error as error:
            if self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise UserError(
                    f"{self._path} cannot be written: {error}; make room, and the same command "
                    "goes on"
                ) from None
            raise UserError(f"{self._path} is damaged ({error}); delete it to begin anew") from None

    def leave(self) -> None:
        """Closes it, to be gone on from; deletes it if nothing is in it."""
        empty = False
        with contextlib.suppress(sqlite3.Error):
            empty = self._empty()
        if empty:
            self.remove()
        else:
            self._db.close()

    def _empty(self) -> bool:
        return self._db.execute("SELECT 1 FROM done LIMIT 1").fetchone() is None

    def remove(self) -> None:
        """Closes and deletes it."""
        self._db.close()
        for end in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + end).unlink(missing_ok=True)


def difference(before: Any, now: Any, where: str = "") -> str | None:
    """The first place where two trees of plain values differ, in words; None if nowhere."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            inner = f"{where}{' ' if where.endswith(' of') else '.'}{name}" if where else name
            found = difference(before.get(name), now.get(name), inner)
            if found is not None:
                return found
        return None
    if before == now:
        return None
    return f"{where} ({_shown(before)}, now {_shown(now)})"


def _shown(value: Any) -> str:
    text = "none" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
