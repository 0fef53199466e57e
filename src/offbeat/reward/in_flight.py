"""Work that several ask for at the same time and that is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from offbeat.reward.pool import CallFailed

T = TypeVar("T")


class InFlight(Generic[T]):
    """One task for all who ask for the same; it ends when the last of them has gone."""

    def __init__(self, name: str, again: Callable[[T], T]) -> None:
        """`name` is that of the tasks; `again` makes of a result what goes to those who joined."""
        self._name, self._again = name, again
        self._tasks: dict[Hashable, asyncio.Task[T]] = {}
        self._readers: dict[Hashable, int] = {}

    async def get(self, key: Hashable, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `begin()`, or of the one that is under way for this key."""
        task = self._tasks.get(key)
        joined = task is not None
        if task is None:
            task = asyncio.create_task(begin(), name=self._name)
            self._tasks[key] = task
        self._readers[key] = self._readers.get(key, 0) + 1
        try:
            result = await asyncio.shield(task)
            return self._again(result) if joined else result
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if task.cancelled() and me is not None and not me.cancelling():
                raise CallFailed("unavailable", "the judge was stopped") from None
            raise
        finally:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key], self._tasks[key]
                task.cancel()

    def stop(self) -> None:
        """Ends what is under way: those who wait for it get `CallFailed`."""
        for task in self._tasks.values():
            task.cancel()
