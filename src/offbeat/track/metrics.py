"""metrics.jsonl: what a run did, one JSON object a line, written from a thread of its own.

Telemetry never changes training. Nothing here raises into its caller: an error (a full disk, a
value that is no JSON) is counted, logged once and dropped, by `TelemetryBoundary`, the one place
in this package that swallows exceptions. A line is either whole or skipped by `read_metrics`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from offbeat.records import Span

logger = logging.getLogger(__name__)

T = TypeVar("T")
FILE_NAME = "metrics.jsonl"
QUEUE_ITEMS = 10_000
BATCH_ITEMS = 1_000
CLOSE_SECONDS = 10.0


class TelemetryBoundary:
    """The edge of telemetry: an `Exception` in its `with` is counted, logged once and dropped.

    `errors` is the number of exceptions so far. Cancellation and interrupts pass through.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.errors = 0

    def __enter__(self) -> TelemetryBoundary:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self.errors += 1
        if self.errors == 1:
            logger.warning(
                "%s: telemetry is being lost: %s (training goes on; further errors are only "
                "counted)",
                self._what,
                error or repr(error),
                exc_info=None if isinstance(error, OSError) else error,
            )
        return True


class TelemetryThread(Generic[T]):
    """Hands items to `handle` in batches, in order, on a daemon thread, through a bounded queue.

    `submit` never blocks: with a full queue, or after `close`, the item is dropped and counted.
    """

    def __init__(self, what: str, handle: Callable[[list[T]], None], capacity: int) -> None:
        self._what = what
        self._handle = handle
        self._queue: queue.Queue[T | None] = queue.Queue(capacity)
        self._closed = threading.Event()
        self.boundary = TelemetryBoundary(what)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"offbeat {what}", daemon=True)
        self._thread.start()

    def submit(self, item: T) -> bool:
        """Queue one item; False if it was dropped."""
        if not self._closed.is_set():
            try:
                self._queue.put_nowait(item)
                return True
            except queue.Full:
                pass
        self.dropped += 1
        if self.dropped == 1:
            logger.warning("%s: the writer is behind or closed; records are dropped", self._what)
        return False

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Handle what is queued and end the thread, within `timeout` seconds; True if it ended."""
        if not self._closed.is_set():
            self._closed.set()
            started = time.monotonic()
            try:
                self._queue.put(None, timeout=timeout)
            except queue.Full:
                timeout = 0.0
            timeout = max(0.0, timeout - (time.monotonic() - started))
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("%s: still writing at close; the rest may be lost", self._what)
        return not self._thread.is_alive()

    def _run(self) -> None:
        last = False
        while not last:
            items: list[T] = []
            item = self._queue.get()
            while item is not None:
                items.append(item)
                if len(items) >= BATCH_ITEMS or self._queue.empty():
                    break
                item = self._queue.get()
            last = item is None
            if items:
                with self.boundary:
                    self._handle(items)


class LineFile:
    """Appends whole lines to a file. Opens it when first needed, and again after an error.

    A line that a crash or a full disk cut short is ended first, so that it spoils no other line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._torn = False

    def append(self, data: bytes) -> None:
        """Write `data`, which ends in a newline; OSError if that fails."""
        if self._fd is None:
            self._fd = self._open()
        if self._torn:
            data = b"\n" + data
        try:
            while data:
                data = data[os.write(self._fd, data) :]
                self._torn = bool(data)
        except OSError:
            self._torn = True
            self.close()
            raise

    def close(self) -> None:
        """Close the descriptor if it is open."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(fd).st_size
        self._torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        return fd


def write_whole(path: Path, text: str) -> None:
    """A file that is there with all its text, or as it was before; OSError if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class MetricsWriter:
    """Appends records to `<run_dir>/metrics.jsonl`. Every method returns at once and never raises.

    Types of records: start (started, step, lineage) and end (status) of each start of the run,
    span, step, validation (step, version, by, metrics), sync (version, replica, start, end,
    pause_seconds), anchors (source, step, n, judged, ...) and event (message, and `health` where
    it warns of a reward source). A record without a `time` gets one: seconds of
    `time.time()`. Spans carry times of their own.
    """

    def __init__(self, run_dir: Path, capacity: int = QUEUE_ITEMS) -> None:
        self.path = run_dir / FILE_NAME
        self._file = LineFile(self.path)
        self._lost = 0
        self._thread: TelemetryThread[Mapping[str, Any] | Sequence[Span]] = TelemetryThread(
            FILE_NAME, self._append, capacity
        )

    @property
    def lost(self) -> int:
        """Calls of `write` and `spans` whose lines were not written: errors and drops."""
        return self._lost + self._thread.dropped

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue one record; it has a `type`. Do not change it (or what it holds) afterwards."""
        self._thread.submit({"time": time.time(), **record})

    def spans(self, spans: Sequence[Span]) -> None:
        """Queue spans, one line each."""
        if spans:
            self._thread.submit(tuple(spans))

    def event(self, message: str) -> None:
        """Queue a record of type event: something worth finding again."""
        self.write({"type": "event", "message": message})

    def close(self) -> None:
        """Write what is queued (10 seconds at most) and close the file."""
        if self._thread.close():
            with self._thread.boundary:
                self._file.close()

    def _append(self, items: list[Mapping[str, Any] | Sequence[Span]]) -> None:
        lines: list[str] = []
        written = 0
        for item in items:
            with self._thread.boundary:
                lines.extend(_lines(item))
                written += 1
        self._lost += len(items)
        if lines:
            self._file.append("".join(lines).encode())
        self._lost -= written


def _lines(item: Mapping[str, Any] | Sequence[Span]) -> list[str]:
    records = [item] if isinstance(item, Mapping) else [span_record(span) for span in item]
    encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
    return [encoder.encode(plain(record)) + "\n" for record in records]


def span_record(span: Span) -> dict[str, Any]:
    """The record of a span: times in seconds of `time.time()`, to the microsecond."""
    return {
        "type": "span",
        "role": span.role,
        "replica": span.replica,
        "kind": span.kind,
        "start": round(span.start, 6),
        "end": round(span.end, 6),
        "cpu": round(span.cpu, 6),
        "version": span.version,
        "tokens": span.tokens,
    }


def span_of(record: Mapping[str, Any]) -> Span:
    """The span of a record of type span."""
    return Span(**{key: value for key, value in record.items() if key not in ("type", "time")})


def plain(value: Any) -> Any:
    """`value` as JSON has it: numpy unpacked, unknown types as text, non-finite numbers as None."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int) else str(value)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl, in order; lines that a crash cut short are skipped.

    OSError if the file cannot be read.
    """
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "type" in record:
                yield record
