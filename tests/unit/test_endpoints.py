"""Pools of several servers in virtual time: routing, outages, rate limits, who waits for what."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import httpx
import pytest
from tests.virtual import run

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.reward import limiter
from offbeat.reward.health import HEALTH_LIMIT_SECONDS
from offbeat.reward.pool import GRACE_SECONDS, CallFailed, EndpointPool

Answer = Callable[["Server", str], httpx.Response | None]
OK = {"choices": [{"message": {"content": "8"}}]}


@pytest.fixture(autouse=True)
def no_limits_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins at the same time of its own clock, with servers of the same names."""
    monkeypatch.setattr(limiter, "_LIMITERS", WeakValueDictionary())


class Server:
    """One scripted server: how long a call takes, what it answers, and what it saw."""

    def __init__(self, seconds: float = 1.0, answer: Answer | None = None) -> None:
        self.seconds, self.answer = seconds, answer
        self.down = self.hangs = False
        self.now = self.most = self.looks = 0
        self.at: list[float] = []
        self.texts: list[str] = []

    async def call(self, body: bytes) -> httpx.Response:
        text = json.loads(body)["messages"][0]["content"]
        self.at.append(now())
        self.texts.append(text)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            said = self.answer(self, text) if self.answer else None
            if said is not None:
                return said
            for _ in range(10):
                await asyncio.sleep(self.seconds / 10)
                await self.there()
            usage = {"prompt_tokens": 10, "completion_tokens": 2}
            return httpx.Response(200, json=OK | {"usage": usage})
        finally:
            self.now -= 1

    async def models(self) -> httpx.Response:
        self.looks += 1
        return httpx.Response(200, json={"data": [{"id": "judge"}]})

    async def there(self) -> None:
        if self.hangs:
            await asyncio.sleep(3600)
        if self.down:
            raise httpx.ConnectError("refused")


class Network(httpx.AsyncBaseTransport):
    """Servers by host name."""

    def __init__(self, **servers: Server) -> None:
        self.servers = servers

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        server = self.servers[request.url.host]
        await server.there()
        if request.url.path.endswith("/models"):
            return await server.models()
        return await server.call(await request.aread())


def now() -> float:
    return asyncio.get_running_loop().time()


def pool_of(network: Network, *hosts: str, name: str = "judge", **more: Any) -> EndpointPool:
    settings = {
        "kind": "genrm", "model": "judge", "deadline_seconds": 60, "concurrency": 8,
        "base_url": [f"http://{host}/v1" for host in hosts or network.servers],
    } | more  # fmt: skip
    section = RewardSourceSection.model_validate(settings)
    return EndpointPool(name, section, transport=network)


def body(text: str = "2+2?") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 16}


async def ask(pool: EndpointPool, text: str = "2+2?") -> str | int:
    """The retries of a call that was answered, or the cause of its failure."""
    try:
        answer, retries = await pool.post("/chat/completions", body(text))
    except CallFailed as failed:
        return failed.cause
    assert answer["choices"] == OK["choices"]
    return retries


async def asks(pool: EndpointPool, count: int, begin: int = 0) -> list[str | int]:
    texts = [f"text {i}" for i in range(begin, begin + count)]
    return await asyncio.gather(*(ask(pool, text) for text in texts))


async def started(pool: EndpointPool) -> EndpointPool:
    assert await pool.start() == ["judge"]
    return pool


def quiet(pool: EndpointPool) -> bool:
    facts = pool.facts()
    return facts["outstanding"] == facts["waiting"] == 0


# -- routing -------------------------------------------------------------------------------------


def test_the_least_busy_server_is_asked_and_none_beyond_its_limit() -> None:
    async def main() -> None:
        slow, fast = Server(4.0), Server(1.0)
        pool = await started(pool_of(Network(slow=slow, fast=fast)))
        assert set(await asks(pool, 200)) == {0}
        assert (slow.most, fast.most) == (8, 8)
        assert len(fast.at) >= 3 * len(slow.at)
        facts = pool.facts()
        assert (facts["calls"], facts["servers_up"], facts["limit"]) == (200, 2, 16)
        assert (facts["prompt_tokens"], facts["completion_tokens"]) == (2000, 400)
        assert quiet(pool)
        await pool.stop()

    run(main())


def test_a_retry_goes_to_another_server_and_a_broken_one_is_left_alone() -> None:
    async def main() -> None:
        broken = Server(answer=lambda server, text: httpx.Response(500))
        well = Server(0.1)
        pool = await started(pool_of(Network(broken=broken, well=well), concurrency=2, retries=1))
        begun = now()
        found = await asks(pool, 300)
        assert set(found) <= {0, 1}, "one retry is enough: it is made elsewhere"
        assert len(well.at) == 300
        trials = 4 + (now() - begun) / (HEALTH_LIMIT_SECONDS / 2)
        assert len(broken.at) <= 5 + trials, "five on end, and a trial now and then"
        assert pool.down_since is None
        await pool.stop()

    run(main())


def test_a_server_that_refuses_is_no_answer_while_another_one_is_there() -> None:
    async def main() -> None:
        wrong = Server(answer=lambda server, text: httpx.Response(404, text="no such model"))
        well = Server(0.1)
        pool = await started(pool_of(Network(wrong=wrong, well=well)))
        assert set(await asks(pool, 100)) <= {0, 1}
        await pool.stop()
        pool = await started(pool_of(Network(wrong=wrong)))
        wrong.at.clear()
        assert await ask(pool) == "refused"
        assert len(wrong.at) == 1
        await pool.stop()

    run(main())


def test_what_is_wrong_with_the_text_is_asked_once() -> None:
    async def main() -> None:
        answers = {"long": httpx.Response(400, text="maximum context"), "bad": httpx.Response(422)}
        servers = {host: Server(0.1, lambda server, text: answers.get(text)) for host in "ab"}
        pool = await started(pool_of(Network(**servers)))
        assert [await ask(pool, text) for text in ("long", "bad", "ok")] == [
            "too_long", "refused", 0,
        ]  # fmt: skip
        assert sum(len(server.at) for server in servers.values()) == 3
        await pool.stop()

    run(main())


# -- outages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("retries", [0, 2])
def test_an_outage_of_twenty_seconds_loses_nothing(
    retries: int, hangs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        server = Server(0.5)
        settings = {"retries": retries, "deadline_seconds": 5}
        pool = await started(pool_of(Network(one=server), **settings))
        scoring = asyncio.create_task(asks(pool, 200))
        await asyncio.sleep(3.2)
        went = now()
        server.hangs, server.down = hangs, not hangs
        await asyncio.sleep(20)
        assert pool.down_since is not None
        assert went <= pool.down_since <= went + 11, "a hang is known at the deadline"
        assert pool.facts()["servers_up"] == 0
        assert server.looks <= 12, "health is asked for with growing pauses"
        calls = len(server.at)
        server.hangs = server.down = False
        found = await scoring
        assert Counter(type(one) for one in found) == {int: 200}
        assert max(found) == 1, "only what was in flight was asked again"
        assert calls < len(server.at)
        assert pool.down_since is None
        assert now() - went < 20 + 12 + 200 / 16 + 10
        assert quiet(pool)
        await pool.stop()

    run(main())
    assert "reward/judge: http://one/v1 is out (" in caplog.text
    assert "calls wait until one is back" in caplog.text
    assert "http://one/v1 is back after" in caplog.text


def test_a_server_that_lists_its_model_but_cannot_judge_yet_loses_nothing_either() -> None:
    async def main() -> None:
        loading = Server(0.5)
        pool = await started(pool_of(Network(one=loading), retries=2))
        assert set(await asks(pool, 20)) == {0}
        loading.answer = lambda server, text: httpx.Response(503, text="loading")
        scoring = asyncio.create_task(asks(pool, 100))
        await asyncio.sleep(20)
        assert pool.down_since is not None
        assert len(loading.at) < 60, "one call a trial"
        loading.answer = None
        assert {type(one) for one in await scoring} == {int}
        await pool.stop()

    run(main())


def test_a_server_that_loses_single_calls_is_neither_out_nor_overloaded() -> None:
    async def main() -> None:
        server = Server(0.5)
        pool = await started(
            pool_of(Network(one=server), retries=0, deadline_seconds=5, concurrency=128)
        )
        handle = server.call

        async def loses_some(content: bytes) -> httpx.Response:
            if len(server.at) % 20 == 7:
                server.at.append(now())
                await asyncio.sleep(3600)
            return await handle(content)

        server.call = loses_some  # type: ignore[method-assign]
        for _ in range(10):
            found = Counter(await asks(pool, 128))
            assert set(found) == {0, "timeout"}
            assert 5 <= found["timeout"] <= 8
            assert pool.down_since is None
        assert pool.facts()["limit"] == 128
        await pool.stop()

    run(main())


def test_past_patience_calls_fail_and_nobody_waits_again() -> None:
    async def main() -> None:
        one, two = Server(0.5), Server(0.5)
        pool = await started(pool_of(Network(one=one, two=two), patience_seconds=30))
        one.down = two.down = True
        begun = now()
        assert set(await asks(pool, 50)) == {"unavailable"}
        assert pool.down_since is not None
        assert now() - pool.down_since == pytest.approx(30 + GRACE_SECONDS, abs=0.1)
        assert pool.down_since - begun < 1
        begun = now()
        assert await ask(pool) == "unavailable"
        assert now() - begun < 0.1
        with pytest.raises(CallFailed, match=r"no server answers for 32 s \(http://one/v1: does"):
            await pool.post("/chat/completions", body())
        two.down = False
        await asyncio.sleep(10)
        assert pool.down_since is None, "it heals all the same, with no call that waits"
        assert await ask(pool) == 0
        await pool.stop()

    run(main())


def test_a_text_that_brings_the_server_down_ends_and_the_others_do_not() -> None:
    async def main() -> None:
        def falls(server: Server, text: str) -> httpx.Response | None:
            if text == "text 7":
                server.down = True
                asyncio.get_running_loop().call_later(5, lambda: setattr(server, "down", False))
                raise httpx.ReadError("gone")
            return None

        server = Server(0.5, falls)
        pool = await started(pool_of(Network(one=server), retries=1))
        found = await asks(pool, 40)
        assert found[7] == "unavailable"
        assert server.texts.count("text 7") <= 5
        assert {type(one) for i, one in enumerate(found) if i != 7} == {int}
        await pool.stop()

    run(main())


def test_one_of_two_servers_dies_and_joins_again() -> None:
    async def main() -> None:
        one, two = Server(0.5), Server(0.5)
        pool = await started(pool_of(Network(one=one, two=two), retries=0))
        scoring = asyncio.create_task(asks(pool, 400))
        await asyncio.sleep(2.2)
        one.down, seen = True, len(one.at)
        await asyncio.sleep(5)
        assert pool.down_since is None
        assert pool.facts()["limit"] == 8
        one.down = False
        assert {type(one) for one in await scoring} == {int}
        assert len(one.at) - seen > 30
        assert len(one.at) + len(two.at) <= 400 + 8 + 1
        await pool.stop()

    run(main())


# -- start and stop ------------------------------------------------------------------------------


def test_down_at_start(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        one, two = Server(), Server()
        one.down = two.down = True
        network = Network(one=one, two=two)
        pool = pool_of(network)
        with pytest.raises(UserError) as refused:
            await pool.start()
        words = str(refused.value)
        assert words.startswith("reward.judge.base_url: no server answers: http://one/v1 does not")
        assert "; http://two/v1 does not answer (ConnectError: refused); start one" in words
        two.down = False
        assert await pool.start() == ["judge"]
        assert pool.down_since is None
        assert set(await asks(pool, 20)) == {0}
        assert one.at == []
        one.down = False
        await asyncio.sleep(11)
        assert pool.facts()["servers_up"] == 2
        await asks(pool, 20)
        assert len(one.at) >= 3, "few at first"
        await pool.stop()

    run(main())
    assert (
        "http://one/v1 is out (does not answer (ConnectError: refused)); its calls" in caplog.text
    )


def test_models_are_those_that_all_servers_list() -> None:
    class Lists(Server):
        def __init__(self, *models: dict[str, str]) -> None:
            super().__init__()
            self.listed = models

        async def models(self) -> httpx.Response:
            return httpx.Response(200, json={"data": list(self.listed)})

    async def main() -> None:
        one = Lists({"id": "a", "root": "x", "owned_by": "vllm"}, {"id": "b"})
        two = Lists({"id": "c"}, {"id": "a", "root": "y", "owned_by": "vllm"})
        pool = pool_of(Network(one=one, two=two, silent=Lists()))
        assert await pool.start() == ["a"]
        assert pool.described("a") == {"id": "a", "root": ["x", "y"], "owned_by": "vllm"}
        assert pool.described("b") == {}
        assert pool.addresses == ("http://one/v1", "http://two/v1", "http://silent/v1")
        await pool.stop()

    run(main())


def test_stop_ends_what_waits_and_leaves_no_task() -> None:
    async def main() -> None:
        server = Server(5.0)
        pool = await started(pool_of(Network(one=server)))
        scoring = asyncio.create_task(asks(pool, 20))
        await asyncio.sleep(1)
        server.down = True
        await asyncio.sleep(3)
        assert pool.down_since is not None
        await pool.stop()
        assert set(await scoring) == {"unavailable"}
        assert await ask(pool) == "unavailable"
        assert pool.down_since is None
        assert asyncio.all_tasks() == {asyncio.current_task()}
        server.down = False
        assert await (await started(pool)).post("/chat/completions", body())
        await pool.stop()

    run(main())


def test_cancelled_calls_free_their_seats() -> None:
    async def main() -> None:
        server = Server(10.0)
        pool = await started(pool_of(Network(one=server), concurrency=2, requests_per_minute=600))
        for delay in (0.0, 0.1, 5.0):
            tasks = [asyncio.create_task(ask(pool)) for _ in range(6)]
            await asyncio.sleep(delay)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert quiet(pool)
        assert await asks(pool, 4) == [0] * 4
        server.down = True
        waiting = asyncio.create_task(ask(pool))
        await asyncio.sleep(2)
        waiting.cancel()
        server.down = False
        await asyncio.sleep(10)
        assert pool.down_since is None
        assert quiet(pool)
        await pool.stop()

    run(main())


def test_a_trial_that_is_cancelled_does_not_keep_the_server_out() -> None:
    async def main() -> None:
        server = Server(0.5)
        pool = await started(pool_of(Network(one=server), retries=0))
        server.down = True
        first, second = (asyncio.create_task(ask(pool, text)) for text in ("first", "second"))
        await asyncio.sleep(2)
        server.down, server.seconds = False, 30.0
        for _ in range(300):
            if server.now:
                break
            await asyncio.sleep(0.1)
        assert (server.now, pool.facts()["servers_up"]) == (1, 0)
        tried = first if server.texts[-1] == "first" else second
        server.seconds = 0.5
        tried.cancel()
        assert await (second if tried is first else first) == 1
        assert pool.facts()["servers_up"] == 1
        await pool.stop()

    run(main())


# -- limits --------------------------------------------------------------------------------------


def test_retry_after_closes_one_server_and_the_other_goes_on() -> None:
    async def main() -> None:
        def once(server: Server, text: str) -> httpx.Response | None:
            if len(server.at) == 1:
                return httpx.Response(429, headers={"Retry-After": "30"})
            return None

        limited, other = Server(0.5, once), Server(0.5)
        pool = await started(pool_of(Network(limited=limited, other=other), retries=0))
        first = asyncio.create_task(asks(pool, 16))
        await asyncio.sleep(0.1)
        assert len(limited.at) == 8
        assert set(await first) == {0, 1}
        limited.at = [0.0, 0.0]
        gate = now()
        while now() < gate + 40:
            await ask(pool)
        assert limited.at[2] - gate >= 28
        assert len(limited.at) > 5, "then it is asked again"
        assert pool.facts()["rate_limited"] == 1
        await pool.stop()

    run(main())


def test_two_sources_of_one_server_share_its_closing_and_its_requests_a_minute() -> None:
    async def main() -> None:
        server = Server(0.2)
        network = Network(one=server)
        slow = await started(pool_of(network, name="slow", requests_per_minute=60))
        fast = await started(pool_of(network, name="fast", requests_per_minute=6000))
        begun = now()
        one, two = await asyncio.gather(asks(slow, 100), asks(fast, 100, begin=100))
        assert set(one) | set(two) == {0}
        at = server.at
        assert max(sum(t <= u < t + 60 for u in at) for t in at) <= 60, "of both together"
        assert 180 <= now() - begun <= 220
        early = [text for text in server.texts[:100] if int(text.split()[1]) < 100]
        assert 35 <= len(early) <= 65, "they take turns"
        server.answer = lambda server, text: httpx.Response(429, headers={"Retry-After": "50"})
        limited = asyncio.create_task(ask(slow))
        await asyncio.sleep(5)
        server.answer, closed = None, now() - 5
        await ask(fast)
        assert now() - closed >= 50
        assert await limited == 1
        await slow.stop()
        await fast.stop()

    run(main())


def test_tokens_a_minute_are_corrected_by_usage() -> None:
    async def main() -> None:
        server = Server(0.2)
        pool = await started(pool_of(Network(one=server), tokens_per_minute=1200))
        begun = now()
        assert set(await asks(pool, 300)) == {0}  # 12 tokens each, 18 by the estimate
        assert 150 <= now() - begun <= 225
        at = server.at
        assert max(sum(t <= u < t + 60 for u in at) for t in at) * 12 <= 1200
        await pool.stop()

    run(main())


def test_concurrency_adapts_to_what_a_server_takes() -> None:
    async def main() -> None:
        def busy(server: Server, text: str) -> httpx.Response | None:
            return httpx.Response(429, headers={"Retry-After": "1"}) if server.now > 8 else None

        server = Server(1.0, busy)
        pool = await started(pool_of(Network(one=server), concurrency=64, retries=0))
        assert pool.facts()["limit"] == 64
        begun = now()
        assert {type(one) for one in await asks(pool, 400)} == {int}
        assert pool.facts()["limit"] <= 16
        assert pool.facts()["rate_limited"] < 200
        assert now() - begun <= 150, "50 s are the best there is"
        server.answer = None
        await asks(pool, 800)
        assert pool.facts()["limit"] == 64
        await pool.stop()

    run(main())


def test_a_server_that_is_closed_for_longer_than_patience_fails_calls_by_name() -> None:
    async def main() -> None:
        server = Server(0.5, lambda s, t: httpx.Response(429, headers={"Retry-After": "900"}))
        pool = await started(pool_of(Network(one=server), concurrency=1))
        begun = now()
        assert set(await asks(pool, 5)) == {"rate_limited"}
        assert now() - begun < 1
        assert len(server.at) == 1
        assert pool.down_since is None
        await pool.stop()
        server = Server(0.5, lambda s, t: httpx.Response(429, headers={"Retry-After": "0"}))
        pool = await started(pool_of(Network(another=server), patience_seconds=100))
        assert await ask(pool) == "rate_limited"
        assert 100 <= now() - begun <= 115
        assert len(server.at) <= 25, "a server that says at once is asked less and less often"
        await pool.stop()

    run(main())


# -- what nobody may see -------------------------------------------------------------------------


def test_no_secret_is_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_KEY", "s3cr3t-key")

    async def main() -> None:
        echo = Server(answer=lambda s, t: httpx.Response(500, text="s3cr3t-key of us3r:pa55"))
        network = Network(one=echo)
        pool = pool_of(
            network, base_url="http://us3r:pa55@one/v1", api_key_env="JUDGE_KEY", retries=0,
            patience_seconds=20,
        )  # fmt: skip
        await pool.start()
        words = []
        for _ in range(8):
            with pytest.raises(CallFailed) as failed:
                await pool.post("/chat/completions", body())
            words.append(str(failed.value))
        assert "unavailable: http://one/v1: HTTP 500: *** of us3r:***" in words[0]
        assert "no server answers" in words[-1]
        shown = " ".join([*words, pool.address, caplog.text])
        assert "s3cr3t" not in shown
        assert "pa55" not in shown
        await pool.stop()
        for odd in ("key\nwith a line", "kéy"):
            monkeypatch.setenv("JUDGE_KEY", odd)
            with pytest.raises(UserError, match="JUDGE_KEY holds characters that no key has"):
                await pool.start()

    run(main())


def test_an_address_that_is_none() -> None:
    for url in ("host:8000", "ftp://host/v1", "http://", "http://host:port/v1"):
        with pytest.raises(UserError, match=r"reward\.judge\.base_url = .* is not an http address"):
            pool_of(Network(), base_url=url)
