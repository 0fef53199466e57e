"""metrics.jsonl: whole lines, from a thread, and nothing that raises into training."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from offbeat.records import PolicyVersion, Span
from offbeat.track import metrics
from offbeat.track.metrics import (
    MetricsWriter,
    TelemetryBoundary,
    TelemetryThread,
    plain,
    read_metrics,
    span_of,
)

SPAN = Span("rollout", 1, "decode", 10.0, 12.5, 2.25, version=3, tokens=64)


def test_records_and_spans_come_back_in_order(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "runs" / "a")
    writer.write({"type": "step", "step": 0, "time": 5.0})
    writer.spans([SPAN, SPAN])
    writer.spans([])
    writer.event("engine 1 restarted")
    writer.close()
    records = list(read_metrics(writer.path))
    assert [r["type"] for r in records] == ["step", "span", "span", "event"]
    assert records[0] == {"time": 5.0, "type": "step", "step": 0}
    assert set(records[1]) == {
        "type", "role", "replica", "kind", "start", "end", "cpu", "version", "tokens",
    }  # fmt: skip
    assert span_of(records[1]) == SPAN
    assert records[3]["time"] > 1e9
    assert writer.lost == 0


def test_values_become_json_and_a_non_finite_one_becomes_null(tmp_path: Path) -> None:
    value = {
        "v": PolicyVersion(1, 2), "n": np.float32(0.5), "i": np.int64(3), "nan": float("nan"),
        "a": np.array([1.0, np.inf]), 4: (True, None), "f": np.float64("nan"),
    }  # fmt: skip
    expected = {
        "v": "1.2", "n": 0.5, "i": 3, "nan": None, "a": [1.0, None], "4": [True, None], "f": None,
    }  # fmt: skip
    assert plain(value) == expected
    writer = MetricsWriter(tmp_path)
    writer.write({"type": "event", **{str(k): v for k, v in value.items()}})
    writer.close()
    line = writer.path.read_text()
    assert "NaN" not in line
    assert json.loads(line)["v"] == "1.2"


def test_a_resumed_run_ends_the_torn_line_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"type":"step","step":0}\n{"type":"step","st')
    writer = MetricsWriter(tmp_path)
    writer.write({"type": "step", "step": 1})
    writer.close()
    assert [r["step"] for r in read_metrics(path)] == [0, 1]


def test_a_full_disk_is_counted_logged_once_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, full = os.write, threading.Event()

    def write(fd: int, data: bytes) -> int:
        if full.is_set() and data.startswith(b'{"time"'):
            return real(fd, data[:7])
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(metrics.os, "write", write)
    with caplog.at_level(logging.WARNING):
        writer = MetricsWriter(tmp_path)
        full.set()
        for step in (0, 1):
            writer.write({"type": "step", "step": step})
            _wait_for(lambda step=step: writer._thread.boundary.errors == step + 1)
        full.clear()
        writer.write({"type": "step", "step": 2})
        writer.close()
    assert [r["step"] for r in read_metrics(writer.path)] == [2]
    assert writer.lost == 2
    assert len(caplog.records) == 1
    said = caplog.records[0]
    assert "No space left" in said.getMessage()
    assert said.exc_info is None, "one line, no traceback"


def test_a_record_that_is_no_json_spoils_no_other(tmp_path: Path) -> None:
    loop: dict[str, object] = {"type": "event"}
    loop["self"] = loop
    writer = MetricsWriter(tmp_path)
    writer.write(loop)
    writer.write({"type": "step", "step": 1})
    writer.close()
    assert [r["type"] for r in read_metrics(writer.path)] == ["step"]
    assert writer.lost == 1


def test_a_folder_that_cannot_be_made_never_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = MetricsWriter(tmp_path / "file" / "run")
    writer.write({"type": "step", "step": 1})
    writer.close()
    writer.write({"type": "step", "step": 2})
    writer.close()
    assert writer.lost == 2


def test_a_full_queue_drops_instead_of_blocking(caplog: pytest.LogCaptureFixture) -> None:
    go, handled = threading.Event(), list[int]()

    def handle(items: list[int]) -> None:
        go.wait(10)
        handled.extend(items)

    thread: TelemetryThread[int] = TelemetryThread("test", handle, capacity=3)
    taken = [thread.submit(number) for number in range(20)]
    assert not taken[-1]
    assert thread.close(timeout=0.05) is False
    go.set()
    _wait_for(lambda: len(handled) == sum(taken))
    assert thread.dropped == 20 - sum(taken)
    assert handled == [number for number, kept in enumerate(taken) if kept]


def test_the_boundary_lets_cancellation_through() -> None:
    boundary = TelemetryBoundary("test")
    with boundary:
        raise KeyError("x")
    assert boundary.errors == 1
    with pytest.raises(KeyboardInterrupt), boundary:
        raise KeyboardInterrupt


def _wait_for(condition: object) -> None:
    pause = threading.Event()
    for _ in range(500):
        if condition():  # type: ignore[operator]
            return
        pause.wait(0.01)
    raise AssertionError("the condition did not come true within 5 seconds")
