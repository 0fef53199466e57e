"""A real judge server on loopback for tests: OpenAI-compatible, with scripted faults.

    with JudgeServer(reply="8", script=[Fault(500), Fault(500)]) as server:
        section = RewardSourceSection(kind="genrm", base_url=server.base_url, model="judge")

The first two chat completions fail with 500, all later ones are answered with `8`. `GET /models`
always answers unless the server is down. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

LONGEST_HANG_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What one chat completion meets instead of a plain answer.

    `delay` seconds first. Then `hang` never answers (until the server stops), `reset` breaks the
    connection, `body` is sent as is, else `reply` is the text of an ordinary answer (default: the
    server's), or for a status of 400 and more an error object. Use `Fault()` for no fault.
    """

    status: int = 200
    delay: float = 0.0
    body: bytes | None = None
    reply: str | None = None
    finish_reason: str = "stop"
    headers: Mapping[str, str] = field(default_factory=dict)
    hang: bool = False
    reset: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One chat completion that arrived: when (`time.monotonic()`), its body, its headers."""

    at: float
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def text(self) -> str:
        """The last message's content."""
        content: str = self.body["messages"][-1]["content"]
        return content


class JudgeServer:
    """A judge on a port of its own. `start` and `stop` may alternate; the port stays the same."""

    def __init__(
        self,
        reply: str | Callable[[str], str] = "8",
        script: Iterable[Fault] = (),
        *,
        model: str = "judge",
        delay: float = 0.0,
    ) -> None:
        """`reply` is a text or makes one of the judged text; `script` is used up call by call."""
        self.reply = reply
        self.model = model
        self.delay = delay
        self.calls: list[Call] = []
        self.most_at_once = 0
        self._script = deque(script)
        self._now = 0
        self._lock = threading.Lock()
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def base_url(self) -> str:
        """The address for `base_url`; known once started."""
        return f"http://127.0.0.1:{self._port}/v1"

    def start(self) -> JudgeServer:
        """Opens the port."""
        self._closing = threading.Event()
        server = _Server(("127.0.0.1", self._port), _handler_of(self, self._closing))
        self._port = server.server_address[1]
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        """Closes the port and all that hangs: the server is down."""
        if self._server is None or self._thread is None:
            return
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
        self._server = self._thread = None

    def add(self, *faults: Fault) -> None:
        """Lengthens the script."""
        with self._lock:
            self._script.extend(faults)

    def __enter__(self) -> JudgeServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _arrived(self, call: Call) -> Fault:
        with self._lock:
            self.calls.append(call)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            return self._script.popleft() if self._script else Fault()

    def _left(self) -> None:
        with self._lock:
            self._now -= 1

    def _answer(self, fault: Fault, text: str) -> bytes:
        if fault.body is not None:
            return fault.body
        if fault.status >= 400:
            return json.dumps({"error": {"message": f"scripted {fault.status}"}}).encode()
        reply = fault.reply
        if reply is None:
            reply = self.reply if isinstance(self.reply, str) else self.reply(text)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": reply},
            "finish_reason": fault.finish_reason,
        }
        return json.dumps(
            {"object": "chat.completion", "model": self.model, "choices": [choice]}
        ).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is not worth a traceback."""


def _handler_of(judge: JudgeServer, closing: threading.Event) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

        def do_GET(self) -> None:
            models = {"object": "list", "data": [{"id": judge.model, "object": "model"}]}
            known = self.path.endswith("/models")
            self._send(200 if known else 404, json.dumps(models if known else {}).encode(), {})

        def do_POST(self) -> None:
            size = int(self.headers.get("content-length", "0"))
            body = json.loads(self.rfile.read(size))
            if not self.path.endswith("/chat/completions"):
                self._send(404, b"{}", {})
                return
            call = Call(time.monotonic(), body, dict(self.headers.items()))
            fault = judge._arrived(call)
            try:
                self._meet(fault, call)
            finally:
                judge._left()

        def _meet(self, fault: Fault, call: Call) -> None:
            closing.wait(fault.delay + judge.delay)
            if fault.hang:
                closing.wait(LONGEST_HANG_SECONDS)
            if fault.reset or fault.hang or closing.is_set():
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.close_connection = True
                return
            self._send(fault.status, judge._answer(fault, call.text), fault.headers)

        def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            if closing.is_set():
                self.close_connection = True
                return
            with contextlib.suppress(OSError):
                self.send_response(status)
                for key, value in {"Content-Type": "application/json", **headers}.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

    return Handler
