"""Small parts of the rollouter: where prompts come from, and numbers to read off."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from offbeat.errors import OffbeatError, first_of
from offbeat.records import Prompt, Sample, Span

log = logging.getLogger(__name__)
DRAIN_SECONDS = 2.0
LAG_PERIOD_SECONDS = 0.05
COLLECTION_THRESHOLDS = 100_000, 20, 100


class GroupFailed(OffbeatError):
    """A group cannot be used; the message is the ledger's reason. It is not tried again."""


class PromptSource(Protocol):
    """Where prompts come from: `total` ordinals, each always the same prompt."""

    @property
    def total(self) -> int:
        """Ordinals there are: epochs x rows."""
        ...

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt of an ordinal in [0, total)."""
        ...


@dataclass(slots=True)
class Tally:
    """Numbers since they were last read; `store_seconds` is CPU time of the store's writer."""

    generated_tokens: int = 0
    loop_lag_seconds: float = 0.0
    store_seconds: float = 0.0


def too_few(samples: Sequence[Sample]) -> str:
    """The reason to discard a group below `train.min_scored`, with the sources' own causes."""
    causes = {
        f"{name} {reward.cause}"
        for sample in samples
        for name, reward in sample.rewards.items()
        if reward.cause is not None
    }
    return f"min_scored: {', '.join(sorted(causes))}" if causes else "min_scored"


def cause_of(error: BaseException) -> str:
    """What a failed attempt is counted under."""
    error = first_of(error)
    return "deadline" if isinstance(error, TimeoutError) else type(error).__name__


async def measure_lag(tally: Callable[[], Tally]) -> None:
    """Measures, for ever, how late the event loop wakes a sleeper."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_PERIOD_SECONDS)
        lag = time.perf_counter() - before - LAG_PERIOD_SECONDS
        tally().loop_lag_seconds = max(tally().loop_lag_seconds, lag)


def shorten_collections() -> None:
    """For a process whose event loop must not stand still, once all that stays is there.

    A full collection of garbage goes over every object of the process, which stops the loop for
    longer than anything else does: what is there now is passed over for good, and calls in flight
    (some 200 objects each) are gone over seldom.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTION_THRESHOLDS)


async def spans_of(drains: Sequence[Callable[[], Awaitable[list[Span]]]]) -> list[Span]:
    """Spans of all that answer in time. Telemetry of a dead or hung replica is lost, no more."""

    async def one(drain: Callable[[], Awaitable[list[Span]]]) -> list[Span]:
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                return await drain()
        except Exception as error:  # boundary: telemetry never changes training
            log.warning("spans are lost: %s: %s", type(error).__name__, error)
            return []

    return [span for part in await asyncio.gather(*map(one, drains)) for span in part]
