"""A real judge server on loopback for tests: OpenAI-compatible, with scripted faults.

    with JudgeServer(reply="8", script=[Fault(500), Fault(500)]) as server:
        section = RewardSourceSection(kind="genrm", base_url=server.base_url, model="judge")

The first two chat completions fail with 500, all later ones are answered with `8`. `GET /models`
always answers unless the server is down. Standard library only; one event loop on a thread of its
own holds thousands of connections.

What it says: `reply` is a text or a function of the judged text. `distribution` (a mapping, or a
function of the judged text that returns one) gives several texts with their probabilities:
at temperature 0 the likeliest is said, else one is drawn by the request's `seed`; `logprobs` and
`top_logprobs` are answered from it. `n` choices and `usage` are as OpenAI's.

When it says it: after `delay` seconds plus a draw of `latency`, e.g. `LogNormal(median=1.0)`.

What goes wrong: each call takes the next `Fault` of `script`; then every `fail_every`-th meets
`failing`; then `mix` draws, e.g. `Mix(seed=1, garbage=0.2, hang=0.05, status_500=0.1)`.
`stop()` takes the server down, `start()` brings it back on the same port.

A server in a process of its own shares no interpreter lock with what is measured, and can be
killed:

    with judge_process("--reply", "8", "--latency", "1.0", "0.5") as judge:
        section = RewardSourceSection(kind="genrm", base_url=judge.base_url, model="judge")

From a shell: `python -m offbeat.testing.judge_server --port 8000 --reply 8 --mix '{"hang": 0.1}'`,
and `--help` for the rest. `GET /stats` counts the calls that came.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from offbeat.testing.judge_answers import completion
from offbeat.testing.judge_faults import Fault, LogNormal, Mix, read_script
from offbeat.testing.judge_process import JudgeProcess, judge_process
from offbeat.testing.judge_protocol import Connection

__all__ = [
    "Call",
    "Fault",
    "JudgeProcess",
    "JudgeServer",
    "LogNormal",
    "Mix",
    "judge_process",
    "read_script",
]

BACKLOG = 4096

Reply = str | Callable[[str], str]
Distribution = Mapping[str, float] | Callable[[str], Mapping[str, float]]


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
    """A judge on a port of its own. `start` and `stop` may alternate; the port stays the same.

    `calls` has every chat completion since the first start (with `keep_calls`), `arrived` counts
    them, and `most_at_once` is how many were under way together at most.
    """

    def __init__(
        self,
        reply: Reply = "8",
        script: Iterable[Fault] = (),
        *,
        model: str = "judge",
        delay: float = 0.0,
        latency: LogNormal | None = None,
        distribution: Distribution | None = None,
        mix: Mix | None = None,
        fail_every: int = 0,
        failing: Fault = Fault(500),  # noqa: B008 (frozen)
        host: str = "127.0.0.1",
        port: int = 0,
        keep_calls: bool = True,
    ) -> None:
        """Opens nothing. `port` 0 takes a free one; `fail_every` 0 never fails."""
        self.reply, self.distribution = reply, distribution
        self.model, self.delay, self.latency = model, delay, latency
        self.mix, self.fail_every, self.failing = mix, fail_every, failing
        self.calls: list[Call] = []
        self.arrived_calls = self.most_at_once = self.now = 0
        self._script = deque(script)
        self._host, self._port, self._keep = host, port, keep_calls
        self._seconds, self._counted = 0.0, time.monotonic()  # call seconds until then
        self._open: set[Connection] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def base_url(self) -> str:
        """The address for `base_url`; known once started."""
        return f"http://{self._host}:{self._port}/v1"

    def start(self) -> JudgeServer:
        """Opens the port; raises `OSError` if it is taken."""
        listener = socket.create_server((self._host, self._port), backlog=BACKLOG)
        self._port = listener.getsockname()[1]
        self._change(-self.now)
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listener, ready), name=f"judge {self._port}", daemon=True
        )
        self._thread.start()
        ready.wait()
        return self

    def stop(self) -> None:
        """Closes the port and resets all connections: the server is down."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop = self._thread = None

    def add(self, *faults: Fault) -> None:
        """Lengthens the script."""
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

    # -- the server's own thread -----------------------------------------------------------------

    def _run(self, listener: socket.socket, ready: threading.Event) -> None:
        loop = self._loop = asyncio.new_event_loop()
        server = loop.run_until_complete(
            loop.create_server(lambda: Connection(self), sock=listener, backlog=BACKLOG)
        )
        loop.call_soon(ready.set)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(self._close(server))
            loop.close()

    async def _close(self, server: asyncio.Server) -> None:
        """Closes the port and resets all connections, also those that are just being made."""
        server.close()
        just_made = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*just_made, return_exceptions=True)
        while self._open:
            for connection in list(self._open):
                connection.reset()
            await asyncio.sleep(0)

    def arrived(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[float, Fault]:
        """Counts a call; says after how many seconds it meets which fault. For connections."""
        number = self.arrived_calls
        self.arrived_calls += 1
        if self._keep:
            self.calls.append(Call(time.monotonic(), body, headers))
        self._change(1)
        self.most_at_once = max(self.most_at_once, self.now)
        if self._script:
            fault = self._script.popleft()
        elif self.fail_every and (number + 1) % self.fail_every == 0:
            fault = self.failing
        else:
            fault = self.mix.fault(number) if self.mix is not None else Fault()
        latency = self.latency.seconds(number) if self.latency is not None else 0.0
        return fault.delay + self.delay + latency, fault

    def left(self) -> None:
        """A call was answered, or its client is gone. For connections."""
        self._change(-1)

    @property
    def call_seconds(self) -> float:
        """Calls under way, summed over time: divided by seconds, the mean of `now`."""
        return self._seconds + self.now * (time.monotonic() - self._counted)

    def _change(self, calls: int) -> None:
        now = time.monotonic()
        self._seconds += self.now * (now - self._counted)
        self._counted = now
        self.now += calls

    def answer(self, fault: Fault, body: dict[str, Any]) -> bytes:
        """The body for a call. For connections."""
        if fault.body is not None:
            return fault.body
        if fault.status >= 400:
            return b'{"error": {"message": "scripted %d"}}' % fault.status
        text = body["messages"][-1]["content"]
        shares: Mapping[str, float]
        if fault.reply is not None:
            shares = {fault.reply: 1.0}
        elif self.distribution is not None:
            shares = self.distribution(text) if callable(self.distribution) else self.distribution
        else:
            shares = {self.reply if isinstance(self.reply, str) else self.reply(text): 1.0}
        return completion(self.model, body, shares, fault.finish_reason)

    def looked_up(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a GET. For connections."""
        if path.endswith("/models"):
            return 200, {"object": "list", "data": [{"id": self.model, "object": "model"}]}
        if path.endswith("/stats"):
            counts = {"calls": self.arrived_calls, "now": self.now}
            more = {"most_at_once": self.most_at_once, "call_seconds": self.call_seconds}
            return 200, counts | more | {"clock": time.monotonic()}
        return 404, {}

    def known(self, connection: Connection, *, open: bool) -> None:
        """A connection came, or went. For connections."""
        if open:
            self._open.add(connection)
        else:
            self._open.discard(connection)


if __name__ == "__main__":
    from offbeat.testing.judge_process import main

    sys.exit(main())
