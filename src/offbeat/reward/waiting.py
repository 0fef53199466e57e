"""Items that wait until a replica takes them, many at once: micro-batching for reward sources."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.records import Reward, ScoreItem

UNTRIED = "untried"
"""The cause of a sample whose call failed as a whole, and that was not scored alone: others of the
call used up what is spent on that. It is never the sample's own fault."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """One item and the future of its reward."""

    item: ScoreItem
    answer: asyncio.Future[Reward]

    def give(self, reward: Reward) -> None:
        """Answers, unless whoever asked has gone."""
        if not self.answer.done():
            self.answer.set_result(reward)


def untried(source: str, reason: str) -> Reward:
    """The outcome of a sample that was not scored alone when its call failed for `reason`."""
    return Reward.failed(source, UNTRIED, reason=f"not scored alone; its call failed: {reason}")


class WaitingLine:
    """First come, first served; every item is answered exactly once, at the latest by `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._line: deque[Waiter] = deque()
        self._some = asyncio.Event()
        self._closed: str | None = None

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._line)

    async def ask(self, items: Sequence[ScoreItem]) -> list[Reward]:
        """Waits until all items are answered. Their deadlines are those of the calls they join."""
        if self._closed is not None:
            return [Reward.failed(self._name, "unavailable", reason=self._closed) for _ in items]
        loop = asyncio.get_running_loop()
        waiters = [Waiter(item, loop.create_future()) for item in items]
        self._line.extend(waiters)
        self._some.set()
        return list(await asyncio.gather(*(waiter.answer for waiter in waiters)))

    async def take(
        self, limit: int, sharers: int = 1, characters: float = math.inf
    ) -> list[Waiter]:
        """The next items, at least one: an even share of what waits among `sharers`, bounded in
        number and in the characters of their prompts and answers."""
        while True:
            while self._line and self._line[0].answer.done():
                self._line.popleft()
            if self._line:
                break
            self._some.clear()
            await self._some.wait()
        share = min(limit, -(-len(self._line) // sharers))
        taken = [self._line.popleft()]
        size = _characters(taken[0].item)
        while len(taken) < share:
            size += _characters(self._line[0].item)
            if size > characters:
                break
            taken.append(self._line.popleft())
        return [waiter for waiter in taken if not waiter.answer.done()]

    def close(self, reason: str) -> None:
        """Fails everything that waits and that will be asked."""
        self._closed = reason
        for waiter in self._line:
            waiter.give(Reward.failed(self._name, "unavailable", reason=reason))
        self._line.clear()


def _characters(item: ScoreItem) -> int:
    return len(item.prompt.text) + len(item.completion)
