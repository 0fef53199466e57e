"""What is on disk is at every instant a state that the run was in, and is gone on from there."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.config import TrainSection
from offbeat.errors import OffbeatError
from offbeat.ledger import LEFT_OVER, Counts, Row
from offbeat.recorded import pack_rewards, pack_tokens
from offbeat.records import Batch, Completion, Group, Payload, Prompt, Reward, Sample
from offbeat.rollout.books import LATE, Books
from offbeat.store import Store

PROMPTS = [Prompt(i, np.array([i, 9], np.int32), f"p{i}", "q") for i in range(12)]
TRAIN = TrainSection.model_validate({"groups_per_step": 2, "max_staleness": 2})


def completions(ordinal: int, attempt: int) -> list[Completion]:
    """Two samples whose tokens say whose they are."""
    return [
        Completion(
            f"{ordinal}.{attempt}", index, "x", 2, 0, 0, "stop",
            Payload(
                np.array([ordinal, 10 * attempt + index], np.int32),
                np.array([-0.1, -0.2], np.float32), np.zeros(2, np.int32),
            ),
        )
        for index in range(2)
    ]  # fmt: skip


def samples(ordinal: int, attempt: int) -> list[Sample]:
    return [
        Sample(c, {"r": Reward.scored("r", ordinal + c.index / 10)}, ordinal + c.index / 10)
        for c in completions(ordinal, attempt)
    ]


async def generate(books: Books, ordinal: int, attempt: int = 0) -> bool:
    made = completions(ordinal, attempt)
    return await books.generated(PROMPTS[ordinal], attempt, made, [c.ref for c in made])


async def score(books: Books, ordinal: int, attempt: int = 0) -> bool:
    return await books.ready(PROMPTS[ordinal], attempt, samples(ordinal, attempt))


async def make_ready(books: Books, ordinal: int) -> None:
    await books.admit(ordinal, 0)
    assert await generate(books, ordinal)
    assert await score(books, ordinal)


def plain(group: Group) -> tuple[int, int, bytes, bytes]:
    """A group as values that can be compared."""
    made = [sample.completion for sample in group.samples]
    packed = pack_tokens(group.prompt, made, [c.ref for c in made])
    return group.prompt.ordinal, group.attempt, packed, pack_rewards(group.samples)


def told(batch: Batch | None) -> list[tuple[int, int, bytes, bytes]]:
    assert batch is not None
    return [plain(group) for group in batch.groups]


@dataclass
class Moment:
    """The run at one put: its arguments, and what the ledger said then."""

    rows: list[Row]
    more: dict[str, Any]
    counts: Counts
    live: dict[int, Row]


@dataclass
class Log:
    """A store that also keeps what it was told, with the state of the books that told it."""

    store: Store
    books: Books | None = None
    moments: list[Moment] = field(default_factory=list)

    def put(self, rows: list[Row], **more: Any) -> Future[None]:
        assert self.books is not None
        ledger = self.books.ledger
        live = {row.ordinal: row for row in ledger.live_rows()}
        self.moments.append(Moment(rows, more, ledger.counts(), live))
        return self.store.put(rows, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "ledger.sqlite")
    yield store
    store.close()


def books_on(store: Any) -> Books:
    return Books(store, TRAIN, PROMPTS.__getitem__)


def restored(store: Store, version: int = 0, **more: Any) -> tuple[Books, Any]:
    books = books_on(store)
    return books, books.restore(version, **more)


async def settled(store: Store) -> None:
    await asyncio.wrap_future(store.put([]))


async def a_run(books: Books) -> dict[int, Batch]:
    """Five groups on every way that there is; the batches that were trained."""
    for ordinal in range(5):
        await books.admit(ordinal, 0)
    for ordinal in (0, 1, 2):
        assert await generate(books, ordinal)
    for ordinal in (1, 0):
        assert await score(books, ordinal)
    assert await books.retry(4, 0, 0) == 1
    assert await books.discard(3, 0, "straggler")
    batches = {}
    taken = books.buffer.take(0)
    assert taken == [0, 1]
    batches[0] = await books.batch(0, taken)
    assert await generate(books, 4, 1)
    await books.trained(0, {0: "signal", 1: "no_signal"})
    assert await score(books, 2)
    assert await score(books, 4, 1)
    taken = books.buffer.take(1)
    assert taken == [2, 4]
    batches[1] = await books.batch(1, taken)
    await books.admit(5, 1)
    await books.trained(1, {2: "signal", 4: "signal"})
    return batches


def test_every_prefix_of_commits_is_a_state_that_the_run_was_in(tmp_path: Path) -> None:
    async def main() -> tuple[list[Moment], dict[int, Batch]]:
        log = Log(Store(tmp_path / "run.sqlite"))
        log.books = books_on(log)
        batches = await a_run(log.books)
        await settled(log.store)
        log.store.close()
        return log.moments, batches

    moments, batches = asyncio.run(main())
    assert len(moments) > 15
    seen: set[str] = set()
    for cut in range(len(moments) + 1):
        store = Store(tmp_path / f"{cut}.sqlite")
        for moment in moments[:cut]:
            store.put(moment.rows, **moment.more)
        store.put([]).result(timeout=30)
        if cut:
            assert store.counts() == moments[cut - 1].counts
        seen |= check_restored(store, moments[cut - 1].live if cut else {}, batches)
        store.close()
    assert seen == {"admitted", "generated", "ready", "batched", "trained", "discarded"}


def check_restored(store: Store, live: dict[int, Row], batches: dict[int, Batch]) -> set[str]:
    """From its start: every group stands where it stood; what was trained is to be redone."""
    rows = store.read_all()
    books, found = restored(store)
    counts = books.ledger.counts()
    assert counts["admitted"] == len(rows) == found.next_ordinal
    assert counts["trained"] == 0  # no checkpoint holds it
    assert sum(counts["discarded"].values()) == found.discards
    assert counts["admitted"] == counts["live"] + found.discards
    assert {row.ordinal: row for row in books.ledger.live_rows() if row.step is None} == {
        ordinal: row for ordinal, row in live.items() if row.step is None
    }
    steps: dict[int, list[int]] = {}
    for row in rows:
        if row.step is not None:
            steps.setdefault(row.step, []).append(row.ordinal)
        assert (row.ordinal in found.again) == (row.state == "admitted")
        assert (row.ordinal in found.unscored) == (row.state == "generated")
        assert books.buffer.is_live(row.ordinal, row.attempt) == (
            row.state in ("admitted", "generated", "ready")
        )
        if row.state == "generated":
            attempt, made = found.unscored[row.ordinal]
            again = completions(row.ordinal, attempt)
            assert attempt == row.attempt
            assert [c.ref.token_ids.tolist() for c in made.completions] == [
                c.ref.token_ids.tolist() for c in again
            ]
    assert books.buffer.snapshot().ready == sum(row.state == "ready" for row in rows)
    assert books.ledger.batches() == steps
    assert books.next_step == max(steps, default=-1) + 1
    for step in steps:
        assert told(asyncio.run(books.recorded(step))) == told(batches[step])
    assert asyncio.run(books.recorded(books.next_step)) is None
    return {row.state for row in rows}


def with_books(store: Store, body: Callable[[Books], Awaitable[None]]) -> None:
    async def main() -> None:
        await body(books_on(store))
        await settled(store)

    asyncio.run(main())


def test_what_a_checkpoint_holds_is_final_one_behind(store: Store) -> None:
    async def body(books: Books) -> None:
        await a_run(books)
        await books.checkpointed(1)
        assert books.ledger.batches() == {0: [0, 1], 1: [2, 4]}
        await books.checkpointed(2)
        assert books.ledger.batches() == {1: [2, 4]}
        await books.checkpointed(2)
        with pytest.raises(OffbeatError, match="step 0 is final"):
            await books.recorded(0)

    with_books(store, body)
    assert set(store.payloads(range(6))) == {2, 4}
    for version, steps in ((1, [1]), (2, [])):
        books, _ = restored(store, version)
        assert list(books.ledger.batches()) == steps
        assert books.ledger.counts()["trained"] == 2 * version
        assert books.next_step == 2


def test_a_trainer_that_lives_redoes_nothing(store: Store) -> None:
    async def body(books: Books) -> None:
        await a_run(books)

    with_books(store, body)
    books, _ = restored(store, 0, done=2)
    assert books.ledger.counts()["trained"] == 4
    assert books.next_step == 2
    books.redo(1)  # then it dies
    assert books.ledger.counts()["trained"] == 2


def test_at_the_end_of_a_run_what_is_left_over_is_discarded_by_name(store: Store) -> None:
    async def body(books: Books) -> None:
        await a_run(books)
        live = {row.ordinal for row in books.ledger.live_rows()}
        assert live == {5}
        await books.admit(6, 1)
        assert await generate(books, 6)
        assert await score(books, 6)
        counts = await books.close()
        assert (counts["live"], counts["discarded"][LEFT_OVER]) == (0, 2)
        assert not store.payloads([5, 6])
        assert await books.close() == counts
        assert not await generate(books, 5), "too late"
        assert not await score(books, 6), "too late"

    with_books(store, body)
    books, found = restored(store, 0, done=2)
    assert books.ledger.counts()["live"] == 0
    assert not found.again
    assert not found.unscored


def test_late_answers_of_an_older_attempt_change_nothing(store: Store) -> None:
    async def body(books: Books) -> None:
        await books.admit(0, 0)
        assert await generate(books, 0)
        assert await books.retry(0, 0, 0) == 1
        assert await books.retry(0, 0, 0) is None
        assert not await generate(books, 0)
        assert not await score(books, 0)
        assert not await books.discard(0, 0, "late")
        assert await generate(books, 0, 1)
        assert not await score(books, 0)
        assert await score(books, 0, 1)

    with_books(store, body)
    books, found = restored(store)
    assert not found.again
    assert not found.unscored
    assert [row.attempt for row in books.ledger.live_rows()] == [1]
    assert store.payloads([0])[0].attempt == 1
    assert store.payloads([0])[0].rewards is not None


def test_a_group_begins_again_after_a_restart_and_is_fenced(store: Store) -> None:
    async def first(books: Books) -> None:
        await books.admit(0, 0)

    with_books(store, first)

    async def second() -> None:
        books, found = restored(store)
        assert found.again == {0: 0}
        assert await books.retry(0, 0, 0) == 1
        assert not await generate(books, 0, 0)  # a zombie's
        assert await generate(books, 0, 1)
        assert await score(books, 0, 1)
        await make_ready(books, 1)
        taken = books.buffer.take(0)
        assert taken == [0, 1]
        await books.batch(0, taken)

    asyncio.run(second())
    assert [(r.ordinal, r.attempt, r.state, r.step) for r in store.read_all()] == [
        (0, 1, "batched", 0),
        (1, 0, "batched", 0),
    ]


def test_what_comes_too_late_after_a_restart_is_discarded_by_name(store: Store) -> None:
    store.put(
        [
            Row(0, 0, "admitted", None, None, 3),  # due before the next step
            Row(1, 0, "admitted", None, None, 5),  # in time, but not from a floor of 0
            Row(2, 0, "trained", 3, "signal", 4),
        ]
    ).result(timeout=10)

    async def main() -> None:
        books, found = restored(store, 4)
        assert found.again == {1: 0}
        assert found.discards == 1
        assert await books.retry(1, 0, 1) is None
        assert books.discards == 1, "another group may take its place, as those of found.discards"
        await settled(store)

    asyncio.run(main())
    assert [(r.state, r.reason) for r in store.read_all()] == [
        ("discarded", LATE),
        ("discarded", LATE),
        ("trained", "signal"),
    ]


def test_a_damaged_payload_is_made_again(store: Store) -> None:
    async def body(books: Books) -> None:
        await make_ready(books, 0)
        await books.admit(1, 0)
        assert await generate(books, 1)

    with_books(store, body)
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute("UPDATE tokens SET packed = substr(packed, 1, length(packed) - 1)")
    books, found = restored(store)
    assert found.again == {0: 0, 1: 0}
    assert books.buffer.snapshot().ready == 0


def test_a_batch_whose_payload_is_gone_is_named(store: Store) -> None:
    async def body(books: Books) -> None:
        await a_run(books)

    with_books(store, body)
    store.put([], release=[4]).result(timeout=10)
    books, _ = restored(store)
    with pytest.raises(OffbeatError, match=r"step 1: the payload of groups \[4\] is lost"):
        asyncio.run(books.recorded(1))


def test_every_lineage_is_new(store: Store) -> None:
    async def lineages(books: Books) -> list[int]:
        return [await books.new_lineage() for _ in range(2)]

    assert asyncio.run(lineages(books_on(store))) == [0, 1]
    assert asyncio.run(lineages(books_on(store))) == [2, 3]


@dataclass
class Slow:
    """A store whose commits come when they are let."""

    store: Store
    held: list[Future[None]] = field(default_factory=list)

    def put(self, rows: list[Row], **more: Any) -> Future[None]:
        self.store.put(rows, **more).result()
        self.held.append(Future())
        return self.held[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_a_batch_is_handed_out_when_it_is_committed(store: Store) -> None:
    async def main() -> None:
        slow = Slow(store)
        books = books_on(slow)
        for ordinal in (0, 1):
            await make_ready(books, ordinal)
        taken = books.buffer.take(0)
        assert taken == [0, 1]
        batch = asyncio.create_task(books.batch(0, taken))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not batch.done()
        slow.held[-1].set_result(None)
        assert told(await batch)

    asyncio.run(main())
