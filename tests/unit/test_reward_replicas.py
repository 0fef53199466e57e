"""Replicas of a reward model that die, hang, or do not come back: no verdict is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from tests.unit import test_disrm, test_genrm

from offbeat.cluster.leftovers import TAG, end_leftovers
from offbeat.errors import RequestRefused
from offbeat.records import Completion, GenerateRequest, Reward, ScoreItem, Span
from offbeat.reward import loop as reward_loop
from offbeat.reward import replicas as module
from offbeat.reward.build import build_source
from offbeat.reward.loop import RewardLoop
from offbeat.reward.parity import RowCheck
from offbeat.reward.pool import CallFailed
from offbeat.reward.replicas import LOST, Replicas
from offbeat.reward.source import Logit

START_SECONDS = 20.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SUSPECT_SECONDS", 0.01)
    monkeypatch.setattr(module, "RESTART_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(module, "HEALTH_SECONDS", 0.1)
    monkeypatch.setattr(reward_loop, "BACKOFF_SECONDS", 0.001)


class Mortal:
    """Answers `lives` calls, then is dead; with `hangs` it says nothing at all from then on."""

    def __init__(self, lives: int = 10**9, *, hangs: bool = False, delay: float = 0.0) -> None:
        self.lives, self.hangs, self.delay = lives, hangs, delay
        self.asked = self.answered = self.healths = 0
        self.stopped = False

    @property
    def dead(self) -> bool:
        return self.asked > self.lives

    async def health(self) -> None:
        self.healths += 1
        await self._word()

    async def stop(self) -> None:
        self.stopped = True

    async def ask(self) -> int:
        self.asked += 1
        await self._word()
        await asyncio.sleep(self.delay)
        await self._word()
        self.answered += 1
        return self.answered

    async def drain_spans(self) -> list[Span]:
        await self._word()
        return []

    async def _word(self) -> None:
        if self.dead and self.hangs:
            await asyncio.sleep(3600)
        if self.dead:
            raise ConnectionError("the actor died")


class Judge(Mortal):
    """An engine that says 8."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        await self.ask()
        yield Completion(request.request_id, 0, "8", 1, 0, 0, "stop", None)


class Scorer(Mortal):
    """Scores by length."""

    async def start(self) -> None: ...

    async def logits(self, items: Sequence[ScoreItem]) -> list[Logit]:
        await self.ask()
        return [Logit(float(len(item.completion))) for item in items]

    async def check_rows(self, items: Sequence[ScoreItem], *, reference: bool) -> RowCheck:
        return RowCheck()


class Stock:
    """What `replace` gives, one after another; an exception is a start that fails."""

    def __init__(self, *stock: Any, seconds: float = 0.05) -> None:
        self.stock, self.seconds = list(stock), seconds
        self.asked: list[int] = []
        self.begun = asyncio.Event()
        self.ended = 0

    async def __call__(self, index: int) -> Any:
        self.asked.append(index)
        self.begun.set()
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.ended += 1
            raise
        fresh = self.stock.pop(0)
        if isinstance(fresh, Exception):
            raise fresh
        return fresh


def replicas(*engines: Mortal, replace: Any, **more: Any) -> Replicas[Any]:
    settings = {"deadline_seconds": 5.0, "start_deadline_seconds": START_SECONDS} | more
    return Replicas("judge", engines, replace=replace, **settings)


async def outcomes(routes: Replicas[Any], calls: int) -> list[Any]:
    asked = [routes.call(lambda engine: engine.ask()) for _ in range(calls)]
    async with asyncio.timeout(20):
        return await asyncio.gather(*asked, return_exceptions=True)


def causes(results: Sequence[Any]) -> list[str]:
    return [result.cause for result in results if isinstance(result, CallFailed)]


def drive(main: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(within())


# -- one replica's life ------------------------------------------------------------------------


def test_one_that_dies_is_replaced_and_serves_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        dead, other, fresh = Mortal(3), Mortal(delay=0.01), Mortal()
        replace = Stock(fresh)
        routes = replicas(dead, other, replace=replace)
        lost = causes([r for _ in range(8) for r in await outcomes(routes, 2)])
        assert lost == [LOST]
        assert replace.asked == [0]
        assert dead.asked == 4, "a dead one is asked no more"
        await asyncio.sleep(0.2)
        assert routes.serving == {0: fresh, 1: other}
        await outcomes(routes, 10)
        assert fresh.answered >= 4
        await routes.stop()

    drive(main)
    assert "reward/judge replica 0 died (ConnectionError: the actor died)" in caplog.text
    assert "restarted in 0 s" in caplog.text


def test_one_that_hangs_is_replaced_and_asked_for_its_health_once() -> None:
    async def main() -> None:
        hung, fresh = Mortal(0, hangs=True), Mortal()
        routes = replicas(hung, replace=Stock(fresh), deadline_seconds=0.2)
        assert causes(await outcomes(routes, 3)) == [LOST] * 3
        assert hung.healths == 1, "once for all calls that fail together"
        assert causes(await outcomes(routes, 5)) == []
        assert fresh.answered == 5
        await routes.stop()

    drive(main)


def test_one_whose_health_is_not_known_yet_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEALTH_SECONDS", 0.5)

    async def main() -> None:
        hung, other = Mortal(0, hangs=True), Mortal(delay=0.001)
        routes = replicas(hung, other, replace=Stock(Mortal()), deadline_seconds=0.6)
        first = asyncio.create_task(outcomes(routes, 1))
        await asyncio.sleep(0.01)
        while not hung.healths:
            await outcomes(routes, 1)
        await asyncio.sleep(0.03)  # it is avoided no longer
        assert causes(await outcomes(routes, 6)) == []
        assert causes(await first) == [LOST]
        assert hung.asked == 1
        await routes.stop()

    drive(main)


def test_one_that_fails_though_it_is_well_is_avoided_longer_each_time() -> None:
    async def main() -> None:
        broken, other = Mortal(), Mortal(delay=0.001)
        routes = replicas(broken, other, replace=None)

        async def ask(engine: Mortal) -> int:
            if engine is broken:
                broken.asked += 1
                raise ValueError("always")
            return await engine.ask()

        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            await asyncio.gather(routes.call(ask), return_exceptions=True)
        assert 2 <= broken.asked <= 8  # after 0.01 s, 0.02 s, 0.04 s, ...

    drive(main)


def test_scorers_get_one_batch_at_a_time() -> None:
    async def main() -> None:
        running: dict[int, int] = {}
        first, second = Mortal(), Mortal()
        routes = replicas(first, second, replace=None, at_once=1)

        async def ask(engine: Mortal) -> None:
            running[id(engine)] = running.get(id(engine), 0) + 1
            assert running[id(engine)] == 1
            await asyncio.sleep(0.01)
            running[id(engine)] -= 1

        async with asyncio.timeout(5):
            await asyncio.gather(*(routes.call(ask) for _ in range(9)))
        assert set(running) == {id(first), id(second)}

    drive(main)


def test_calls_that_run_on_one_that_is_taken_out_end_at_once() -> None:
    async def main() -> None:
        dying = Mortal(1, delay=60)
        routes = replicas(dying, replace=Stock(Mortal(), Mortal()), deadline_seconds=60)
        runs = asyncio.create_task(outcomes(routes, 1))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            assert causes(await outcomes(routes, 1)) == [LOST]  # the second call kills it
            assert causes(await runs) == [LOST]
        await routes.stop()

    drive(main)


def test_a_call_that_fails_on_a_healthy_replica_restarts_nothing() -> None:
    async def main() -> None:
        well = Mortal()
        routes = replicas(well, replace=Stock())

        async def fails(engine: Any) -> None:
            raise ValueError("this text")

        async def refused(engine: Any) -> None:
            raise RequestRefused("too long")

        async def slow(engine: Any) -> None:
            await asyncio.sleep(60)

        with pytest.raises(CallFailed, match="unavailable: ValueError: this text"):
            await routes.call(fails)
        assert well.healths == 1
        with pytest.raises(RequestRefused):
            await routes.call(refused)
        assert well.healths == 1, "what is wrong with the text says nothing of the replica"
        routes._deadline = 0.05
        with pytest.raises(CallFailed, match=r"timeout: no answer within 0.05 s"):
            await routes.call(slow)
        assert routes.serving == {0: well}
        await routes.stop()

    drive(main)


def test_without_a_way_to_replace_it_is_only_avoided() -> None:
    async def main() -> None:
        dead, other = Mortal(0), Mortal()
        routes = replicas(dead, other, replace=None)
        assert causes(await outcomes(routes, 2)) == ["unavailable"]
        assert (dead.healths, set(routes.serving)) == (0, {0, 1})

    drive(main)


# -- restarts: their bounds ----------------------------------------------------------------------


def test_the_only_one_dies_and_calls_wait_for_it_within_the_bound() -> None:
    async def main() -> None:
        fresh = Mortal()
        routes = replicas(Mortal(0), replace=Stock(fresh, seconds=0.5))
        assert causes(await outcomes(routes, 1)) == [LOST]
        assert routes.serving == {}
        assert causes(await outcomes(routes, 20)) == []
        assert fresh.answered == 20
        await routes.stop()

        routes = replicas(Mortal(0), replace=Stock(seconds=60), start_deadline_seconds=0.3)
        assert causes(await outcomes(routes, 1)) == [LOST]
        begun = time.monotonic()
        results = await outcomes(routes, 3)
        assert causes(results) == ["unavailable"] * 3
        assert "no replica came back within cluster.start_deadline_seconds = 0.3" in str(results[0])
        assert 0.1 < time.monotonic() - begun < 3
        await routes.stop()

    drive(main)


def test_down_since_is_when_the_last_one_went() -> None:
    async def main() -> None:
        now = asyncio.get_running_loop().time
        fresh = Mortal(1)
        replace = Stock(fresh, *[OSError("no room")] * 9, seconds=0.1)
        routes = replicas(Mortal(0), replace=replace)
        assert routes.down_since is None
        before = now()
        await outcomes(routes, 1)
        assert routes.down_since is not None
        assert before <= routes.down_since <= now()
        assert causes(await outcomes(routes, 1)) == []
        assert routes.down_since is None
        assert causes(await outcomes(routes, 1)) == [LOST]
        since = routes.down_since
        assert since is not None
        assert causes(await outcomes(routes, 1)) == ["unavailable"]
        assert routes.down_since == since, "given up: it stays down"
        await routes.stop()

        routes = replicas(Mortal(0), Mortal(), replace=Stock(seconds=60))
        await outcomes(routes, 2)
        assert len(routes.serving) == 1
        assert routes.down_since is None, "the other one serves"
        await routes.stop()

    drive(main)


def test_a_start_that_fails_is_tried_again() -> None:
    async def main() -> None:
        fresh = Mortal()
        replace = Stock(ConnectionError("no room yet"), OSError("nor now"), fresh)
        routes = replicas(Mortal(0), replace=replace)
        await outcomes(routes, 1)
        assert causes(await outcomes(routes, 4)) == []
        assert replace.asked == [0, 0, 0]
        await routes.stop()

    drive(main)


def test_one_that_never_starts_is_given_up_and_the_others_serve(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        other = Mortal()
        replace = Stock(*[ConnectionError("no room")] * 9, seconds=0.0)
        routes = replicas(Mortal(0), other, replace=replace)
        await outcomes(routes, 2)
        await asyncio.sleep(0.3)
        assert replace.asked == [0] * module.RESTARTS
        assert routes.serving == {1: other}
        assert causes(await outcomes(routes, 10)) == []
        await routes.stop()

    drive(main)
    assert "reward/judge replica 0 is given up after 3 restarts" in caplog.text
    assert "no room" in caplog.text


def test_when_all_are_given_up_calls_fail_at_once_by_cause() -> None:
    async def main() -> None:
        replace = Stock(*[Mortal(0) for _ in range(20)], seconds=0.0)
        routes = replicas(Mortal(0), Mortal(0), replace=replace)
        results = [await outcomes(routes, 1) for _ in range(10)]
        assert [causes(r) for r in results] == [[LOST]] * 8 + [["unavailable"]] * 2
        assert "all replicas are given up: ConnectionError: the actor died" in str(results[9][0])
        assert sorted(replace.asked) == [0] * module.RESTARTS + [1] * module.RESTARTS
        await routes.stop()

    drive(main)


def test_one_that_served_for_long_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORGIVEN_SECONDS", 0.05)

    async def main() -> None:
        replace = Stock(*[Mortal(1) for _ in range(8)], seconds=0.0)
        routes = replicas(Mortal(1), replace=replace)
        for _ in range(8):
            assert causes(await outcomes(routes, 1)) == []
            await asyncio.sleep(0.1)
            assert causes(await outcomes(routes, 1)) == [LOST]
        assert len(replace.asked) == 8
        await routes.stop()

    drive(main)


def test_two_die_together_and_both_come_back() -> None:
    async def main() -> None:
        fresh = [Mortal(), Mortal()]
        replace = Stock(*fresh)
        routes = replicas(Mortal(2, delay=0.01), Mortal(2, delay=0.01), replace=replace)
        results = await outcomes(routes, 12)
        assert set(causes(results)) == {LOST}
        assert sorted(replace.asked) == [0, 1]
        assert causes(await outcomes(routes, 12)) == []
        await asyncio.sleep(0.1)
        assert set(routes.serving.values()) == set(fresh)
        await routes.stop()

    drive(main)


# -- the end -------------------------------------------------------------------------------------


def test_stop_ends_a_restart_and_those_that_wait_for_it() -> None:
    async def main() -> None:
        replace = Stock(Mortal(), seconds=60)
        routes = replicas(Mortal(0), replace=replace)
        await outcomes(routes, 1)
        waiting = asyncio.create_task(outcomes(routes, 3))
        await replace.begun.wait()
        await routes.stop()
        assert replace.ended == 1, "it was cancelled, so that it ends what it began"
        results = await waiting
        assert causes(results) == ["unavailable"] * 3
        assert "the source was stopped" in str(results[0])
        assert asyncio.all_tasks() == {asyncio.current_task()}, "no task without an owner"

    drive(main)


def test_a_replacement_that_comes_up_after_stop_is_ended() -> None:
    async def main() -> None:
        fresh = Mortal()
        begun = asyncio.Event()

        async def replace(index: int) -> Mortal:
            begun.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)  # a start that cannot be broken off
            return fresh

        routes = replicas(Mortal(0), replace=replace)
        await outcomes(routes, 1)
        await begun.wait()
        await routes.stop()
        assert fresh.stopped
        assert routes.serving == {}

    drive(main)


# -- whole sources through the reward loop: no verdict is lost ----------------------------------


async def scored_by(
    kind: str, first: list[Any], replace: Stock, items: int, **settings: Any
) -> tuple[list[Reward], RewardLoop]:
    if kind == "genrm":
        config = test_genrm.section(temperature=1.0, **settings)
        source = build_source(
            "source", config, engines=first, replace_engine=replace,
            start_deadline_seconds=START_SECONDS,
        )  # fmt: skip
        source._judge._tokenizer = test_genrm.Letters()  # type: ignore[attr-defined]
        item = test_genrm.item
    else:
        config = test_disrm.section("m", seats=4, **settings)
        source = build_source(
            "source", config, scorers=first, replace_scorer=replace,
            start_deadline_seconds=START_SECONDS,
        )  # fmt: skip
        item = test_disrm.item
    loop = await RewardLoop.create({"source": source}, {"source": config})
    found = await asyncio.gather(*(loop.score(item("x" * (i % 7))) for i in range(items)))
    return [scored.rewards["source"] for scored in found], loop


KINDS = [("genrm", Judge), ("disrm", Scorer)]


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize(("kind", "make"), KINDS)
def test_the_only_replica_dies_under_load_and_no_verdict_is_lost(
    kind: str, make: type[Mortal], hangs: bool, retries: int
) -> None:
    async def main() -> None:
        fresh = make(delay=0.01)
        rewards, loop = await scored_by(
            kind, [make(3, hangs=hangs, delay=0.01)], Stock(fresh, seconds=0.3), 60,
            retries=retries, deadline_seconds=1.5 if hangs else 60,
        )  # fmt: skip
        assert {reward.status for reward in rewards} == {"scored"}
        if kind == "disrm":
            assert [reward.value for reward in rewards] == [float(i % 7) for i in range(60)]
        again = sum(reward.retries for reward in rewards)
        assert again > 0
        stats = loop.stats()["source"]
        assert (stats.scored, stats.failed, stats.retries) == (60, {}, again)
        assert fresh.answered > 0
        await loop.stop()

    drive(main)


@pytest.mark.parametrize(("kind", "make"), KINDS)
def test_one_of_two_dies_and_the_other_takes_its_calls_meanwhile(
    kind: str, make: type[Mortal]
) -> None:
    async def main() -> None:
        replace = Stock(make(), seconds=60)  # it never comes back in this test
        other = make(delay=0.01)
        rewards, loop = await scored_by(kind, [make(2, delay=0.01), other], replace, 60)
        assert {reward.status for reward in rewards} == {"scored"}
        assert sum(reward.retries for reward in rewards) > 0
        assert replace.asked == [0]
        await loop.stop()
        assert replace.ended == 1

    drive(main)


@pytest.mark.parametrize(("kind", "make"), KINDS)
def test_a_sample_that_kills_every_replica_fails_by_name(kind: str, make: type[Mortal]) -> None:
    async def main() -> None:
        replace = Stock(*[make(0) for _ in range(9)], seconds=0.0)
        rewards, loop = await scored_by(kind, [make(0)], replace, 1, retries=20)
        assert [(r.status, r.cause, r.retries) for r in rewards] == [("failed", LOST, 2)]
        assert "the actor died" in rewards[0].reason
        assert len(replace.asked) <= module.RESTARTS
        await loop.stop()

    drive(main)


@pytest.mark.parametrize(("kind", "make"), KINDS)
def test_a_source_without_any_replica_left_keeps_failing_by_cause(
    kind: str, make: type[Mortal]
) -> None:
    async def main() -> None:
        replace = Stock(*[OSError("no room")] * 9, seconds=0.0)
        rewards, loop = await scored_by(kind, [make(0)], replace, 5)
        assert {(r.status, r.cause) for r in rewards} == {("failed", "unavailable")}
        assert {r.reason for r in rewards} == {"all replicas are given up: OSError: no room"}
        await loop.stop()

    drive(main)


# -- what a dead replica leaves on its node -----------------------------------------------------


def test_processes_of_an_earlier_life_are_ended_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
        process = subprocess.Popen(
            command, env=os.environ | {TAG: name}, stdout=subprocess.PIPE
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        return process

    mine, others = start("run-1/reward/judge/1"), start("run-1/reward/judge/11")
    try:
        end_leftovers()
        assert (mine.poll(), others.poll()) == (None, None)
        monkeypatch.setenv(TAG, "run-1/reward/judge/1")
        end_leftovers()
        assert mine.wait(timeout=5) == -9
        assert others.poll() is None
    finally:
        for process in (mine, others):
            process.kill()
            process.wait()
