"""Several pieces of work at once, one of them without a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from offbeat.errors import first_of

T = TypeVar("T")


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """All results, in order. What fails ends the others, and is raised.

    One alone runs in the caller's task: calls by the thousand pass several places like this, and
    each task is time for the event loop and work for the garbage collector.
    """
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failed:
        raise first_of(failed) from failed
    return [task.result() for task in tasks]
