"""Work at once: results in order, one failure ends the rest, a cancel ends all."""

from __future__ import annotations

import asyncio

import pytest

from offbeat.reward.together import together


async def after(seconds: float, result: int, ended: list[int] | None = None) -> int:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if ended is not None:
            ended.append(result)
        raise
    return result


async def failing(seconds: float) -> int:
    await asyncio.sleep(seconds)
    raise ValueError("no")


def test_results_in_order_and_at_once() -> None:
    async def main() -> None:
        assert await together() == []
        assert await together(after(0, 1)) == [1]
        async with asyncio.timeout(5):
            assert await together(*(after(0.3 - i / 1000, i) for i in range(100))) == [*range(100)]

    asyncio.run(main())


@pytest.mark.parametrize("others", [0, 3])
def test_a_failure_is_raised_as_it_is_and_ends_the_others(others: int) -> None:
    ended: list[int] = []

    async def main() -> None:
        with pytest.raises(ValueError, match="no"):
            await together(failing(0.01), *(after(60, i, ended) for i in range(others)))

    asyncio.run(main())
    assert sorted(ended) == [*range(others)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_cancel_ends_all(count: int) -> None:
    ended: list[int] = []

    async def main() -> None:
        task = asyncio.create_task(together(*(after(60, i, ended) for i in range(count))))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert sorted(ended) == [*range(count)]


def test_one_alone_has_no_task_of_its_own() -> None:
    async def task() -> asyncio.Task[None] | None:
        return asyncio.current_task()

    async def main() -> None:
        assert await together(task()) == [asyncio.current_task()]

    asyncio.run(main())
