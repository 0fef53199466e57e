"""Calls to one server: connections are kept, dropped when dead, never mixed up."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from offbeat.reward import connections
from offbeat.reward.connections import Answer, Connections, OverTransport, carrier_to, proxy_to
from offbeat.testing.judge_server import Fault, JudgeServer

HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer key"}
MOST = 1_000_000
Body = Callable[[Connections], Awaitable[Any]]


def connected(url: str, body: Body) -> Any:
    async def main() -> Any:
        carrier = Connections(httpx.URL(url), ssl.create_default_context())
        try:
            async with asyncio.timeout(60):
                return await body(carrier)
        finally:
            await carrier.aclose()

    return asyncio.run(main())


def there(server: JudgeServer) -> int:
    """Connections that the server has."""
    return len(server._open)


async def ask(carrier: Connections, text: str = "2+2?", most: int = MOST) -> Answer:
    body = json.dumps({"model": "judge", "messages": [{"role": "user", "content": text}]})
    return await carrier.exchange("POST", "/v1/chat/completions", HEADERS, body.encode(), most)


def said(answer: Answer) -> str:
    text: str = json.loads(answer.body)["choices"][0]["message"]["content"]
    return text


def test_calls_one_after_another_share_a_connection_and_together_have_one_each() -> None:
    async def body(carrier: Connections) -> None:
        for _ in range(3):
            assert said(await ask(carrier)) == "8"
        assert there(server) == 1
        server.delay = 0.2
        answers = await asyncio.gather(*(ask(carrier) for _ in range(40)))
        assert [said(answer) for answer in answers] == ["8"] * 40
        assert there(server) == 40
        models = await carrier.exchange("GET", "/v1/models", HEADERS, b"", MOST)
        assert json.loads(models.body)["data"][0]["id"] == "judge"
        assert (models.status, models.headers["content-type"]) == (200, "application/json")
        assert there(server) == 40

    with JudgeServer() as server:
        connected(server.base_url, body)
        assert server.calls[0].headers["Authorization"] == "Bearer key"
        assert server.calls[0].headers["Host"] in server.base_url


def test_answers_never_go_to_another_call() -> None:
    """Calls given up half-way leave nothing on a connection that another call then reads."""

    async def body(carrier: Connections) -> None:
        async def one(number: int) -> None:
            try:
                async with asyncio.timeout(0.05 if number % 3 else 30):
                    answer = await ask(carrier, str(number))
            except TimeoutError:
                return
            assert said(answer) == f"re {number}"

        async with asyncio.TaskGroup() as tasks:
            for number in range(200):
                tasks.create_task(one(number))
                await asyncio.sleep(0.002)

    def reply(text: str) -> str:
        return f"re {text}"

    with JudgeServer(reply, delay=0.045) as server:
        connected(server.base_url, body)
        assert server.arrived_calls == 200


def test_a_server_that_came_back_is_asked_on_a_new_connection() -> None:
    """An idle connection that the server has closed fails nobody's call."""

    async def body(carrier: Connections) -> None:
        await asyncio.gather(*(ask(carrier) for _ in range(8)))
        await asyncio.to_thread(server.stop)
        with pytest.raises(httpx.ConnectError):
            await ask(carrier)
        await asyncio.to_thread(server.start)
        for _ in range(8):
            assert said(await ask(carrier)) == "8"

    with JudgeServer(delay=0.05) as server:
        connected(server.base_url, body)


def test_a_call_is_sent_once_also_on_a_used_connection_that_breaks() -> None:
    """Who asks decides whether to ask again."""

    async def body(carrier: Connections) -> None:
        assert said(await ask(carrier)) == "8"
        server.add(Fault(reset=True))
        with pytest.raises(httpx.TransportError):
            await ask(carrier)
        assert server.arrived_calls == 2
        assert said(await ask(carrier)) == "8"

    with JudgeServer() as server:
        connected(server.base_url, body)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(reset=True), httpx.ReadError),
        (Fault(cut=True), httpx.RemoteProtocolError),
        (Fault(headers={"Transfer-Encoding": "nonsense"}), httpx.RemoteProtocolError),
        (Fault(headers={"Content-Encoding": "gzip"}), httpx.DecodingError),
    ],
)
def test_what_breaks_is_an_error_of_httpx(fault: Fault, error: type[Exception]) -> None:
    async def body(carrier: Connections) -> None:
        with pytest.raises(error):
            await ask(carrier)
        assert said(await ask(carrier)) == "8"
        assert there(server) == 1

    with JudgeServer(script=[fault]) as server:
        connected(server.base_url, body)


def test_a_packed_answer_that_nobody_asked_for_is_unpacked() -> None:
    packed = Fault(body=gzip.compress(b'{"a": 1}'), headers={"Content-Encoding": "gzip"})

    async def body(carrier: Connections) -> None:
        assert (await ask(carrier)).body == b'{"a": 1}'

    with JudgeServer(script=[packed]) as server:
        connected(server.base_url, body)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://host.invalid", "https://[::1]:1"])
def test_nobody_there_and_no_such_host(url: str) -> None:
    async def body(carrier: Connections) -> None:
        with pytest.raises(httpx.ConnectError):
            await ask(carrier)

    connected(url, body)


def test_what_speaks_no_tls_is_an_error_of_httpx() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            url = httpx.URL(f"https://127.0.0.1:{port}")
            with pytest.raises(httpx.ConnectError):
                await ask(Connections(url, ssl.create_default_context()))

    asyncio.run(main())


def test_a_header_that_cannot_be_sent_is_an_error_of_httpx_and_costs_no_connection() -> None:
    async def body(carrier: Connections) -> None:
        with pytest.raises(httpx.LocalProtocolError):
            await carrier.exchange("GET", "/v1/models", {"X": "a\nb"}, b"", MOST)
        assert there(server) == 0

    with JudgeServer() as server:
        connected(server.base_url, body)


def test_a_body_that_is_too_long_is_not_read_to_its_end() -> None:
    async def body(carrier: Connections) -> None:
        answer = await ask(carrier, most=1000)
        assert 1000 < len(answer.body) < 2_000_000
        assert not carrier._open
        assert said(await ask(carrier)) == "8"

    with JudgeServer(script=[Fault(size=30_000_000)]) as server:
        connected(server.base_url, body)


def test_idle_connections_go_when_others_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.2)

    async def body(carrier: Connections) -> None:
        await asyncio.gather(*(ask(carrier) for _ in range(20)))
        assert len(carrier._open) == 20
        server.delay = 0.0
        await asyncio.sleep(0.3)
        await ask(carrier)
        assert len(carrier._open) == 1

    with JudgeServer(delay=0.2) as server:
        connected(server.base_url, body)


def test_a_proxy_of_the_environment_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    assert proxy_to(httpx.URL("https://judge.example/v1")) is None
    monkeypatch.setenv("https_proxy", "proxy:3128")
    monkeypatch.setenv("no_proxy", "localhost,inside.example")
    assert proxy_to(httpx.URL("https://judge.example/v1")) == "http://proxy:3128"
    assert proxy_to(httpx.URL("http://judge.example/v1")) is None
    assert proxy_to(httpx.URL("https://judge.inside.example/v1")) is None


def test_calls_go_through_a_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        writer.close()

    async def main() -> Answer:
        async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            monkeypatch.setenv("http_proxy", f"127.0.0.1:{port}")
            monkeypatch.setenv("no_proxy", "")
            tls = ssl.create_default_context()
            carrier = carrier_to(httpx.URL("http://judge.example"), tls)
            try:
                return await carrier.exchange("GET", "/v1/models", HEADERS, b"", MOST)
            finally:
                await carrier.aclose()

    assert asyncio.run(main()).body == b"hi"
    assert asked == [b"GET http://judge.example/v1/models HTTP/1.1"]


def test_a_transport_of_httpx_is_asked_the_same() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer key"
        assert (request.method, request.content) == ("POST", b"{}")
        return httpx.Response(200, text=str(request.url), headers={"X": "y"})

    async def main() -> Answer:
        carrier = OverTransport(httpx.URL("http://judge:8000"), httpx.MockTransport(answer))
        return await carrier.exchange("POST", "/v1/chat", HEADERS, b"{}", MOST)

    found = asyncio.run(main())
    assert (found.status, found.headers["x"]) == (200, "y")
    assert found.body == b"http://judge:8000/v1/chat"
