"""SIGTERM ends a run as Ctrl-C does: its summary is written and its processes end."""

from __future__ import annotations

import asyncio
import signal
import threading


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
