"""Requests and tokens a minute: token buckets that all sources of a process share.

Invariant: in any 60 seconds a server gets at most `requests_per_minute` requests and
`tokens_per_minute` tokens (as estimated before each call) under one key, from all sources that ask
it together; the smallest of their settings holds. A call of more than half a minute's tokens is
the exception: it goes when the bucket is full, and those after it wait longer.

Pure: the clock is passed in. `shared_limiter` is the one place that remembers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

MINUTE = 60.0
BURST_SHARE = 0.05
BURST_LIMIT_SHARE = 0.5
TURN_SECONDS = 1.0
"""A source that does not go when its turn has come loses it after this long."""
EPSILON = 1e-6


class Bucket:
    """A token bucket: a twentieth of a minute's amount at once, or the largest call's cost.

    What flows in is a minute's amount less that burst, so that no 60 seconds see more. `unit` is
    the cost of every call where they cost alike (requests), 0 where they do not (tokens).
    """

    def __init__(self, per_minute: float, now: float, *, unit: float = 0.0) -> None:
        self._unit = self._largest = unit
        self._per_minute = per_minute
        self._level, self._at = self._burst, now

    @property
    def _burst(self) -> float:
        most = max(self._unit, BURST_LIMIT_SHARE * self._per_minute)
        return min(max(BURST_SHARE * self._per_minute, self._largest), most)

    @property
    def _rate(self) -> float:
        return (self._per_minute + self._unit - self._burst) / MINUTE

    def resize(self, per_minute: float, now: float) -> None:
        """Another amount a minute from now on."""
        self._advance(now)
        self._per_minute = per_minute
        self._level = min(self._level, self._burst)

    def ready_at(self, cost: float, ahead: float, now: float) -> float:
        """When a call of this cost may go, after others that cost `ahead`."""
        self._advance(now)
        self._largest = max(self._largest, cost)
        missing = min(cost, self._burst) + ahead - self._level
        return now if missing <= EPSILON else now + missing / self._rate

    def take(self, cost: float, now: float) -> None:
        """A call goes; a negative cost gives back."""
        self._advance(now)
        self._level = min(self._burst, self._level - cost)

    def _advance(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
            self._at = now


@dataclass(slots=True)
class _Member:
    """A source that asks this server: its settings, and how to say that more may go."""

    requests: int | None
    tokens: int | None
    wake: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A source that waits: its next call's cost, and when it may go."""

    cost: float
    at: float


class Limiter:
    """One server under one key. Sources that have to wait take turns, call by call."""

    def __init__(self) -> None:
        self._members: dict[object, _Member] = {}
        self._turns: dict[object, _Turn] = {}
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._now = 0.0
        self.closed_until = 0.0
        """The server asked to be left alone until then."""

    def join(
        self,
        who: object,
        requests: int | None,
        tokens: int | None,
        wake: Callable[[], None],
        now: float,
    ) -> None:
        """A source begins to ask this server; `wake` is called when it may go earlier."""
        if now < self._now:  # another event loop's clock: nothing of the last one holds
            self._requests = self._tokens = None
            self.closed_until = 0.0
        self._now = now
        self._members[who] = _Member(requests, tokens, wake)
        self._resize(now)

    def leave(self, who: object, now: float) -> None:
        """A source asks it no longer."""
        self._members.pop(who, None)
        self._turns.pop(who, None)
        if self._members:
            self._resize(now)

    def ready_at(self, who: object, cost: float, now: float) -> float:
        """When a call of so many tokens may go; not after `now` if at once.

        A call that must wait has a place in turn from here on: ask again at that time.
        """
        at = max(now, self.closed_until)
        if self._requests is None and self._tokens is None:
            return at
        ahead = self._ahead(who, now)
        if self._requests is not None:
            at = max(at, self._requests.ready_at(1.0, float(len(ahead)), now))
        if self._tokens is not None:
            at = max(at, self._tokens.ready_at(cost, sum(ahead), now))
        if at > now:
            self._turns[who] = _Turn(cost, at)  # one that waits already keeps its place
        return at

    def take(self, who: object, cost: float, now: float) -> None:
        """The call goes."""
        self._turns.pop(who, None)
        self._now = now
        if self._requests is not None:
            self._requests.take(1.0, now)
        if self._tokens is not None:
            self._tokens.take(cost, now)

    def settle(self, cost: float, actual: float, now: float) -> None:
        """A call that was estimated at `cost` tokens took `actual`."""
        if self._tokens is not None:
            self._tokens.take(actual - cost, now)
            self._wake()

    def unsent(self, cost: float, now: float) -> None:
        """A call that had gone was never sent."""
        if self._requests is not None:
            self._requests.take(-1.0, now)
        if self._tokens is not None:
            self._tokens.take(-cost, now)
        self._wake()

    def close_until(self, when: float) -> None:
        """The server is to be left alone until then, by all sources."""
        self.closed_until = max(self.closed_until, when)

    def _wake(self) -> None:
        for who in list(self._turns):
            self._members[who].wake()

    def _ahead(self, who: object, now: float) -> list[float]:
        """Costs of the others that wait for longer; those that let their turn pass lose it."""
        for other, turn in list(self._turns.items()):
            if turn.at + TURN_SECONDS < now:
                del self._turns[other]
        costs = []
        for other, turn in self._turns.items():
            if other is who:
                break
            costs.append(turn.cost)
        return costs

    def _resize(self, now: float) -> None:
        members = self._members.values()
        requests = [m.requests for m in members if m.requests is not None]
        tokens = [m.tokens for m in members if m.tokens is not None]
        self._requests = _resized(self._requests, requests, now, 1.0)
        self._tokens = _resized(self._tokens, tokens, now, 0.0)


def _resized(bucket: Bucket | None, amounts: list[int], now: float, unit: float) -> Bucket | None:
    if not amounts:
        return None
    if bucket is None:
        return Bucket(min(amounts), now, unit=unit)
    bucket.resize(min(amounts), now)
    return bucket


_LIMITERS: WeakValueDictionary[tuple[str, str], Limiter] = WeakValueDictionary()


def shared_limiter(address: str, secret: str) -> Limiter:
    """The process's limiter of a server under a key; it lives as long as someone holds it."""
    key = (address, hashlib.sha256(secret.encode()).hexdigest())
    found = _LIMITERS.get(key)
    if found is None:
        found = _LIMITERS[key] = Limiter()
    return found
