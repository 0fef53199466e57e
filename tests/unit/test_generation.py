"""Requests that are carried on when their engine ends, on a clock of their own.

The engines here write a token a second: their own mark, so that a test sees who made what.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import virtual

from offbeat.config import RolloutSection
from offbeat.errors import DeadlinePassed, RequestRefused
from offbeat.records import (
    Completion,
    EngineHealth,
    GenerateRequest,
    Manifest,
    PolicyVersion,
    Progress,
    Sampling,
)
from offbeat.rollout.generation import EngineLeft, Generation
from offbeat.rollout.router import Place, Router
from offbeat.weights.sync import Replica, WeightSync

ZERO = PolicyVersion(0, 0)


class Tokens(list[str]):
    """The payload of these tests; a reference can be watched."""


@dataclass
class Pen:
    """An engine that writes `mark` once a second; sample i ends with token 3 x (i + 1).

    `dies` is the second after which every call raises; `stuck` writes nothing; `gives_up` maps an
    index to the token count at which it is aborted, once; `refuses` and `fails` raise at once.
    """

    mark: str
    dies: float = 1e9
    stuck: bool = False
    gives_up: dict[int, int] = field(default_factory=dict)
    fails: BaseException | None = None
    load_seconds: float = 0.0
    length: Callable[[int], int] = lambda index: 3 * (index + 1)
    requests: list[tuple[float, GenerateRequest]] = field(default_factory=list)
    closed: int = 0

    def alive(self) -> None:
        if asyncio.get_running_loop().time() >= self.dies:
            raise ConnectionError(f"{self.mark} died")

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Completion | Progress, None]:
        self.requests.append((asyncio.get_running_loop().time(), request))
        rows = {i: Tokens() for i in range(request.n) if i not in request.done}
        rows |= {i: Tokens(tokens) for i, tokens in request.resume}
        try:
            while rows:
                await asyncio.sleep(1e9 if self.stuck else 1.0)
                if self.fails is not None:
                    raise self.fails
                self.alive()
                for item in self.write(request, rows):
                    yield item
        finally:
            self.closed += 1

    def write(
        self, request: GenerateRequest, rows: dict[int, Tokens]
    ) -> list[Completion | Progress]:
        out: list[Completion | Progress] = []
        for i, tokens in list(rows.items()):
            tokens.append(self.mark)
            size, copy = len(tokens), Tokens(tokens)
            if self.gives_up.get(i) == size:
                del self.gives_up[i], rows[i]
                out.append(Completion(request.request_id, i, "", size, 0, 0, "aborted", copy))
            elif size == self.length(i):
                del rows[i]
                out.append(Completion(request.request_id, i, "", size, 0, 0, "stop", copy))
            elif request.snapshot_every and size % request.snapshot_every == 0:
                out.append(Progress(request.request_id, i, size, copy))
        return out

    async def load(self, manifest: Manifest) -> PolicyVersion:
        await asyncio.sleep(self.load_seconds)
        self.alive()
        return manifest.version

    async def health(self) -> EngineHealth:
        self.alive()
        return EngineHealth(ZERO, 0, 0, 8)


@dataclass
class Side:
    """A generation side over these engines; a replacement comes after `revival` seconds."""

    pens: list[Any]
    generation: Generation
    replicas: list[Replica[Any]]
    sync: WeightSync[Any]
    router: Router

    async def collect(self, request: GenerateRequest, place: Place | None = None) -> list[Any]:
        found = []
        async for completion in self.generation.once(request, place):
            now = asyncio.get_running_loop().time()
            found.append((now, completion.index, "".join(completion.ref)))
        return found


Body = Callable[[Side], Awaitable[Any]]


def play(pens: list[Any], body: Body, *, revival: float = 1e6, **settings: Any) -> Any:
    """Runs `body` on the engines' clock; nothing may be counted as unfinished after it."""
    settings = {"snapshot_tokens": 2, "max_attempts": 3, "deadline_seconds": 100} | settings
    section = RolloutSection.model_validate({"seats": 8} | settings)

    async def main() -> Any:
        changed = asyncio.Condition()

        async def on_change() -> None:
            async with changed:
                changed.notify_all()

        async def replace(index: int) -> Any:
            await asyncio.sleep(revival)
            pens.append(Pen(f"{index}"))
            return pens[-1]

        replicas: list[Replica[Any]] = [Replica(i, pen, ZERO) for i, pen in enumerate(pens)]
        async with asyncio.TaskGroup() as tasks:
            sync = WeightSync(
                replicas, deadline_seconds=10, start_deadline_seconds=1e9, replace=replace,
                on_change=on_change, tasks=tasks,
            )  # fmt: skip
            router = Router(replicas, changed, section.seats)
            generation = Generation(router, lambda: sync, section)
            found = await body(Side(pens, generation, replicas, sync, router))
            assert [r.outstanding for r in replicas] == [0] * len(replicas)
            raise _Done(found)

    with pytest.raises(ExceptionGroup) as ended:
        virtual.run(main())
    matched, rest = ended.value.split(_Done)
    if rest is not None:
        raise rest.exceptions[0]
    assert matched is not None
    return matched.exceptions[0].found  # type: ignore[union-attr]


class _Done(Exception):
    def __init__(self, found: Any) -> None:
        self.found = found


def request(n: int = 3, name: str = "7.0") -> GenerateRequest:
    return GenerateRequest(name, np.array([1, 2], np.int32), n, Sampling(99))


def sent(pen: Pen) -> list[tuple[float, list[int], dict[int, str]]]:
    """When it was asked, and with what done and what to resume from."""
    return [(t, sorted(r.done), {i: "".join(x) for i, x in r.resume}) for t, r in pen.requests]


async def one(side: Side) -> list[Any]:
    return await side.collect(request())


def test_the_rest_goes_on_elsewhere_from_the_newest_snapshots() -> None:
    a, b = Pen("a", dies=5.5), Pen("b")
    found = play([a, b], one)
    # Died before token 6: sample 0 had ended, the newest snapshots have 4 tokens.
    assert sent(b) == [(6.0, [0], {1: "aaaa", 2: "aaaa"})]
    assert found == [(3.0, 0, "aaa"), (8.0, 1, "aaaabb"), (11.0, 2, "aaaabbbbb")]
    assert a.requests[0][1].snapshot_every == b.requests[0][1].snapshot_every == 2
    assert b.requests[0][1].request_id == "7.0", "the attempt stays the same"
    assert a.closed == b.closed == 1


def test_without_snapshots_what_has_ended_is_kept_and_the_rest_begins_anew() -> None:
    a, b = Pen("a", dies=5.5), Pen("b")
    found = play([a, b], one, snapshot_tokens=0)
    assert sent(b) == [(6.0, [0], {})]
    assert found == [(3.0, 0, "aaa"), (12.0, 1, "b" * 6), (15.0, 2, "b" * 9)]


def test_a_missed_load_deadline_moves_what_runs_at_once() -> None:
    """The engine hangs in the load and in generation; its requests don't wait for theirs."""
    a, b = Pen("a", load_seconds=1e9), Pen("b")

    async def body(side: Side) -> Any:
        task = asyncio.create_task(side.collect(request()))
        await asyncio.sleep(4.5)
        a.stuck = True
        await asyncio.gather(side.sync.publish(Manifest(PolicyVersion(0, 1), "full", "", {})))
        assert not side.replicas[0].routable
        return await task

    found = play([a, b], body)
    # Deadline 10 s after its own start at 4.5; the busier one loads last, after b's.
    assert sent(b) == [(14.5, [0], {1: "aaaa", 2: "aaaa"})]
    assert found == [(3.0, 0, "aaa"), (16.5, 1, "aaaabb"), (19.5, 2, "aaaabbbbb")]
    assert a.closed == 1, "the old stream is closed"


def test_one_failure_wakes_every_request_of_the_engine() -> None:
    """A hung engine fails a health check: the others do not wait for a failure of their own."""
    a, b = Pen("a"), Pen("b")

    async def body(side: Side) -> Any:
        tasks = [asyncio.create_task(side.collect(request(name=f"{i}.0"), Place(
            side.replicas[0], a))) for i in range(2)]  # fmt: skip
        await asyncio.sleep(4.5)
        a.stuck, a.dies = True, 4.5
        await side.sync.check(side.replicas[0], a, ConnectionError("seen by another"))
        return await asyncio.gather(*tasks)

    play([a, b], body)
    assert [when for when, _, _ in sent(b)] == [4.5, 4.5]


def test_a_sample_that_is_given_up_goes_on_when_the_others_have_ended() -> None:
    """Its engine is well: the group stays there, and nothing that runs is touched."""
    a, b = Pen("a", gives_up={1: 5}), Pen("b")
    found = play([a, b], one)
    assert sent(a) == [(0.0, [], {}), (9.0, [0, 2], {1: "aaaaa"})]
    assert found == [(3.0, 0, "aaa"), (9.0, 2, "a" * 9), (10.0, 1, "a" * 6)]
    assert b.requests == []


def test_an_engine_that_stops_hands_over_more_than_its_last_snapshots() -> None:
    """It ends its samples as aborted, and is out then."""

    class Stopped(Pen):
        def write(self, request: GenerateRequest, rows: dict[int, Tokens]) -> Any:
            out = super().write(request, rows)
            if not rows:
                self.dies = 0.0
            return out

    a, b = Stopped("a", gives_up={0: 2, 1: 3, 2: 3}), Pen("b")
    found = play([a, b], one)
    assert sent(b) == [(3.0, [], {0: "aa", 1: "aaa", 2: "aaa"})]
    assert [text for _, _, text in found] == ["aab", "aaabbb", "aaabbbbbb"]


def test_a_sample_given_up_with_less_than_its_snapshot_keeps_the_snapshot() -> None:
    class Forgetful(Pen):
        def write(self, request: GenerateRequest, rows: dict[int, Tokens]) -> Any:
            return [
                Completion(item.request_id, item.index, "", 0, 0, 0, "aborted", None)
                if isinstance(item, Completion) and item.finish_reason == "aborted"
                else item
                for item in super().write(request, rows)
            ]

    a = Forgetful("a", gives_up={1: 5})
    play([a], one)
    assert sent(a)[1] == (9.0, [0, 2], {1: "aaaa"})


def test_engines_that_die_one_after_another_use_up_the_continuations() -> None:
    pens = [Pen("a", dies=3.5), Pen("b", dies=6.5), Pen("c", dies=9.5), Pen("d")]

    async def body(side: Side) -> Any:
        with pytest.raises(ConnectionError, match="c died"):
            await side.collect(request(5))

    play(pens, body, max_attempts=2)
    assert [len(pen.requests) for pen in pens] == [1, 1, 1, 0]
    # c went on from what a and b had made.
    assert sent(pens[2])[0][2] == {1: "aabb", 2: "aabb", 3: "aabb", 4: "aabb"}


def test_with_nothing_kept_the_attempt_fails_and_the_next_counts_from_a_newer_floor() -> None:
    a, b = Pen("a", dies=0.5), Pen("b")

    async def body(side: Side) -> Any:
        with pytest.raises(ConnectionError):
            await side.collect(request())
        assert not side.replicas[0].routable, "out before the caller hears of it"
        return await side.collect(request(name="7.1"))

    assert [text for _, _, text in play([a, b], body)] == ["bbb", "b" * 6, "b" * 9]


def test_a_request_that_fails_on_a_well_engine_is_not_sent_for_ever() -> None:
    """It had tokens, so it goes on once; the failure that brings nothing new is the request's."""
    a, b = Pen("a"), Pen("b")

    async def body(side: Side) -> Any:
        task = asyncio.create_task(side.collect(request()))
        await asyncio.sleep(4.5)
        a.fails = ValueError("bad request")
        with pytest.raises(ValueError, match="bad request"):
            await task
        assert side.replicas[0].routable

    play([a, b], body)
    assert [when for when, _, _ in sent(a)] == [0.0, 5.0]
    assert b.requests == []


def test_the_group_has_one_deadline_whoever_works_on_it() -> None:
    a, b = Pen("a", dies=5.5), Pen("b", length=lambda index: 1000)

    async def body(side: Side) -> Any:
        with pytest.raises(TimeoutError):
            await side.collect(request())
        return asyncio.get_running_loop().time(), [r.routable for r in side.replicas]

    assert play([a, b], body, deadline_seconds=20.5) == (20.5, [False, True])
    assert (len(a.requests), len(b.requests)) == (1, 1)


def test_the_deadline_holds_while_no_engine_is_there() -> None:
    async def body(side: Side) -> Any:
        with pytest.raises(DeadlinePassed, match="no engine is routable"):
            await side.collect(request())
        return asyncio.get_running_loop().time()

    assert play([Pen("a", dies=5.5)], body, deadline_seconds=20) == 20.0


def test_it_waits_for_the_replacement_of_the_only_engine() -> None:
    found = play([Pen("a", dies=5.5)], one, revival=4.0)
    assert found == [(3.0, 0, "aaa"), (12.0, 1, "aaaa00"), (15.0, 2, "aaaa00000")]


def test_an_engine_that_gives_too_few_is_asked_for_the_rest() -> None:
    class Short(Pen):
        def write(self, request: GenerateRequest, rows: dict[int, Tokens]) -> Any:
            out = super().write(request, rows)
            if len(self.requests) == 1 and any(isinstance(item, Completion) for item in out):
                rows.clear()
            return out

    a = Short("a")
    assert play([a], one) == [(3.0, 0, "aaa"), (7.0, 1, "a" * 6), (10.0, 2, "a" * 9)]
    assert sent(a)[1] == (3.0, [0], {1: "aa", 2: "aa"})


def test_what_was_yielded_is_not_yielded_again_by_an_engine_that_ignores_what_is_done() -> None:
    class Deaf(Pen):
        async def generate(self, request: GenerateRequest) -> Any:
            plain = GenerateRequest(request.request_id, request.prompt_ids, 3, request.sampling)
            async for item in super().generate(plain):
                yield item

    found = play([Pen("a", dies=5.5), Deaf("b")], one)
    assert [index for _, index, _ in found] == [0, 1, 2]


def test_a_refusal_is_the_callers_at_once() -> None:
    a, b = Pen("a", dies=5.5), Pen("b", fails=RequestRefused("too long"))

    async def body(side: Side) -> Any:
        with pytest.raises(RequestRefused):
            await side.collect(request())
        return side.replicas[1].routable

    assert play([a, b], body) is True
    assert len(b.requests) == 1


def test_snapshots_that_are_superseded_are_freed() -> None:
    made: list[weakref.ref[Tokens]] = []

    class Watched(Pen):
        def write(self, request: GenerateRequest, rows: dict[int, Tokens]) -> Any:
            out = super().write(request, rows)
            made.extend(weakref.ref(item.ref) for item in out)
            return out

    async def body(side: Side) -> Any:
        task = asyncio.create_task(side.collect(request(4)))
        held = []
        for _ in range(11):
            await asyncio.sleep(1.0)
            gc.collect()
            held.append(sum(ref() is not None for ref in made))
        await task
        return held

    held = play([Watched("a", length=lambda index: 100)], body_of(body, 11))
    assert max(held) <= 4 + 1, held


def body_of(body: Body, seconds: float) -> Body:
    """Ends the long samples of a test after a while."""

    async def wrapped(side: Side) -> Any:
        async def cut() -> None:
            await asyncio.sleep(seconds - 0.5)
            side.pens[0].length = lambda index: 12

        cutting = asyncio.create_task(cut())
        found = await body(side)
        await cutting
        return found

    return wrapped


def test_closing_it_closes_the_engines_stream() -> None:
    a = Pen("a")

    async def body(side: Side) -> Any:
        stream = side.generation.once(request())
        await anext(stream)
        assert side.replicas[0].outstanding == 2, "one of three has ended"
        await stream.aclose()
        return a.closed

    assert play([a], body) == 1


def test_the_patient_begin_anew_and_hear_of_every_sample_once() -> None:
    """When the continuations are used up, only what has not ended is made again."""
    pens = [Pen("a", dies=3.5), Pen("b", dies=6.5), Pen("c", dies=9.5), Pen("d")]

    async def body(side: Side) -> Any:
        found = []
        async for completion in side.generation.patient(request()):
            found.append((completion.index, "".join(completion.ref)))
        return found

    assert play(pens, body, max_attempts=2) == [(0, "aaa"), (1, "aabbcc"), (2, "d" * 9)]
    assert sent(pens[3]) == [(10.0, [0, 1], {})]


def test_a_group_keeps_its_replica_unless_that_is_full_out_or_another() -> None:
    a, b = Pen("a"), Pen("b")

    async def body(side: Side) -> Any:
        first, second = side.replicas
        place = Place()

        async def pick(samples: int = 3) -> int:
            return (await side.router.pick(1, samples, place)).index

        assert await pick() == 0, "the least loaded, the first of equals"
        place.take(second)
        first.outstanding, second.outstanding = 0, 5
        assert await pick(3) == 1, "its prompt lies there: 5 + 3 samples have seats"
        assert await pick(4) == 0, "full: it has 8 seats"
        second.outstanding = 0
        second.routable = False
        assert await pick() == 0, "out"
        second.routable = True
        assert await pick() == 1
        second.engine, first.outstanding, second.outstanding = Pen("c"), 1, 2
        assert await pick() == 0, "replaced: what it kept is gone"
        first.outstanding = second.outstanding = 0
        place.take(first)
        second.outstanding = -1
        assert await pick() == 0
        second.outstanding = 0

    play([a, b], body)


def test_a_retried_group_goes_where_it_was() -> None:
    a, b = Pen("a"), Pen("b")

    async def body(side: Side) -> Any:
        place = Place()
        b_busy = asyncio.create_task(side.collect(request(1, "1.0"), Place(side.replicas[0], a)))
        await asyncio.sleep(0.1)
        b.fails = ValueError("once")
        with pytest.raises(ValueError, match="once"):
            await side.collect(request(name="7.0"), place)
        b.fails = None
        await b_busy
        side.replicas[1].outstanding += 1  # a is the least loaded one now
        await side.collect(request(name="7.1"), place)
        side.replicas[1].outstanding -= 1
        return [r.request_id for _, r in b.requests]

    assert play([a, b], body) == ["7.0", "7.1"]


def test_an_engine_taken_out_before_it_was_asked_is_not_asked() -> None:
    a = Pen("a")

    async def body(side: Side) -> Any:
        replica = side.replicas[0]
        stream = side.generation.once(request())
        picked = asyncio.create_task(anext(stream))
        side.sync.take_out(replica, a, "gone")
        with pytest.raises((EngineLeft, DeadlinePassed)):
            await picked
        return a.requests

    assert play([a], body, deadline_seconds=5) == []
