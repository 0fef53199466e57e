"""What is known of one server: whether it may be asked at all, and how much at once.

Pure: both are told what happened and when (seconds of any one clock); neither sleeps nor calls.
"""

from __future__ import annotations

import math
from typing import Literal

FAILURES_ON_END = 5
GROWTH_ROUNDS = 16
"""Rounds of successful calls in which a limit grows from next to nothing to its full size."""
SLOW_SHARE = 0.25
LATEST_SHARE = 0.1


class Breaker:
    """Closed: calls pass. Open: none does. Half open: one does, as a trial.

    It opens after 5 failures on end, or when it is told to, and closes when a trial succeeds; a
    trial that fails opens it again. Who owns it asks for the server's health while it is open, and
    half-opens it. A failure counts only if its call began after the server's last answer to another
    one: calls of a burst that are lost singly fail together, and say nothing against a server that
    answered meanwhile. Nor does a call that began before the last closing.
    """

    def __init__(self, threshold: int = FAILURES_ON_END) -> None:
        self._threshold = threshold
        self.state: Literal["closed", "open", "half_open"] = "closed"
        self.since: float | None = None
        """When it opened; None while it is closed."""
        self._failures = 0
        self._trial = False
        self._closed_at = self._answered_at = -math.inf

    @property
    def passes(self) -> bool:
        """Whether a call may begin."""
        return self.state == "closed" or (self.state == "half_open" and not self._trial)

    def began(self) -> bool:
        """A call begins; returns whether it is the trial, which the end of the call tells again."""
        if self.state == "half_open":
            self._trial = True
            return True
        return False

    def succeeded(self, trial: bool, now: float) -> None:
        """The server answered a call, whatever it said."""
        self._answered_at = now
        if trial and self.state == "half_open":
            self.close(now)
        elif self.state == "closed":
            self._failures = 0

    def failed(self, trial: bool, began: float, now: float) -> None:
        """A call that began at `began` found no connection, no answer, or a broken server."""
        if trial and self.state == "half_open":
            self.open(now)
        elif self.state == "closed" and began >= max(self._closed_at, self._answered_at):
            self._failures += 1
            if self._failures >= self._threshold:
                self.open(now)

    def let_go(self, trial: bool) -> None:
        """A call was given up before it came to anything."""
        if trial and self.state == "half_open":
            self._trial = False

    def excuses(self, began: float) -> bool:
        """Whether the failure of a call that began at `began` is the server's outage."""
        return self.state != "closed" or began < self._closed_at

    def open(self, now: float) -> None:
        """The server is known to be down."""
        if self.state == "closed":
            self.since = now
        self.state, self._trial = "open", False

    def half_open(self) -> None:
        """The server seems to be well again."""
        if self.state == "open":
            self.state = "half_open"

    def close(self, now: float) -> None:
        """The server is well."""
        self.state, self.since, self._closed_at = "closed", None, now
        self._failures, self._trial = 0, False


class AdaptiveLimit:
    """Calls to one server at once: up to `most`, half as many when it is overloaded.

    Calls that are refused together halve the limit once: only what began after a cut can cut
    again. Each successful round of calls adds a sixteenth of `most`. After an outage the limit
    begins with 1 and doubles each round until it is where it was. A timeout is a sign of overload
    only where the other calls are slow as well, or none succeeded while it ran: a server that
    loses single calls is not overloaded.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(most)
        self._step = max(1.0, most / GROWTH_ROUNDS)
        self._doubles_to = 0.0
        self._cut_at = self._success_at = -math.inf
        self._seconds: float | None = None

    @property
    def limit(self) -> int:
        """Calls at once, now; at least 1."""
        return max(1, int(self._limit))

    def succeeded(self, began: float, now: float) -> None:
        """A call that began at `began` was answered."""
        took = now - began
        before = took if self._seconds is None else self._seconds
        self._seconds = before + LATEST_SHARE * (took - before)
        self._success_at = now
        more = 1.0 if self._limit < self._doubles_to else min(1.0, self._step / self._limit)
        self._limit = min(float(self._most), self._limit + more)

    def restart(self, now: float) -> None:
        """The server is back after an outage."""
        self._doubles_to, self._limit, self._cut_at = max(self._doubles_to, self._limit), 1.0, now

    def overloaded(self, began: float, now: float) -> None:
        """The server said that it has too much to do."""
        if began >= self._cut_at:
            self._limit = self._doubles_to = max(1.0, self._limit / 2)
            self._cut_at = now

    def timed_out(self, began: float, now: float) -> None:
        """A call that began at `began` got no answer."""
        slow = self._seconds is not None and self._seconds > SLOW_SHARE * (now - began)
        if slow or self._success_at < began:
            self.overloaded(began, now)
