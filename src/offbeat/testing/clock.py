"""An event loop whose clock jumps to the next timer: waits of hours pass in milliseconds.

What happens at which second is the same every time. With a seed, callbacks that are ready in the
same turn run in a random order, which that seed gives again: code that relies on an order that
nobody promised is found. (Callbacks that a turn adds run in a later one, as asyncio promises;
within a turn no primitive of asyncio relies on the order.) Nothing may wait for threads or sockets.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Coroutine
from contextvars import copy_context
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")
CANCELLED_KEPT = 100  # cancelled timers, before they are swept


class Deadlock(RuntimeError):
    """Every task waits for another: no callback is ready, and no timer will ever be due."""


class _Task(asyncio.Task[Any]):
    """Hashed by its number, so that sets of tasks have the same order every time."""

    _numbers = count()
    _number: int | None = None

    def __hash__(self) -> int:  # a new one is hashed at once, when asyncio registers it
        number = self._number
        if number is None:
            number = self._number = next(self._numbers)
        return number


class _Call(list[Any]):
    """What is ready to run: callback, arguments, context. It is made for every turn of every task,
    and by nothing that asyncio shows to a debugger."""

    __slots__ = ()

    def cancel(self) -> None:
        """It runs, and does nothing."""
        self[0], self[1] = _nothing, ()


def _nothing() -> None:
    pass


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; `seed` None: first come, first served, and threads may be waited for.

    With a seed, what is ready and what is due are kept here: most of a simulation's time is spent
    on them.
    """

    _ready: deque[Any]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count()
        order = random.Random(seed)
        self._shuffle, self._random = None if seed is None else order.shuffle, order.random
        if seed is not None:
            self.set_task_factory(_task)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        """As the base's; with a seed it returns no more than `cancel` needs."""
        if self._shuffle is None:
            return super().call_soon(callback, *args, context=context)
        call = _Call((callback, args, context or copy_context()))
        self._ready.append(call)
        return call

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """As the base's; of timers that are due at once the one that was set first comes first."""
        if self._shuffle is None:
            return super().call_at(when, callback, *args, context=context)
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), timer))
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _run_once(self) -> None:
        if self._shuffle is None:
            coming = [timer.when() for timer in self._scheduled if not timer.cancelled()]
            if not self._ready and coming:
                self._now = max(self._now, min(coming))
            super()._run_once()  # type: ignore[misc]
            return
        self._take_due()
        turn = list(self._ready)
        self._ready.clear()
        if len(turn) == 2:
            if self._random() < 0.5:
                turn.reverse()
        elif len(turn) > 2:
            self._shuffle(turn)
        for handle in turn:
            if type(handle) is not _Call:
                if not handle._cancelled:
                    handle._run()
                continue
            callback, args, context = handle
            try:
                context.run(callback, *args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                said = f"{callback} failed"
                self.call_exception_handler({"message": said, "exception": error})

    def _take_due(self) -> None:
        """Moves the clock to the next timer if nothing is ready, and what is due to the ready."""
        timers, gone = self._timers, self._timer_cancelled_count
        if gone > CANCELLED_KEPT and 2 * gone > len(timers):
            timers[:] = [entry for entry in timers if not entry[2]._cancelled]
            heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0][2]._cancelled:
            heappop(timers)
            self._timer_cancelled_count -= 1
        if not self._ready:
            if not timers:
                raise Deadlock("nothing is ready, and no timer is set")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            timer = heappop(timers)[2]
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer._cancelled:
                self._timer_cancelled_count -= 1
            else:
                self._ready.append(timer)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        """As `call_soon` where there are no threads."""
        if self._shuffle is None:
            return super().call_soon_threadsafe(callback, *args, context=context)
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> Any:
        """Refused with a seed: when a thread is done is not the clock's to say."""
        if self._shuffle is not None:
            raise RuntimeError(f"{func} is to run in a thread, under a virtual clock")
        return super().run_in_executor(executor, func, *args)


def run(work: Coroutine[Any, Any, T], seed: int | None = None) -> T:
    """`asyncio.run` on such a loop."""
    _Task._numbers = count()
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        return runner.run(work)


def _task(loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
    return _Task(work, loop=loop, **more)
