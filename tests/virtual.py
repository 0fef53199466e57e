"""An event loop whose clock jumps to the next timer: waits of hours are tested in milliseconds,
and what happens at which second is the same every time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        coming = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        if not self._ready and coming:  # type: ignore[attr-defined]
            self._now = max(self._now, min(coming))
        super()._run_once()  # type: ignore[misc]


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on such a loop. Nothing in it may wait for threads or sockets."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)
