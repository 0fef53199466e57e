"""HTTP/1.1 connections to judges, as a transport of httpx: a call costs the same however many are
open.

httpx's own transport looks at all its connections for each request and each answer, which at a
thousand of them takes more than ten milliseconds of the event loop a call. This one keeps those
that are idle on a stack. Messages are h11's, requests and responses httpx's.

It has no time limits of its own: whoever asks sets a deadline around the call, and a call that is
given up closes its connection. It tries nothing twice.
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import h11
import httpx

from offbeat.reward.turnstile import Turnstile

CHUNK = 65536
ANSWERS_A_TURN = 16
"""Read in one turn of the event loop: what follows of an answer is done in the same turn."""
IDLE_SECONDS = 4.0
"""Many servers close what is idle for five."""

Origin = tuple[str, str, int]


def transport_to(url: httpx.URL, tls: ssl.SSLContext) -> httpx.AsyncBaseTransport:
    """What carries calls to this address; through a proxy where the environment names one."""
    proxy = proxy_to(url)
    if proxy is None:
        return Connections(tls)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncHTTPTransport(verify=tls, proxy=proxy, limits=limits)


def proxy_to(url: httpx.URL) -> str | None:
    """The proxy that the environment has for this address: HTTPS_PROXY, NO_PROXY and the like."""
    proxies = urllib.request.getproxies()
    named = proxies.get(url.scheme) or proxies.get("all")
    if not named or urllib.request.proxy_bypass(url.host):
        return None
    return named if "://" in named else f"http://{named}"


class Connections(httpx.AsyncBaseTransport):
    """A transport of any number of connections; one loop's."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        """`tls` is for https addresses. Opens nothing."""
        self._tls = tls
        self._idle: dict[Origin, deque[_Connection]] = {}  # the last used one on the right
        self._open: set[_Connection] = set()
        self._answers = Turnstile(ANSWERS_A_TURN)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer's head; its body streams. Raises `httpx.TransportError`."""
        url = request.url
        port = url.port or (443 if url.scheme == "https" else 80)
        origin = (url.scheme, url.host, port)
        content = await request.aread()
        connection = self._take(origin) or await self._connect(origin)
        try:
            head = await connection.ask(request, content)
        except BaseException:
            self._close(connection)
            raise
        return httpx.Response(
            head.status_code,
            headers=head.headers.raw_items(),
            stream=_Body(self, connection, origin),
            extensions={"http_version": b"HTTP/1.1", "reason_phrase": bytes(head.reason)},
        )

    async def aclose(self) -> None:
        """Closes all connections, also those under way."""
        for connection in list(self._open):
            self._close(connection)
        self._idle.clear()

    async def _connect(self, origin: Origin) -> _Connection:
        scheme, host, port = origin
        # Addresses of IPv6 and IPv4 are tried side by side, where the loop can: Ray's cannot.
        delay = 0.25 if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop) else None
        more: dict[str, Any] = {} if delay is None else {"happy_eyeballs_delay": delay}
        try:
            reader, writer = await asyncio.open_connection(
                host, port, ssl=self._tls if scheme == "https" else None, **more
            )
        except (OSError, ssl.CertificateError) as error:
            raise httpx.ConnectError(str(error) or repr(error)) from error
        connection = _Connection(reader, writer, self._answers)
        self._open.add(connection)
        return connection

    def _take(self, origin: Origin) -> _Connection | None:
        """The connection that was used last, if one is idle and open on both sides."""
        idle = self._idle.get(origin, ())
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
            self._close(connection)
        return None

    def released(self, connection: _Connection, origin: Origin) -> None:
        """A call has ended: its connection is idle, or closed. For `_Body`."""
        if connection not in self._open or not connection.next():
            self._close(connection)
            return
        now = connection.idle_since = asyncio.get_running_loop().time()
        idle = self._idle.setdefault(origin, deque())
        idle.append(connection)
        while idle and now - idle[0].idle_since > IDLE_SECONDS:
            self._close(idle.popleft())

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

    async def ask(self, request: httpx.Request, content: bytes) -> h11.Response:
        """Sends a request; the head of its answer."""
        wire = self._wire
        parts = (
            h11.Request(
                method=request.method, target=request.url.raw_path, headers=request.headers.raw
            ),
            h11.Data(data=content),
            h11.EndOfMessage(),
        )
        try:
            self._writer.write(b"".join(wire.send(part) or b"" for part in parts))
            await self._writer.drain()
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from error
        except OSError as error:
            raise httpx.WriteError(str(error) or repr(error)) from error
        while True:
            event = await self.event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise httpx.RemoteProtocolError("the server closed the connection, unanswered")

    async def event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
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
        """Ready for another request? Not where either side ended the connection."""
        if self._wire.our_state is not h11.DONE or self._wire.their_state is not h11.DONE:
            return False
        self._wire.start_next_cycle()
        return True

    def abort(self) -> None:
        """Closes it at once."""
        self._writer.transport.abort()


class _Body(httpx.AsyncByteStream):
    """The rest of an answer."""

    def __init__(self, owner: Connections, connection: _Connection, origin: Origin) -> None:
        self._owner, self._connection, self._origin = owner, connection, origin
        self._released = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Its bytes as they come. Raises `httpx.TransportError`."""
        while True:
            event = await self._connection.event()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            else:
                return

    async def aclose(self) -> None:
        """Gives the connection back; one that was not read to its end is closed."""
        if not self._released:
            self._released = True
            self._owner.released(self._connection, self._origin)
