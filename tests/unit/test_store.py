"""The durable ledger: what was acknowledged survives kill -9; one put is all or nothing."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.ledger import Ledger, Row
from offbeat.store import Store, StoreError, read_counts, read_rows

WRITER = """
import sys
from offbeat.ledger import Row
from offbeat.store import Store
store = Store(sys.argv[1])
for i in range(10**9):
    rows = [Row(2 * i + j, 0, "admitted", None, None, i) for j in range(2)]
    store.put(rows).result()
    print(i, flush=True)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "ledger.sqlite")
    yield store
    store.close()


def test_rows_come_back(store: Store) -> None:
    rows = [
        Row(0, 0, "trained", 3, "no_signal", 5),
        Row(1, 2, "discarded", None, "straggler", 5),
        Row(2, 0, "ready", None, None, 6),
    ]
    first = store.put([Row(0, 0, "admitted", None, None, 5)])
    store.put(rows).result(timeout=10)
    assert first.done()
    assert store.read_all() == rows
    store.put_meta("run", "abc").result(timeout=10)
    assert store.meta() == {"schema": "2", "run": "abc"}
    assert store.counts() == {
        "admitted": 3,
        "trained": 1,
        "no_signal": 1,
        "discarded": {"straggler": 1},
        "live": 1,
    }


def test_counts_agree_with_the_ledgers(store: Store) -> None:
    ledger = Ledger()
    for ordinal in range(9):
        ledger.admit(ordinal, 4, 2)
        if ordinal % 3 == 0:
            ledger.discarded(ordinal, f"cause {ordinal % 2}")
        if ordinal % 3 == 1:
            for arrow in (ledger.generated, ledger.scored, ledger.ready):
                arrow(ordinal, 0)
    ledger.batched([1, 4], 2)
    ledger.trained(2, {1: "signal", 4: "no_signal"})
    store.put(ledger.drain()).result(timeout=10)
    assert store.counts() == ledger.counts()


def test_kill_leaves_every_acknowledged_row(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        ) as writer:
            assert writer.stdout is not None
            acknowledged = [int(writer.stdout.readline()) for _ in range(20)]
            writer.send_signal(signal.SIGKILL)
            acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]
        found = [row.ordinal for row in read_rows(path)]
        assert found[: 2 * len(acknowledged)] == list(range(2 * len(acknowledged)))
        assert len(found) % 2 == 0  # a put is all or nothing
        assert read_counts(path)["live"] == len(found)
        with sqlite3.connect(path) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        db.close()


def test_many_threads_share_commits(store: Store) -> None:
    def work(k: int) -> None:
        for i in range(50):
            store.put([Row(k * 50 + i, 0, "admitted", None, None, 1)]).result(timeout=10)

    started = time.monotonic()
    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 20
    assert len(store.read_all()) == 400


def test_close_commits_what_is_queued(tmp_path: Path) -> None:
    store = Store(tmp_path / "ledger.sqlite")
    futures = [store.put([Row(i, 0, "admitted", None, None, 1)]) for i in range(1000)]
    store.close()
    store.close()
    assert all(future.done() and future.exception() is None for future in futures)
    assert len(read_rows(tmp_path / "ledger.sqlite")) == 1000
    with pytest.raises(StoreError, match="closed"):
        store.put([])


def test_after_a_failed_commit_every_put_fails(store: Store) -> None:
    good = store.put([Row(0, 0, "admitted", None, None, 1)])
    good.result(timeout=10)
    bad = store.put([Row(2**70, 0, "admitted", None, None, 1)])
    assert isinstance(bad.exception(timeout=10), StoreError)
    after = store.put([Row(1, 0, "admitted", None, None, 1)])
    assert isinstance(after.exception(timeout=10), StoreError)
    assert [row.ordinal for row in store.read_all()] == [0]


def test_a_group_takes_less_than_2_kb(tmp_path: Path) -> None:
    store = Store(tmp_path / "ledger.sqlite")
    n = 2000
    for state in ("admitted", "generated", "scored", "ready"):
        store.put([Row(i, 0, state, None, None, 5) for i in range(n)])  # type: ignore[arg-type]
    store.put([Row(i, 0, "discarded", None, "x" * 200, 5) for i in range(n)]).result(timeout=10)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size / n < 2048
    store.close()


def test_copy_is_one_plain_file(store: Store, tmp_path: Path) -> None:
    rows = [Row(i, 0, "admitted", None, None, 1) for i in range(10)]
    store.put(rows).result(timeout=10)
    (tmp_path / "copy").mkdir()
    store.copy_to(tmp_path / "copy" / "ledger.sqlite")
    assert [file.name for file in (tmp_path / "copy").iterdir()] == ["ledger.sqlite"]
    assert read_rows(tmp_path / "copy" / "ledger.sqlite") == rows


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    store = Store(path)
    store.put_meta("schema", "99").result(timeout=10)
    store.close()
    with pytest.raises(StoreError, match="schema 99"):
        Store(path)
