"""When vLLM's processes compute: one span a step, seen by the engine as a logger of vLLM's.

A step is charged from the end of the step before it (or from when work came, or generation was
resumed) to the arrival of its tokens, with the CPU seconds of vLLM's workers in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from offbeat.records import Span
from offbeat.rollout.spans import Begun, SpanLog


class ProcessClock:
    """CPU seconds that processes of this machine have used together."""

    def __init__(self) -> None:
        self.processes: Sequence[int] = ()
        self._last = 0.0

    def __call__(self) -> float:
        """Their sum; where one has ended, the last one known."""
        with suppress(OSError):
            # Linux: a process's CPU clock is (~pid << 3) | 2.
            self._last = sum(time.clock_gettime((~pid << 3) | 2) for pid in self.processes)
        return self._last


class StepMeter:
    """Written on the engine's loop."""

    def __init__(self, role: str, replica: int, *, wall_is_cpu: bool) -> None:
        self.clock = ProcessClock()
        self._log = SpanLog(role, replica, wall_is_cpu=wall_is_cpu, cpu_clock=self.clock)
        self._since: Begun | None = None
        self.version = 0
        self.busy: Callable[[], bool] = lambda: False

    def begin(self) -> Begun:
        """Reads the clocks."""
        return self._log.begin()

    def work_came(self) -> None:
        """A request was given to vLLM."""
        if self._since is None:
            self._since = self.begin()

    def step(self, generated: int, prefilled: int) -> None:
        """A step's tokens arrived; `prefilled` prompt tokens were computed for them."""
        if self._since is not None:
            kind = "prefill" if prefilled > generated else "decode"
            self._log.end(self._since, kind, self.version, generated)
        self._since = self.begin() if self.busy() else None

    def loaded(self, begun: Begun) -> None:
        """New weights were put in since `begun`."""
        self._log.end(begun, "load", self.version, 0)

    def paused(self, begun: Begun) -> None:
        """Generation stood still since `begun` and goes on now."""
        self._log.pause(begun, self.version)
        self._since = self.begin() if self.busy() else None

    def drain(self) -> list[Span]:
        """Spans since the last call."""
        return self._log.drain()


class StepLogger:
    """What vLLM calls after each step's outputs; a `StatLoggerBase` by its methods."""

    def __init__(self, meter: StepMeter) -> None:
        self._meter = meter

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, **more: Any
    ) -> None:
        """One step's outputs were handed out."""
        if iteration_stats is not None and iteration_stats.num_generation_tokens:
            prefilled = iteration_stats.prompt_token_stats.computed
            self._meter.step(iteration_stats.num_generation_tokens, prefilled)

    def log(self) -> None:
        """Nothing to print."""

    def log_engine_initialized(self) -> None:
        """Nothing to print."""

    def record_sleep_state(self, *args: Any) -> None:
        """The engine never sleeps."""

    def record_admission_rejection(self, reason: str) -> None:
        """The engine admits what it does not refuse."""
