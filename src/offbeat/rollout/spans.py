"""An engine's compute spans: one a step, tiny consecutive steps merged to bound telemetry."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from offbeat.records import Span

# Steps that follow one another without a gap become one span of at most this many seconds.
LONGEST = 0.25
GAP = 0.005
KEPT = 100_000


@dataclass(frozen=True, slots=True)
class Begun:
    """Clock readings at a span's start."""

    wall: float
    cpu: float


class SpanLog:
    """Written by the stepping thread, drained by the loop.

    `cpu` is the thread's CPU time, or what `cpu_clock` counts; with `wall_is_cpu` (a GPU does the
    work) the wall time.
    """

    def __init__(
        self,
        role: str,
        replica: int,
        *,
        wall_is_cpu: bool,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._role = role
        self._replica = replica
        self._wall_is_cpu = wall_is_cpu
        self._cpu_clock = cpu_clock
        self._closed: deque[Span] = deque(maxlen=KEPT)
        self._open: Span | None = None
        self._lock = threading.Lock()

    def begin(self) -> Begun:
        """Reads the clocks; call on the stepping thread."""
        return Begun(time.time(), self._cpu_clock())

    def end(self, begun: Begun, kind: str, version: int, tokens: int) -> None:
        """Records the stretch since `begun`."""
        now = time.time()
        cpu = now - begun.wall if self._wall_is_cpu else self._cpu_clock() - begun.cpu
        self._add(
            Span(self._role, self._replica, kind, begun.wall, now, cpu, version, tokens),
        )

    def pause(self, begun: Begun, version: int) -> None:
        """Records how long generation stood still; its computing is in other spans."""
        self._add(Span(self._role, self._replica, "pause", begun.wall, time.time(), 0.0, version))

    def drain(self) -> list[Span]:
        """Spans since the last call."""
        with self._lock:
            found = [*self._closed, *([self._open] if self._open is not None else [])]
            self._closed.clear()
            self._open = None
        return found

    def _add(self, span: Span) -> None:
        with self._lock:
            last = self._open
            if (
                last is not None
                and last.kind == span.kind
                and last.version == span.version
                and 0 <= span.start - last.end < GAP
                and span.end - last.start <= LONGEST
            ):
                self._open = replace(
                    last,
                    end=span.end,
                    cpu=last.cpu + span.cpu,
                    tokens=last.tokens + span.tokens,
                )
                return
            if last is not None:
                self._closed.append(last)
            self._open = span
