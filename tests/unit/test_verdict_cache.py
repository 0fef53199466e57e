"""The verdict cache: what it keeps, and that nothing it meets is ever more than a miss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat.reward import cache as module
from offbeat.reward import cache_file
from offbeat.reward.cache import VerdictCache, shared_cache, verdict_key
from offbeat.reward.judge import Verdict, Weighed

SAID = Verdict("Score: 8\n\u2713 \ud800", "length", 2, 100, 5, 1.5)
WEIGHED = Weighed((0.1 + 0.2, 1e-300), Verdict("9", prompt_tokens=3))


def key(number: int) -> str:
    return verdict_key("judge", {"temperature": 0.0}, f"text {number}")


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(body(), 60)

    return asyncio.run(main())


def rows(path: Path) -> int:
    if not path.exists():
        return 0
    with contextlib.closing(sqlite3.connect(path)) as db:
        (made,) = db.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()
        return int(made and db.execute("SELECT count(*) FROM verdicts").fetchone()[0])


def fill(path: Path, numbers: range, **settings: Any) -> None:
    async def body() -> None:
        cache = VerdictCache(path, **settings)
        for number in numbers:
            await cache.put(key(number), Verdict(f"{number}"))
        await cache.close()

    run(body)


def kept(path: Path, numbers: range) -> list[str | None]:
    async def body() -> list[str | None]:
        cache = VerdictCache(path)
        found = [await cache.get(key(number)) for number in numbers]
        await cache.close()
        return [each.text if isinstance(each, Verdict) else None for each in found]

    return list(run(body))


def test_a_verdict_comes_back_without_cost(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "verdicts.sqlite"
    said = Verdict(SAID.text, "length", cached=True)
    weighed = Weighed(WEIGHED.probabilities, Verdict("9", cached=True))

    async def write() -> None:
        cache = VerdictCache(path)
        assert await cache.get("a") is None
        await cache.put("a", SAID)
        await cache.put("b", WEIGHED)
        assert (await cache.get("a"), await cache.get("b")) == (said, weighed)
        await cache.close()

    async def read() -> None:
        cache = VerdictCache(path)  # nothing in memory: from the disk
        assert (await cache.get("a"), await cache.get("b")) == (said, weighed)
        assert await cache.get("c") is None
        await cache.close()
        assert await cache.get("c") is None  # opens again
        await cache.close()

    run(write)
    run(read)


def test_a_key_holds_all_that_a_verdict_follows_from() -> None:
    base = ("judge", {"temperature": 0.0, "stop": ("a",)}, "text", "more")
    keys = {
        verdict_key(*base),
        verdict_key("other", *base[1:]),
        verdict_key(base[0], {"temperature": 0.1, "stop": ("a",)}, *base[2:]),
        verdict_key(base[0], {"temperature": 0.0, "stop": ("b",)}, *base[2:]),
        verdict_key(base[0], base[1], "textmore"),
        verdict_key(base[0], base[1], "text", "more", ""),
    }
    assert len(keys) == 6
    assert all(len(each) == 64 for each in keys)
    turned = {"stop": ["a"], "temperature": 0.0}
    assert verdict_key(base[0], turned, *base[2:]) == verdict_key(*base)


def test_what_is_put_is_committed_without_a_close(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.sqlite"

    async def body() -> None:
        cache = VerdictCache(path)
        for number in range(1000):
            await cache.put(key(number), Verdict("8"))
        until = time.monotonic() + 30
        while rows(path) < 1000:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        await cache.close()

    run(body)


def test_the_oldest_go(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.sqlite"
    fill(path, range(100), most=50)
    fill(path, range(60, 70), most=50)  # written anew: these are the newest now
    fill(path, range(100, 140), most=50)
    assert rows(path) == 50
    found = kept(path, range(140))
    expected = {*range(60, 70), *range(100, 140)}
    assert [number for number in range(140) if found[number] is not None] == sorted(expected)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_IN_MEMORY", 5000)

    async def body() -> None:
        cache = VerdictCache(tmp_path / "verdicts.sqlite")
        for number in range(200):
            await cache.put(key(number), Verdict("x" * 100))
        held = cache._recent
        assert 0 < sum(len(a) + len(b) for a, b in held.items()) == cache._size <= 5000
        assert key(199) in held
        assert key(0) not in held
        found = await cache.get(key(0))
        assert isinstance(found, Verdict)
        assert found.text == "x" * 100
        await cache.put("huge", Verdict("x" * (module.LONGEST + 1)))
        assert await cache.get("huge") is None
        await cache.close()

    run(body)


WRITER = """
import asyncio, sys
from pathlib import Path
from offbeat.reward.cache import VerdictCache, verdict_key
from offbeat.reward.judge import Verdict

async def main(first):
    cache = VerdictCache(Path(sys.argv[1]))
    for number in range(first, first + 500):
        key = verdict_key("judge", {"temperature": 0.0}, f"text {number}")
        assert await cache.get(key) is None
        await cache.put(key, Verdict(f"{number}"))
        if number % 50 == 0:
            await asyncio.sleep(0.01)
    await cache.close()

asyncio.run(main(int(sys.argv[2])))
"""


def test_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.sqlite"
    command = [sys.executable, "-c", WRITER]
    writers = [
        subprocess.Popen([*command, str(path), str(first)], stderr=subprocess.PIPE)
        for first in (0, 500, 1000)
    ]
    for writer in writers:
        _, told = writer.communicate(timeout=120)
        assert (writer.returncode, told) == (0, b"")
    assert kept(path, range(0, 1500, 7)) == [f"{number}" for number in range(0, 1500, 7)]


def test_a_damaged_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "verdicts.sqlite"
    path.write_bytes(b"no database at all" * 1000)
    fill(path, range(10))
    assert kept(path, range(12)) == [*map(str, range(10)), None, None]
    aside = list(tmp_path.glob("verdicts.sqlite.damaged-*"))
    assert len(aside) == 1
    assert aside[0].read_bytes().startswith(b"no database")
    assert sum("is set aside as" in record.message for record in caplog.records) == 1


def test_damage_while_it_is_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "verdicts.sqlite"
    fill(path, range(2000))
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)  # the header and the list of tables stay
    path.write_bytes(data)
    assert kept(path, range(1)) == [None]
    fill(path, range(10))
    assert kept(path, range(10)) == [*map(str, range(10))]
    assert len(list(tmp_path.glob("*.damaged-*"))) == 1


@pytest.mark.parametrize("kind", ["folder", "under a file", "another version"])
def test_a_disk_that_fails_turns_it_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    path = tmp_path / "verdicts.sqlite"
    if kind == "folder":
        path.mkdir()
    elif kind == "under a file":
        path.write_text("a file")
        path = path / "verdicts.sqlite"
    else:
        db = sqlite3.connect(path)
        db.execute("PRAGMA user_version=7")
        db.close()

    async def body() -> None:
        cache = VerdictCache(path)
        found = await asyncio.gather(*(cache.get(key(number)) for number in range(100)))
        assert found == [None] * 100
        for number in range(100):
            await cache.put(key(number), Verdict("8"))
        assert isinstance(await cache.get(key(5)), Verdict)  # memory serves on
        assert await cache.get("other") is None
        await cache.close()

    run(body)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "is off: " in warnings[0]
    assert str(path) in warnings[0]


def test_a_file_that_others_write_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "verdicts.sqlite"
    fill(path, range(3))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    async def body() -> None:
        cache = VerdictCache(path)
        assert isinstance(await cache.get(key(0)), Verdict)  # readers never wait for a writer
        await cache.put(key(7), Verdict("7"))
        await asyncio.sleep(1.0)  # several commits are refused meanwhile
        assert isinstance(await cache.get(key(1)), Verdict)
        other.execute("COMMIT")
        other.close()
        until = time.monotonic() + 30
        while rows(path) < 4:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        await cache.close()

    run(body)
    assert kept(path, range(7, 8)) == ["7"]
    assert not caplog.records


def test_a_disk_that_hangs_costs_bounded_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(module, "MOST_LATE", 3)
    released = threading.Event()
    opened = cache_file.Keeper._open

    def hang(self: Any) -> sqlite3.Connection:
        released.wait(30)
        return opened(self)

    monkeypatch.setattr(cache_file.Keeper, "_open", hang)

    async def body() -> None:
        cache = VerdictCache(tmp_path / "verdicts.sqlite")
        start = time.monotonic()
        for number in range(50):
            assert await cache.get(key(number)) is None
            await cache.put(key(number), Verdict("8"))
        assert time.monotonic() - start < 20
        released.set()
        await cache.close()

    run(body)
    assert sum("is off: " in record.message for record in caplog.records) == 1


def test_the_thread_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "IDLE_SECONDS", 0.05)
    cache = VerdictCache(tmp_path / "verdicts.sqlite")

    async def put(number: int) -> None:
        await cache.put(key(number), Verdict(str(number)))

    for number in range(3):  # loops of their own, as in a process that scores several files
        run(lambda number=number: put(number))
        until = time.monotonic() + 30
        while cache._thread is not None:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert rows(tmp_path / "verdicts.sqlite") == number + 1


def test_one_cache_a_path(tmp_path: Path) -> None:
    first = shared_cache(tmp_path / "a.sqlite")
    assert shared_cache(tmp_path / "x" / ".." / "a.sqlite") is first
    assert shared_cache(tmp_path / "b.sqlite") is not first


def test_a_cancel_that_meets_an_answer_is_not_lost(tmp_path: Path) -> None:
    """Wherever between asking and hearing it comes."""

    async def kept_its_word(turns: int, monkeypatch: pytest.MonkeyPatch) -> bool:
        cache = VerdictCache(tmp_path / "verdicts.sqlite")
        jobs: list[Any] = []
        monkeypatch.setattr(VerdictCache, "_ask", lambda _, job: jobs.append(job) or True)
        task = asyncio.create_task(cache.get("a"))
        await asyncio.sleep(0)
        jobs[0].found.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.cancel():
            return True  # it had ended
        await asyncio.wait([task])
        return task.cancelled()

    with pytest.MonkeyPatch.context() as patch:
        for turns in range(8):
            assert run(lambda turns=turns: kept_its_word(turns, patch)), turns
