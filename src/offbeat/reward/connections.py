"""HTTP/1.1 to one judges' server: a call costs the same however many are under way.

httpx's own transport looks at all its connections for each request and each answer, which at a
thousand of them takes more than ten milliseconds of the event loop a call, and half a millisecond
where it has only one. Here a call takes a connection from a stack, messages are h11's, and errors
httpx's. What goes through a proxy, or over a transport that is given, is httpx's altogether.

There are no time limits here: whoever asks sets a deadline around the call, and a call that is
given up closes its connection. Nothing is tried twice.
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import h11
import httpx

from offbeat.reward.turnstile import Turnstile

CHUNK = 65536
ANSWERS_A_TURN = 16
"""Read in one turn of the event loop: what follows of an answer is done in the same turn."""
IDLE_SECONDS = 4.0
"""Many servers close what is idle for five."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: status, headers by lower-case name, and the body, as far as it was read."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Carrier(Protocol):
    """Whoever carries calls to one server."""

    async def exchange(
        self, method: str, path: str, headers: Mapping[str, str], content: bytes, most: int
    ) -> Answer:
        """Sends a request for a path and reads the answer, its body not on once it is longer than
        `most` bytes. Raises `httpx.TransportError` or `httpx.DecodingError`."""
        ...

    async def aclose(self) -> None:
        """Closes all connections, also those under way."""
        ...


def carrier_to(url: httpx.URL, tls: ssl.SSLContext) -> Carrier:
    """What carries calls to this address; through a proxy where the environment names one."""
    proxy = proxy_to(url)
    if proxy is None:
        return Connections(url, tls)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return OverTransport(url, httpx.AsyncHTTPTransport(verify=tls, proxy=proxy, limits=limits))


def proxy_to(url: httpx.URL) -> str | None:
    """The proxy that the environment has for this address: HTTPS_PROXY, NO_PROXY and the like."""
    proxies = urllib.request.getproxies()
    named = proxies.get(url.scheme) or proxies.get("all")
    if not named or urllib.request.proxy_bypass(url.host):
        return None
    return named if "://" in named else f"http://{named}"


class OverTransport:
    """Calls over a transport of httpx."""

    def __init__(self, url: httpx.URL, transport: httpx.AsyncBaseTransport) -> None:
        self._url, self._transport = url, transport

    async def exchange(
        self, method: str, path: str, headers: Mapping[str, str], content: bytes, most: int
    ) -> Answer:
        """See `Carrier`."""
        url = self._url.copy_with(raw_path=path.encode())
        request = httpx.Request(method, url, headers=dict(headers), content=content)
        response = await self._transport.handle_async_request(request)
        try:
            body = b""
            async for part in response.aiter_bytes():
                body += part
                if len(body) > most:
                    break
            return Answer(response.status_code, response.headers, body)
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        """See `Carrier`."""
        await self._transport.aclose()


class Connections:
    """Any number of connections to one server; of one event loop."""

    def __init__(self, url: httpx.URL, tls: ssl.SSLContext) -> None:
        """`tls` is for an https address. Opens nothing."""
        self._tls = tls if url.scheme == "https" else None
        self._host, self._port = url.host, url.port or (443 if url.scheme == "https" else 80)
        self._site = url.netloc
        self._idle: deque[_Connection] = deque()  # the last used one on the right
        self._open: set[_Connection] = set()
        self._answers = Turnstile(ANSWERS_A_TURN)

    async def exchange(
        self, method: str, path: str, headers: Mapping[str, str], content: bytes, most: int
    ) -> Answer:
        """See `Carrier`."""
        fields = [(b"Host", self._site), *((n.encode(), v.encode()) for n, v in headers.items())]
        if content or method == "POST":
            fields.append((b"Content-Length", b"%d" % len(content)))
        try:
            head = h11.Request(method=method, target=path.encode(), headers=fields)
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from error
        connection = self._take() or await self._connect()
        try:
            answer = await connection.exchange(head, content, most)
        except BaseException:
            self._close(connection)
            raise
        self._release(connection)
        return _decoded(answer)

    async def aclose(self) -> None:
        """See `Carrier`."""
        for connection in list(self._open):
            self._close(connection)
        self._idle.clear()

    async def _connect(self) -> _Connection:
        # Addresses of IPv6 and IPv4 are tried side by side, where the loop can: Ray's cannot.
        delay = 0.25 if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop) else None
        more: dict[str, Any] = {} if delay is None else {"happy_eyeballs_delay": delay}
        try:
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls, **more
            )
        except (OSError, ssl.CertificateError) as error:
            raise httpx.ConnectError(str(error) or repr(error)) from error
        connection = _Connection(reader, writer, self._answers)
        self._open.add(connection)
        return connection

    def _take(self) -> _Connection | None:
        """The connection that was used last, if one is idle and open on both sides."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            self._close(connection)
        return None

    def _release(self, connection: _Connection) -> None:
        """A call has ended: its connection is idle, or closed."""
        if connection not in self._open or not connection.next():
            self._close(connection)
            return
        now = connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        while now - self._idle[0].idle_since > IDLE_SECONDS:
            self._close(self._idle.popleft())

    def _close(self, connection: _Connection) -> None:
        self._open.discard(connection)
        connection.abort()


class _Connection:
    """One connection: a request, its answer, and the next."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: Turnstile
    ) -> None:
        self._reader, self._writer, self._answers = reader, writer, answers
        self._wire = h11.Connection(h11.CLIENT)
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the server holds its side open, as far as is known."""
        ended = self._reader.at_eof() or self._reader.exception() is not None
        return not ended and not self._writer.is_closing()

    async def exchange(self, head: h11.Request, content: bytes, most: int) -> Answer:
        """See `Carrier`."""
        send = self._wire.send
        whole = [send(head), send(h11.Data(data=content)), send(h11.EndOfMessage())]
        try:
            self._writer.write(b"".join(part or b"" for part in whole))
            await self._writer.drain()
        except OSError as error:
            raise httpx.WriteError(str(error) or repr(error)) from error
        event = await self._event()
        while isinstance(event, h11.InformationalResponse):
            event = await self._event()
        if not isinstance(event, h11.Response):
            raise httpx.RemoteProtocolError("the server closed the connection, unanswered")
        headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
        status, parts, size = event.status_code, [], 0
        while size <= most and isinstance(event := await self._event(), h11.Data):
            parts.append(bytes(event.data))
            size += len(event.data)
        return Answer(status, headers, parts[0] if len(parts) == 1 else b"".join(parts))

    async def _event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next part of the answer."""
        try:
            while (event := self._wire.next_event()) is h11.NEED_DATA:
                data = await self._reader.read(CHUNK)
                await self._answers.passed()
                self._wire.receive_data(data)
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        except OSError as error:
            raise httpx.ReadError(str(error) or repr(error)) from error
        return event

    def next(self) -> bool:
        """Ready for another request? Not where either side ended the connection, nor with an
        answer that was not read to its end."""
        if self._wire.our_state is not h11.DONE or self._wire.their_state is not h11.DONE:
            return False
        self._wire.start_next_cycle()
        return True

    def abort(self) -> None:
        """Closes it at once."""
        self._writer.transport.abort()


def _decoded(answer: Answer) -> Answer:
    """With its body unpacked, where the server packed it although nobody asked for that."""
    if answer.headers.get("content-encoding", "identity") == "identity":
        return answer
    packed = httpx.Response(answer.status, headers=dict(answer.headers), content=answer.body)
    return Answer(answer.status, answer.headers, packed.content)
