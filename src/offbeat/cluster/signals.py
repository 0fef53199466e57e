"""Ctrl-C and SIGTERM: the first lets a run save and end, a second ends it at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType

END_SECONDS = 15.0  # for a run that is to end now: to end its roles and write its summary
INTERRUPTED = 130


def end_on_sigterm() -> None:
    """Cancels the current task at SIGTERM. Call it again after anything that sets a handler.

    Does nothing outside the main thread, where Python handles no signals.
    """
    task = asyncio.current_task()
    if task is None or threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    loop.remove_signal_handler(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, task.cancel)


class LastResort:
    """Ends this process with 130 if a run that is to end now has not left the block in time: a
    thread of a role in this process cannot be broken off."""

    def __init__(self) -> None:
        self._timer = threading.Timer(END_SECONDS, os._exit, (INTERRUPTED,))
        self._timer.daemon = True
        self._armed = False

    def __enter__(self) -> LastResort:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()

    def arm(self) -> None:
        """The time begins."""
        if not self._armed:
            self._armed = True
            self._timer.start()


class Signals:
    """What the signals do to the current task. Does nothing outside the main thread."""

    def __init__(self, grace_seconds: float, last: LastResort) -> None:
        self._grace = grace_seconds
        self._last = last
        self._task = asyncio.current_task()
        self._asked = False
        self._on_first: Callable[[], None] | None = None
        self.take()

    def take(self) -> None:
        """Puts the handlers in place. Call it again after anything that sets its own."""
        if self._task is None or threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            loop.add_signal_handler(number, self._came)

    def drain_with(self, on_first: Callable[[], None] | None) -> None:
        """From now on the first signal calls this, and the grace time begins; None: a first signal
        ends the task at once."""
        self._on_first = on_first

    def _came(self) -> None:
        if self._asked or self._on_first is None:
            self._end()
            return
        self._asked = True
        self._on_first()
        asyncio.get_running_loop().call_later(self._grace, self._end)

    def _end(self) -> None:
        assert self._task is not None
        self._task.cancel()
        self._last.arm()
