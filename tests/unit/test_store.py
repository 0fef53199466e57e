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
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest

from offbeat.faults import install
from offbeat.ledger import Ledger, Row, State
from offbeat.store import Store, StoreError, lock_file, read_counts, read_payloads, read_rows

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


def payload(store: Store, ordinal: int) -> tuple[int, bytes, bytes | None] | None:
    found = store.payloads([ordinal]).get(ordinal)
    return None if found is None else (found.attempt, found.tokens, found.rewards)


def row(ordinal: int, state: State, step: int | None = None) -> Row:
    return Row(ordinal, 0, state, step, None, 9)


@pytest.mark.parametrize("together", [True, False])
def test_rewards_belong_to_the_tokens_of_their_attempt(store: Store, together: bool) -> None:
    def wait(put: Future[None]) -> None:
        if not together:  # else all share a commit, or few do
            put.result(timeout=10)

    wait(store.put([row(0, "generated")], tokens=(0, 0, lambda: b"a0")))
    wait(store.put([row(0, "ready")], rewards=(0, 0, lambda: b"r0")))
    wait(store.put([row(1, "generated")], tokens=(1, 0, lambda: b"b0")))
    wait(store.put([], tokens=(1, 1, lambda: b"b1")))
    wait(store.put([], rewards=(1, 0, lambda: b"late")))
    wait(store.put([], rewards=(2, 0, lambda: b"of nobody")))
    wait(store.put([], tokens=(3, 0, lambda: b"d0")))
    wait(store.put([], rewards=(3, 0, lambda: b"r3")))
    wait(store.put([], release=[3]))
    wait(store.put([], tokens=(4, 0, lambda: b"e0")))
    wait(store.put([], release=[4]))
    wait(store.put([], tokens=(4, 1, lambda: b"e1")))
    store.put([]).result(timeout=10)
    assert payload(store, 0) == (0, b"a0", b"r0")
    assert payload(store, 1) == (1, b"b1", None)
    assert payload(store, 2) is None
    assert payload(store, 3) is None
    assert payload(store, 4) == (1, b"e1", None)
    assert set(read_payloads(store.path, range(9))) == {0, 1, 4}


def test_what_fails_to_pack_fails_the_commit(store: Store) -> None:
    def broken() -> bytes:
        raise ZeroDivisionError("none")

    put = store.put([row(0, "generated")], tokens=(0, 0, broken))
    with pytest.raises(StoreError, match="none"):
        put.result(timeout=10)
    assert store.read_all() == []


def test_payload_of_final_steps_goes(store: Store) -> None:
    for ordinal in range(6):
        state: State = "trained" if ordinal < 4 else "batched"
        store.put(
            [row(ordinal, state, ordinal)],
            tokens=(ordinal, 0, lambda: b"t"),
            rewards=(ordinal, 0, lambda: b"r"),
        )
    store.put([], final_before=3).result(timeout=10)
    assert set(store.payloads(range(6))) == {3, 4, 5}
    store.put([], final_before=9).result(timeout=10)
    assert set(store.payloads(range(6))) == {4, 5}  # not trained, whatever their step
    assert len(store.read_all()) == 6
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute("SELECT COUNT(*) FROM rewards").fetchone() == (2,)


def test_a_copy_has_no_payload_of_what_is_finished(store: Store, tmp_path: Path) -> None:
    states: list[tuple[State, int | None]] = [
        ("trained", 0), ("discarded", None), ("batched", 1), ("ready", None), ("generated", None),
    ]  # fmt: skip
    for ordinal, (state, step) in enumerate(states):
        store.put(
            [row(ordinal, state, step)],
            tokens=(ordinal, 0, lambda: b"t"),
            rewards=(ordinal, 0, lambda: b"r"),
        )
    store.put_meta("lineage", "2").result(timeout=10)
    copy = tmp_path / "copy.sqlite"
    store.copy_to(copy)
    assert read_rows(copy) == store.read_all()
    assert set(read_payloads(copy, range(5))) == {2, 3, 4}
    assert set(store.payloads(range(5))) == set(range(5))
    opened = Store(copy)  # as another run's ledger
    assert opened.meta()["lineage"] == "2"
    assert payload(opened, 3) == (0, b"t", b"r")
    opened.close()


HOLDER = """
import sys, time
from offbeat.store import Store
store = Store(sys.argv[1])
print("holds", flush=True)
time.sleep(600)
"""


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        for _ in range(2):
            with pytest.raises(StoreError, match=f"lock is held by process {holder.pid}$"):
                Store(path)
        assert read_rows(path) == []  # whoever only reads is not refused
        holder.send_signal(signal.SIGKILL)
    store = Store(path, wait_seconds=10)
    store.close()


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "x"
    first = lock_file(path)
    threading.Timer(0.3, os.close, [first]).start()
    os.close(lock_file(path, wait_seconds=30))


def test_a_closed_store_is_free_at_once(tmp_path: Path) -> None:
    Store(tmp_path / "ledger.sqlite").close()
    Store(tmp_path / "ledger.sqlite").close()


def test_puts_that_come_together_share_a_commit(store: Store) -> None:
    commits = 0

    def seen(name: str, path: Path | None) -> None:
        nonlocal commits
        commits += name == "store.after_commit"

    async def unused(name: str, path: Path | None) -> None: ...

    install(seen, unused)
    try:
        puts = [store.put([row(i, "admitted")]) for i in range(500)]
        puts[-1].result(timeout=10)
    finally:
        install(None, None)
    assert all(put.done() for put in puts)
    assert 1 <= commits < 100
    store.close()
    assert 0 < store.busy_seconds < 10
