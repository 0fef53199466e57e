"""The transport under httpx's client: connections are kept, dropped when dead, never shared."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from offbeat.reward import connections
from offbeat.reward.connections import Connections, proxy_to, transport_to
from offbeat.testing.judge_server import Fault, JudgeServer

BODY = {"model": "judge", "messages": [{"role": "user", "content": "2+2?"}]}
Body = Callable[[httpx.AsyncClient, Connections], Awaitable[Any]]


def with_client(body: Body) -> Any:
    async def main() -> Any:
        transport = Connections(ssl.create_default_context())
        async with asyncio.timeout(60), httpx.AsyncClient(transport=transport) as client:
            return await body(client, transport)

    return asyncio.run(main())


def ports(server: JudgeServer) -> int:
    """Connections that the server has."""
    return len(server._open)


async def ask(client: httpx.AsyncClient, server: JudgeServer, **more: Any) -> httpx.Response:
    return await client.post(f"{server.base_url}/chat/completions", json=BODY | more)


def said(response: httpx.Response) -> str:
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def test_calls_one_after_another_share_a_connection_and_together_have_one_each() -> None:
    async def body(client: httpx.AsyncClient, _: Connections) -> None:
        for _ in range(3):
            assert said(await ask(client, server)) == "8"
        assert ports(server) == 1
        server.delay = 0.2
        answers = await asyncio.gather(*(ask(client, server) for _ in range(40)))
        assert [said(answer) for answer in answers] == ["8"] * 40
        assert ports(server) == 40
        server.delay = 0.0
        models = await client.get(f"{server.base_url}/models")
        assert models.json()["data"][0]["id"] == "judge"
        assert ports(server) == 40

    with JudgeServer() as server:
        with_client(body)


def test_answers_never_go_to_another_call() -> None:
    """Calls given up half-way leave nothing on a connection that another call then reads."""

    async def body(client: httpx.AsyncClient, _: Connections) -> None:
        async def one(number: int) -> None:
            content = str(number)
            message = {"messages": [{"role": "user", "content": content}]}
            try:
                async with asyncio.timeout(0.05 if number % 3 else 30):
                    answer = await ask(client, server, **message)
            except TimeoutError:
                return
            assert said(answer) == f"re {content}"

        async with asyncio.TaskGroup() as tasks:
            for number in range(200):
                tasks.create_task(one(number))
                await asyncio.sleep(0.002)

    def reply(text: str) -> str:
        return f"re {text}"

    with JudgeServer(reply, delay=0.045) as server:
        with_client(body)
        assert server.arrived_calls == 200


def test_a_server_that_came_back_is_asked_on_a_new_connection() -> None:
    """An idle connection that the server has closed fails nobody's call."""

    async def body(client: httpx.AsyncClient, _: Connections) -> None:
        await asyncio.gather(*(ask(client, server) for _ in range(8)))
        await asyncio.to_thread(server.stop)
        with pytest.raises(httpx.ConnectError):
            await ask(client, server)
        await asyncio.to_thread(server.start)
        for _ in range(8):
            assert said(await ask(client, server)) == "8"

    with JudgeServer(delay=0.05) as server:
        with_client(body)


def test_a_call_is_sent_once_also_on_a_used_connection_that_breaks() -> None:
    """Who asks decides whether to ask again."""

    async def body(client: httpx.AsyncClient, _: Connections) -> None:
        assert said(await ask(client, server)) == "8"
        server.add(Fault(reset=True))
        with pytest.raises(httpx.TransportError):
            await ask(client, server)
        assert server.arrived_calls == 2
        assert said(await ask(client, server)) == "8"

    with JudgeServer() as server:
        with_client(body)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(reset=True), httpx.ReadError),
        (Fault(cut=True), httpx.RemoteProtocolError),
        (Fault(headers={"Transfer-Encoding": "nonsense"}), httpx.RemoteProtocolError),
    ],
)
def test_what_breaks_is_an_error_of_httpx(fault: Fault, error: type[Exception]) -> None:
    async def body(client: httpx.AsyncClient, transport: Connections) -> None:
        with pytest.raises(error):
            await ask(client, server)
        assert not transport._open
        assert said(await ask(client, server)) == "8"

    with JudgeServer(script=[fault]) as server:
        with_client(body)


def test_nobody_there_and_no_such_host() -> None:
    async def body(client: httpx.AsyncClient, _: Connections) -> None:
        for url in ("http://127.0.0.1:1/v1", "http://host.invalid/v1", "https://127.0.0.1:1/v1"):
            with pytest.raises(httpx.ConnectError):
                await client.get(url)

    with_client(body)


def test_what_speaks_no_tls_is_an_error_of_httpx() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def body(client: httpx.AsyncClient, _: Connections) -> None:
        async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(httpx.ConnectError):
                await client.get(f"https://127.0.0.1:{port}/v1/models")

    with_client(body)


def test_a_body_that_is_not_read_to_its_end_closes_its_connection() -> None:
    async def body(client: httpx.AsyncClient, transport: Connections) -> None:
        request = client.build_request("POST", f"{server.base_url}/chat/completions", json=BODY)
        response = await client.send(request, stream=True)
        async for _ in response.aiter_bytes():
            break
        await response.aclose()
        assert not transport._open
        assert said(await ask(client, server)) == "8"

    with JudgeServer(script=[Fault(size=3_000_000)]) as server:
        with_client(body)


def test_idle_connections_go_when_others_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.2)

    async def body(client: httpx.AsyncClient, transport: Connections) -> None:
        await asyncio.gather(*(ask(client, server) for _ in range(20)))
        assert len(transport._open) == 20
        server.delay = 0.0
        await asyncio.sleep(0.3)
        await ask(client, server)
        assert len(transport._open) == 1

    with JudgeServer(delay=0.2) as server:
        with_client(body)


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

    async def main() -> bytes:
        async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            monkeypatch.setenv("http_proxy", f"127.0.0.1:{port}")
            monkeypatch.setenv("no_proxy", "")
            url = httpx.URL("http://judge.example/v1/models")
            async with transport_to(url, ssl.create_default_context()) as transport:
                response = await transport.handle_async_request(httpx.Request("GET", url))
                return await response.aread()

    assert asyncio.run(main()) == b"hi"
    assert asked == [b"GET http://judge.example/v1/models HTTP/1.1"]
