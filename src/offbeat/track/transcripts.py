"""transcripts/part-000003.parquet: every call of a judge, to read what it saw and what it said.

Rows belong to samples by scope, ordinal, attempt and index; samples that were dropped are here
too. Written from a thread, each file by an atomic rename; nothing here raises into scoring.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from offbeat.records import Reward, ScoreItem, Transcript
from offbeat.texts import writable
from offbeat.track.metrics import TelemetryThread

QUEUED_FILES = 1_000
ROWS_A_FILE = 2_000
CHARACTERS_A_FILE = 32_000_000
MOST_CHARACTERS = 256_000_000
"""Of what waits to be written: with more, a group's calls are not kept, and counted as lost."""
COLUMNS: Mapping[str, Any] = {
    "scope": pa.string(),
    "ordinal": pa.int64(),
    "attempt": pa.int32(),
    "index": pa.int32(),
    "source": pa.string(),
    "prompt": pa.string(),
    "raw": pa.string(),
    "value": pa.float64(),
    "cause": pa.string(),
    "prompt_tokens": pa.int64(),
    "completion_tokens": pa.int64(),
    "seconds": pa.float32(),
    "cached": pa.bool_(),
    "other": pa.int32(),
    "first": pa.bool_(),
}
FILES = "part-[0-9][0-9][0-9][0-9][0-9][0-9].parquet"
Row = tuple[str, int, int, int, str, Transcript]


class TranscriptWriter:
    """Writes the transcripts under `<run_dir>/transcripts`, a file for some thousand calls, behind
    those that are there. What waits for that is bounded, in calls and in characters.

    The thread is handed a file's rows at a time: one that wakes for every call holds up the event
    loop, whose turn it takes.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "transcripts"
        self._rows: list[Row] = []  # of the next file
        self._size = 0  # their characters
        self._held = 0  # characters of all that waits
        self._dropped = 0
        self._files: int | None = None
        self._lock = threading.Lock()
        self._thread: TelemetryThread[tuple[list[Row], int]] = TelemetryThread(
            "transcripts", self._write_all, QUEUED_FILES
        )

    @property
    def lost(self) -> int:
        """Groups or files that were not written."""
        return self._thread.boundary.errors + self._thread.dropped + self._dropped

    def write(
        self, scope: str, attempt: int, items: Sequence[ScoreItem],
        rewards: Sequence[Mapping[str, Reward]],
    ) -> None:  # fmt: skip
        """Keep what the judges of one group said."""
        rows = [
            (scope, item.prompt.ordinal, attempt, item.index, name, transcript)
            for item, of_sample in zip(items, rewards, strict=True)
            for name, reward in of_sample.items()
            for transcript in reward.transcripts
        ]
        if not rows:
            return
        size = _characters(rows)
        with self._lock:
            if self._held + size > MOST_CHARACTERS:
                self._dropped += 1
                return
            self._held += size
            self._size += size
            self._rows += rows
            full = len(self._rows) >= ROWS_A_FILE or self._size >= CHARACTERS_A_FILE
        if full:
            self._hand_over()

    def close(self) -> None:
        """Write what is there, within 10 seconds."""
        self._hand_over()
        self._thread.close()

    def _hand_over(self) -> None:
        """Gives the thread the next file's rows."""
        with self._lock:
            rows, size = self._rows, self._size
            self._rows, self._size = [], 0
        if rows and not self._thread.submit((rows, size)):
            self._let_go(size)

    def _write_all(self, files: list[tuple[list[Row], int]]) -> None:
        for rows, size in files:
            with self._thread.boundary:
                try:
                    self._write_file(rows)
                finally:
                    self._let_go(size)

    def _write_file(self, rows: list[Row]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._files is None:
            numbers = [int(path.stem.rpartition("-")[2]) for path in self.folder.glob(FILES)]
            self._files = max(numbers, default=-1) + 1
        path = self.folder / f"part-{self._files:06d}.parquet"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            pq.write_table(_table(rows), temporary, compression="zstd")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self._files += 1

    def _let_go(self, characters: int) -> None:
        with self._lock:
            self._held -= characters


def _characters(rows: Sequence[Row]) -> int:
    return sum(len(call.prompt) + len(call.raw) for *_, call in rows)


def _table(rows: Sequence[Row]) -> Any:
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for scope, ordinal, attempt, index, source, call in rows:
        values = (
            scope, ordinal, attempt, index, source, writable(call.prompt),
            writable(call.raw), call.value, call.cause, call.prompt_tokens,
            call.completion_tokens, call.seconds, call.cached, call.other, call.first,
        )  # fmt: skip
        for name, value in zip(COLUMNS, values, strict=True):
            columns[name].append(value)
    return pa.table(columns, schema=pa.schema(list(COLUMNS.items())))
