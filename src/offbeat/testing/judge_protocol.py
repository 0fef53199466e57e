"""HTTP/1.1 for the fake judge: one connection, without a task or a thread of its own.

Requests of one connection are answered one after another. An idle connection costs a few
kilobytes, a waiting one a timer.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from offbeat.testing.judge_faults import Fault

CHUNK = 65536
MOST_HEAD_BYTES = 65536


class Judge(Protocol):
    """What a connection asks of the server that it belongs to."""

    def arrived(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[float, Fault]:
        """A chat completion came: after how many seconds it meets which fault."""
        ...

    def left(self) -> None:
        """It was answered, or nobody waits for it any longer."""
        ...

    def answer(self, fault: Fault, body: dict[str, Any]) -> bytes:
        """The body of the answer."""
        ...

    def looked_up(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        ...

    def known(self, connection: Connection, *, open: bool) -> None:
        """A connection came, or went."""
        ...


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, judge: Judge) -> None:
        """It belongs to `judge`."""
        self._judge = judge
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = False  # a chat completion is under way
        self._sending: Iterator[bytes] | None = None
        self._pause = 0.0
        self._full = False  # the client does not take what was sent
        self._last = False  # the connection ends after this answer

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Opened."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._judge.known(self, open=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed, by either side."""
        self._transport, self._sending = None, None
        self._judge.known(self, open=False)
        self._answered()

    def data_received(self, data: bytes) -> None:
        """More of a request."""
        self._buffer += data
        self._next()

    def pause_writing(self) -> None:
        """The client is slow."""
        self._full = True

    def resume_writing(self) -> None:
        """It goes on."""
        self._full = False
        if self._timer is None:
            self._send_more()

    # -- requests --------------------------------------------------------------------------------

    def _next(self) -> None:
        """Takes the next whole request, if nothing is being answered."""
        if self._waiting or self._sending is not None or self._transport is None:
            return
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MOST_HEAD_BYTES:
                self.reset()
            return
        first, *rest = self._buffer[:end].decode("latin-1").split("\r\n")
        headers = {
            name.strip(): value.strip() for name, _, value in (r.partition(":") for r in rest)
        }
        lower = {name.lower(): value for name, value in headers.items()}
        if lower.get("expect", "").lower() == "100-continue" and len(self._buffer) == end + 4:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            size = int(lower.get("content-length", "0"))
            method, path, _ = first.split(" ", 2)
        except ValueError:
            self.reset()
            return
        if "chunked" in lower.get("transfer-encoding", ""):
            self._last = True
            self._send(411, b"{}", {})
            return
        if len(self._buffer) < end + 4 + size:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + size])
        del self._buffer[: end + 4 + size]
        self._last = lower.get("connection", "").lower() == "close"
        self._take(method, path.partition("?")[0], headers, body)

    def _take(self, method: str, path: str, headers: dict[str, str], raw: bytes) -> None:
        if method != "POST":
            status, said = self._judge.looked_up(path)
            self._send(status, json.dumps(said).encode(), {})
            return
        if not path.endswith("/chat/completions"):
            self._send(404, b"{}", {})
            return
        try:
            body = json.loads(raw)
            whole = isinstance(body["messages"], list) and bool(body["messages"])
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            self._send(400, b'{"error": {"message": "messages are missing"}}', {})
            return
        seconds, fault = self._judge.arrived(body, headers)
        self._waiting = True
        if seconds > 0:
            self._timer = self._loop.call_later(seconds, self._meet, fault, body)
        else:
            self._meet(fault, body)

    # -- answers ---------------------------------------------------------------------------------

    def _meet(self, fault: Fault, body: dict[str, Any]) -> None:
        self._timer = None
        if self._transport is None or fault.hang:
            return
        if fault.reset:
            self.reset()
            return
        try:
            status, answer = fault.status, self._judge.answer(fault, body)
        except Exception as error:  # boundary: the reply function is the user's
            told = {"error": {"message": f"reply: {type(error).__name__}: {error}"}}
            status, answer = 500, json.dumps(told).encode()
        headers = {"Content-Type": fault.content_type, **fault.headers}
        self._send(status, answer.ljust(fault.size), headers, drip=fault.drip, cut=fault.cut)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        *,
        drip: float = 0.0,
        cut: bool = False,
    ) -> None:
        if self._transport is None:
            return
        lines = {"Content-Type": "application/json", **headers, "Content-Length": str(len(body))}
        head = f"HTTP/1.1 {status} Scripted\r\n" + "".join(
            f"{k}: {v}\r\n" for k, v in lines.items()
        )
        if cut:
            body, self._last = body[: len(body) // 2], True
        step, self._pause = (1, drip) if drip else (CHUNK, 0.0)
        whole = head.encode("latin-1") + b"\r\n"
        if not drip and len(body) <= CHUNK:  # nearly always: one write
            self._transport.write(whole + body)
            self._sent()
            return
        self._transport.write(whole)
        self._sending = (body[at : at + step] for at in range(0, len(body), step))
        self._send_more()

    def _send_more(self) -> None:
        self._timer = None
        while self._sending is not None and self._transport is not None and not self._full:
            part = next(self._sending, None)
            if part is None:
                self._sending = None
                self._sent()
                return
            self._transport.write(part)
            if self._pause:
                self._timer = self._loop.call_later(self._pause, self._send_more)
                return

    def _sent(self) -> None:
        self._answered()
        if self._last and self._transport is not None:
            self._transport.close()
        elif self._buffer:
            self._loop.call_soon(self._next)

    def _answered(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._waiting = False
            self._judge.left()

    def reset(self) -> None:
        """Breaks the connection, so that the client sees a reset."""
        if self._transport is None:
            return
        own = self._transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
