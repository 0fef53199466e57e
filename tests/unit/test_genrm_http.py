"""A judge behind a real loopback server: retries, Retry-After, hangs, outages (J4 to J7)."""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import httpx
import numpy as np
import pytest

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Prompt, Reward, ScoreItem
from offbeat.reward.genrm import GenRM
from offbeat.reward.judge_http import HttpBackend
from offbeat.reward.loop import RewardLoop
from offbeat.reward.pool import retry_after
from offbeat.testing.judge_server import Fault, JudgeServer, Mix, judge_process


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError(str(condition))


def item(answer: str = "4", ordinal: int = 0, reference: str | None = "4") -> ScoreItem:
    prompt = Prompt(ordinal, np.zeros(1, np.int32), "p", f"2+2? ({ordinal})", None, reference)
    return ScoreItem(prompt, answer)


def section(base_url: str, **settings: Any) -> RewardSourceSection:
    return RewardSourceSection.model_validate(
        {"kind": "genrm", "base_url": base_url, "model": "judge", "deadline_seconds": 5} | settings
    )


def with_judge(
    server: JudgeServer, body: Callable[[GenRM], Awaitable[Any]], **settings: Any
) -> Any:
    config = section(server.base_url, **settings)

    async def main() -> Any:
        source = GenRM("judge", config, HttpBackend(config, name="judge", pause_seconds=0.02))
        await source.start()
        try:
            return await asyncio.wait_for(body(source), 60)
        finally:
            await source.stop()

    return asyncio.run(main())


def judged(server: JudgeServer, count: int = 1, **settings: Any) -> list[Reward]:
    async def body(source: GenRM) -> list[Reward]:
        return await source.score([item(ordinal=i) for i in range(count)])

    return with_judge(server, body, **settings)


def test_a_grade() -> None:
    with JudgeServer("Score: 8/10") as server:
        (reward,) = judged(server, stop=("\n",))
        assert reward.value == pytest.approx(7 / 9)
        assert (reward.raw, reward.retries) == ("Score: 8/10", 0)
        (call,) = server.calls
    assert "2+2? (0)" in call.text
    assert "Reference answer:\n4" in call.text
    assert (call.body["temperature"], call.body["max_tokens"]) == (0.0, 16)
    assert (call.body["model"], call.body["stop"]) == ("judge", ["\n"])


def test_j4_two_500s_then_an_answer() -> None:
    with JudgeServer(script=[Fault(500), Fault(500)]) as server:
        (reward,) = judged(server, retries=2)
        assert (reward.status, reward.retries) == ("scored", 2)
        server.add(Fault(500), Fault(500), Fault(500))
        (reward,) = judged(server, retries=2)
        assert (reward.cause, reward.retries) == ("unavailable", 2)
        assert len(server.calls) == 6


@pytest.mark.parametrize(
    "fault",
    [
        Fault(reset=True),
        Fault(502),
        Fault(body=b"<html>"),
        Fault(503, headers={"Retry-After": "0"}),
        Fault(cut=True),
        Fault(drip=0.1),
        Fault(body=b"not gzip at all", headers={"Content-Encoding": "gzip"}),
    ],
)
def test_passing_faults_are_retried(fault: Fault) -> None:
    with JudgeServer(script=[fault]) as server:
        (reward,) = judged(server, deadline_seconds=2)
        assert (reward.status, reward.retries) == ("scored", 1)


def test_a_connection_that_breaks_spends_no_retry_but_not_for_ever() -> None:
    with JudgeServer(script=[Fault(reset=True), Fault(cut=True)]) as server:
        (reward,) = judged(server, retries=0)
        assert (reward.status, reward.retries) == ("scored", 2)
        server.add(*[Fault(reset=True)] * 4)
        (reward,) = judged(server, retries=0)
        assert (reward.cause, reward.retries, len(server.calls)) == ("unavailable", 3, 7)


def test_an_answer_under_another_name_is_an_answer() -> None:
    with JudgeServer(script=[Fault(content_type="text/plain")]) as server:
        (reward,) = judged(server)
        assert (reward.status, reward.retries) == ("scored", 0)


def test_a_huge_answer_is_not_read_to_its_end() -> None:
    with JudgeServer(script=[Fault(size=60_000_000)]) as server:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (reward,) = judged(server)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert (reward.status, reward.cause) == ("failed", "unparseable")
        assert grown < 100_000, "the server's own 60 MB, and not a second time"


def test_a_mix_of_faults_and_an_outage_in_the_middle() -> None:
    mix = Mix(1, garbage=0.2, hang=0.05, babble=0.05)
    with judge_process("--latency", "0.05", "0.5", "--mix", json.dumps(asdict(mix))) as server:
        config = section(server.base_url, deadline_seconds=1, concurrency=32)

        async def main() -> list[Reward]:
            backend = HttpBackend(config, name="judge", pause_seconds=0.02)
            source = GenRM("judge", config, backend)
            await source.start()
            scoring = asyncio.create_task(source.score([item(ordinal=i) for i in range(300)]))
            await until(lambda: backend.facts()["calls"] >= 60)
            await asyncio.to_thread(server.kill)
            await until(lambda: backend.down_since is not None)
            await asyncio.sleep(1)
            await asyncio.to_thread(server.start)
            rewards = await scoring
            assert backend.down_since is None
            await source.stop()
            return rewards

        rewards = asyncio.run(asyncio.wait_for(main(), 120))
    causes = Counter(reward.cause for reward in rewards)
    assert "unavailable" not in causes, "nothing is lost to the outage"
    assert set(causes) <= {None, "unparseable", "bad_response", "timeout"}
    assert 3 <= causes["unparseable"] <= 40  # at temperature 0 the same words come again
    assert causes[None] >= 240
    assert {reward.value for reward in rewards if reward.cause is None} == {7 / 9}
    assert all(reward.value is None for reward in rewards if reward.cause is not None)


def test_j5_retry_after_closes_the_endpoint() -> None:
    with JudgeServer(script=[Fault(429, headers={"Retry-After": "2"})]) as server:

        async def body(source: GenRM) -> list[Reward]:
            first = asyncio.create_task(source.score([item(ordinal=0)]))
            await asyncio.sleep(0.3)
            rest = await source.score([item(ordinal=i) for i in range(1, 6)])
            return [*(await first), *rest]

        rewards = with_judge(server, body, retries=0)
        assert all(reward.status == "scored" for reward in rewards)
        assert rewards[0].retries == 1
        limited, *others = [call.at for call in server.calls]
        assert len(others) == 6
        assert min(others) - limited >= 1.99


def test_j5_patience_ends() -> None:
    with JudgeServer(script=[Fault(429, headers={"Retry-After": "3600"})]) as server:
        start = time.monotonic()
        first, second = judged(server, 2, concurrency=1, deadline_seconds=5)
        assert {first.cause, second.cause} == {"rate_limited"}
        assert time.monotonic() - start < 5
        assert len(server.calls) == 1
    with JudgeServer(script=[Fault(429)] * 1000) as server:
        (reward,) = judged(server, patience_seconds=0.3, retries=1)
        assert reward.cause == "rate_limited"
        assert 2 <= len(server.calls) < 50


def test_j6_a_hang_is_a_timeout_and_others_go_on() -> None:
    with JudgeServer(script=[Fault(hang=True)]) as server:
        start = time.monotonic()
        rewards = judged(server, 8, deadline_seconds=1, retries=0)
        causes = [reward.cause for reward in rewards]
        assert sorted(map(str, causes)) == ["None"] * 7 + ["timeout"]
        assert time.monotonic() - start < 8


def test_j7_down_at_start() -> None:
    server = JudgeServer().start()
    server.stop()
    with pytest.raises(UserError, match=rf"reward.judge.base_url: {server.base_url} does not"):
        judged(server, retries=1)
    with pytest.raises(UserError, match="is not an http address"):
        HttpBackend(section("host:8000"), name="judge")


@pytest.mark.parametrize("retries", [0, 2])
def test_j7_down_in_the_middle_and_back(retries: int) -> None:
    server = JudgeServer(delay=0.05).start()
    config = section(server.base_url, retries=retries)

    async def main() -> None:
        judge = HttpBackend(config, name="judge", pause_seconds=0.02)
        source = GenRM("judge", config, judge)
        loop = await RewardLoop.create({"judge": source}, {"judge": config})
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(loop.score(item(ordinal=i))) for i in range(20)]
            await until(lambda: len(server.calls) >= 5)
            await asyncio.to_thread(server.stop)  # what is in flight breaks off
            await until(lambda: judge.down_since is not None)
            tasks += [group.create_task(loop.score(item(ordinal=i))) for i in range(20, 40)]
            await asyncio.sleep(0.5)
            assert not any(task.done() for task in tasks[20:])
            await asyncio.to_thread(server.start)
        assert all(task.result().verdict == "keep" for task in tasks), "no sample is lost"
        assert judge.down_since is None
        stats = loop.stats()["judge"]
        assert (stats.scored, stats.failed) == (40, {})
        await loop.stop()

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        server.stop()


def test_j7_down_for_longer_than_patience() -> None:
    server = JudgeServer().start()
    config = section(server.base_url, retries=1, patience_seconds=0.3)

    async def main() -> None:
        source = GenRM("judge", config, HttpBackend(config, name="judge", pause_seconds=0.02))
        await source.start()
        await asyncio.to_thread(server.stop)
        rewards = await source.score([item(ordinal=i) for i in range(5)])
        assert {(reward.status, reward.cause) for reward in rewards} == {("failed", "unavailable")}
        assert all("no server answers for" in reward.reason for reward in rewards)
        begun = time.monotonic()
        (reward,) = await source.score([item()])
        assert reward.cause == "unavailable"
        assert time.monotonic() - begun < 2, "nobody waits a second time"
        await source.stop()

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        server.stop()


def test_j8_one_of_two_dies_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    with JudgeServer(delay=0.02) as dying, JudgeServer(delay=0.02) as other:
        config = section(dying.base_url, retries=0)
        config = config.model_copy(update={"base_url": (dying.base_url, other.base_url)})

        async def main() -> None:
            judge = HttpBackend(config, name="judge", pause_seconds=0.02)
            source = GenRM("judge", config, judge)
            await source.start()
            scoring = asyncio.create_task(source.score([item(ordinal=i) for i in range(300)]))
            await until(lambda: len(dying.calls) >= 20)
            await asyncio.to_thread(dying.stop)
            rewards = await scoring
            assert {reward.status for reward in rewards} == {"scored"}, "no sample is lost"
            assert judge.down_since is None
            assert judge.facts()["servers_up"] == 1
            seen = len(dying.calls)
            await asyncio.to_thread(dying.start)
            await until(lambda: judge.facts()["servers_up"] == 2)
            await source.score([item(ordinal=i) for i in range(400)])
            assert len(dying.calls) - seen >= 15, "it has its share again"
            await source.stop()

        asyncio.run(asyncio.wait_for(main(), 60))
    assert f"reward/judge: {dying.base_url} is out (" in caplog.text
    assert "its calls go to the others" in caplog.text
    assert f"{dying.base_url} is back after" in caplog.text


def test_concurrency_is_a_limit() -> None:
    with JudgeServer(delay=0.05) as server:
        rewards = judged(server, 12, concurrency=3)
        assert all(reward.status == "scored" for reward in rewards)
        assert server.most_at_once <= 3


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault(400), "refused"),
        (Fault(400, body=b'{"error": {"code": "context_length_exceeded"}}'), "too_long"),
        (Fault(reply="I cannot judge this"), "unparseable"),
        (Fault(reply="11"), "out_of_range"),
        (Fault(reply="8 " * 5_000_000), "unparseable"),
        (Fault(reply="1", finish_reason="length"), "unparseable"),
        (Fault(body=b'{"choices": []}'), "bad_response"),
        (Fault(body=b'{"choices": [{"message": {"content": 8}}]}'), "bad_response"),
    ],
)
def test_failures_by_cause(fault: Fault, cause: str) -> None:
    with JudgeServer(script=[fault]) as server:
        (reward,) = judged(server)
        assert (reward.status, reward.cause, reward.value) == ("failed", cause, None)
        assert len(server.calls) == 1
        assert len(reward.raw) < 10_000


def test_the_key_is_sent_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with JudgeServer(script=[Fault(401, body=b"bad key: s3cr3t-key")]) as server:
        monkeypatch.delenv("JUDGE_KEY", raising=False)
        with pytest.raises(UserError, match="JUDGE_KEY is not set"):
            judged(server, api_key_env="JUDGE_KEY")
        monkeypatch.setenv("JUDGE_KEY", "s3cr3t-key")
        (reward,) = judged(server, api_key_env="JUDGE_KEY")
        assert server.calls[0].headers["Authorization"] == "Bearer s3cr3t-key"
    assert reward.cause == "refused"
    assert "s3cr3t" not in reward.reason + caplog.text


def test_the_only_model_needs_no_name() -> None:
    with JudgeServer(model="the-one") as server:
        judged(server, model=None)
        assert server.calls[0].body["model"] == "the-one"


def test_injected_transport_and_refused_key() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(403)

    config = section("http://user:pw@judge.invalid/v1")
    backend = HttpBackend(config, name="judge", transport=httpx.MockTransport(answer))
    with pytest.raises(UserError, match=r"http://judge\.invalid/v1 refuses the key"):
        asyncio.run(backend.start())


def test_retry_after_header() -> None:
    assert retry_after("2") == 2.0
    assert retry_after(None) is None
    assert retry_after("soon") is None
    assert retry_after("-1") == retry_after("nan") == 0.0
    at = email.utils.formatdate(time.time() + 30, usegmt=True)
    assert retry_after(at) == pytest.approx(30, abs=2)
