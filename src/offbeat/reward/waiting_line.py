"""The calls that wait for a server of an endpoint pool, in their order."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from offbeat.reward.endpoints import Endpoint

LOOKAHEAD = 64
"""Calls that are asked again and looked at in one round: those behind them wait for theirs."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """One call: what it is estimated to cost in tokens, and what it met so far.

    `failures` are tries that count against `retries`; `outages` met a server's outage or a broken
    connection, `limits` a rate limit, and do not. `avoid` failed it last; as a `trial` it is the
    one call to a server that may be well again.
    """

    cost: float
    failures: int = 0
    outages: int = 0
    limits: int = 0
    limited_since: float | None = None
    avoid: Endpoint | None = None
    trial: bool = False
    turn: asyncio.Future[Endpoint] = field(init=False)

    @property
    def retries(self) -> int:
        """How often it was asked again."""
        return self.failures + self.outages + self.limits

    @property
    def again(self) -> bool:
        """Whether it was asked before."""
        return self.retries > 0


class WaitingLine:
    """First come, first served; calls that are asked again go before those that never were."""

    def __init__(self) -> None:
        self._again: OrderedDict[int, PendingCall] = OrderedDict()
        self._fresh: OrderedDict[int, PendingCall] = OrderedDict()

    def __len__(self) -> int:
        return len(self._again) + len(self._fresh)

    def __iter__(self) -> Iterator[PendingCall]:
        again = itertools.islice(self._again.values(), LOOKAHEAD)
        return itertools.chain(again, self._fresh.values())

    @property
    def has_fresh(self) -> bool:
        """Whether a call waits that was never asked."""
        return bool(self._fresh)

    def add(self, call: PendingCall) -> None:
        """It waits from now on."""
        call.turn = asyncio.get_running_loop().create_future()
        (self._again if call.again else self._fresh)[id(call)] = call

    def drop(self, call: PendingCall) -> None:
        """It waits no longer."""
        self._again.pop(id(call), None)
        self._fresh.pop(id(call), None)

    def fail_all(self, error: Exception) -> None:
        """Ends all that wait with an error."""
        for call in [*self._again.values(), *self._fresh.values()]:
            self.drop(call)
            if not call.turn.done():
                call.turn.set_exception(error)
