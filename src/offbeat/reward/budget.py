"""The failure budget of a reward source: how much of it may fail before a run says stop.

Pure: it counts outcomes and knows neither a clock nor a source. Whoever watches it decides what
"over" means for admission, and for how long.
"""

from __future__ import annotations

from collections import Counter, deque

WINDOW = 64
MINIMUM = 16
RECOVERY_WINDOW = 8
RECOVERY_MINIMUM = 4
CAUSES_SHOWN = 3


class FailureBudget:
    """Whether too large a share of a source's last outcomes are failures.

    It goes over when at least `minimum` of the last `window` outcomes are known and more than
    `max_failed_share` of them failed. Then only what comes after counts: it is over no longer once
    the last 8 outcomes since (at least 4 of them) fail no more often than `max_failed_share`; these
    begin the next window. A `max_failed_share` of 1 never trips.
    """

    def __init__(
        self, max_failed_share: float, *, window: int = WINDOW, minimum: int = MINIMUM
    ) -> None:
        """`max_failed_share` is 0 to 1; `minimum` at most `window`."""
        if not 0 <= max_failed_share <= 1:
            raise ValueError(f"max_failed_share = {max_failed_share} is not a share")
        if not 1 <= minimum <= window:
            raise ValueError(f"minimum = {minimum} does not fit a window of {window}")
        self._most, self._minimum = max_failed_share, minimum
        self._window: deque[str | None] = deque(maxlen=window)
        self._failed = 0  # in the window
        self._since: deque[str | None] = deque(maxlen=RECOVERY_WINDOW)
        self._over = False

    def record(self, cause: str | None) -> None:
        """One more outcome: the cause of a failure, or None where there was none."""
        if not self._over:
            if len(self._window) == self._window.maxlen:
                self._failed -= self._window[0] is not None
            self._window.append(cause)
            self._failed += cause is not None
            known = len(self._window)
            self._over = known >= self._minimum and self._failed / known > self._most
            return
        self._since.append(cause)
        if len(self._since) >= RECOVERY_MINIMUM and _share(self._since) <= self._most:
            self._over = False
            self._window.clear()
            self._window.extend(self._since)
            self._failed = sum(kept is not None for kept in self._window)
            self._since.clear()

    @property
    def over(self) -> bool:
        """Whether the budget is spent."""
        return self._over

    @property
    def share(self) -> float:
        """Failed share of the outcomes that decide now; 0 where there are none.

        Over budget these are the ones since then, once there are 4; until then those before.
        """
        return _share(self._deciding())

    @property
    def commonest(self) -> str | None:
        """The commonest cause among the outcomes that decide now; None without a failure."""
        counts = Counter(cause for cause in self._deciding() if cause is not None)
        return max(counts, key=counts.__getitem__, default=None)

    def causes(self) -> str:
        """The commonest causes among the outcomes that decide now: "timeout 12, unparseable 3"."""
        counts = Counter(cause for cause in self._deciding() if cause is not None)
        return ", ".join(f"{cause} {count}" for cause, count in counts.most_common(CAUSES_SHOWN))

    def _deciding(self) -> deque[str | None]:
        late = self._over and len(self._since) >= RECOVERY_MINIMUM
        return self._since if late else self._window


def _share(outcomes: deque[str | None]) -> float:
    failed = sum(cause is not None for cause in outcomes)
    return failed / len(outcomes) if outcomes else 0.0
