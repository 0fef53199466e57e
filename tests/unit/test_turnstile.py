"""How many pass in a turn of the loop, in which order, and that nobody is forgotten."""

from __future__ import annotations

import asyncio
from itertools import groupby

from offbeat.reward.turnstile import Turnstile


class Turns:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.now = 0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._next)

    def _next(self) -> None:
        self.now += 1
        self._handle = self._loop.call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


def test_so_many_a_turn_in_their_order() -> None:
    async def main() -> list[tuple[int, int]]:
        gate, turns, passed = Turnstile(4), Turns(), []

        async def one(number: int) -> None:
            await gate.passed()
            passed.append((turns.now, number))

        async with asyncio.TaskGroup() as tasks:
            for number in range(42):
                tasks.create_task(one(number))
        await asyncio.sleep(0.01)
        async with asyncio.TaskGroup() as tasks:  # and again, after a pause
            for number in range(42, 84):
                tasks.create_task(one(number))
        turns.stop()
        return passed

    passed = asyncio.run(main())
    assert [number for _, number in passed] == [*range(84)]
    sizes = [len([*of]) for _, of in groupby(passed, lambda one: one[0])]
    assert max(sizes) <= 4
    assert len(sizes) <= 2 * 13, "and no turn is left out for long"


def test_one_alone_waits_for_nothing() -> None:
    async def main() -> None:
        gate = Turnstile(1)
        turns = Turns()
        before = turns.now
        await gate.passed()
        assert turns.now == before
        turns.stop()

    asyncio.run(main())


def test_cancelled_ones_take_nobodys_place() -> None:
    async def main() -> int:
        gate, passed = Turnstile(2), 0

        async def one() -> None:
            nonlocal passed
            await gate.passed()
            passed += 1

        tasks = [asyncio.create_task(one()) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks[3:9]:
            task.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
        return passed

    assert asyncio.run(main()) == 14
