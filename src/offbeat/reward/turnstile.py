"""Some at a time, so that the event loop has time for others in between."""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets so many through in each turn of the event loop; first come, first served.

    What a thousand tasks do that wake together, the loop does in one turn: nobody else is served
    meanwhile. Behind a turnstile they are served some a turn, and lose no time by it.
    """

    def __init__(self, a_turn: int) -> None:
        """Of one event loop, from its first use on."""
        self._most = self._room = a_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def passed(self) -> None:
        """Returns at once while there is room in this turn, else in a later one."""
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next)
        if self._room > 0:
            self._room -= 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        """Another turn."""
        self._room = self._most
        while self._waiting and self._room > 0:
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                self._room -= 1
        self._counting = self._room < self._most
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next)
