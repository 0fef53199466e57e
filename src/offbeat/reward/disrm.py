"""A discriminative reward model: a sequence-classification model with one logit.

`DisRM` keeps the line of waiting samples; each replica takes what waits when it is free, so work
goes to the least busy one. The sample's text (never policy tokens) is rendered with the scorer's
own template and encoded with its own tokenizer. The reward is the raw logit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Reward, ScoreItem, Span
from offbeat.reward.scorer import TransformersScorer
from offbeat.reward.source import Scorer
from offbeat.reward.template import TemplateFailed
from offbeat.reward.waiting import Waiter, WaitingLine

__all__ = ["DisRM", "TransformersScorer"]

PAUSE_SECONDS = 0.2
PAUSE_LIMIT_SECONDS = 10.0


class DisRM:
    """The reward source of scorers: micro-batches what waits, routes it to whoever is free."""

    def __init__(
        self,
        name: str,
        section: RewardSourceSection,
        scorers: Sequence[Scorer],
    ) -> None:
        """Starts nothing. Whoever placed the scorers starts them before and stops them after."""
        if not scorers:
            raise UserError(f"reward.{name}.replicas: a disrm needs at least one scorer")
        self._name, self._section = name, section
        self._scorers = list(scorers)
        self._line = WaitingLine(name)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        """The source's name."""
        return self._name

    async def start(self) -> None:
        """Serves the line with scorers that are started."""
        self._tasks = [
            asyncio.create_task(self._serve(scorer), name=f"reward/{self._name}/{number}")
            for number, scorer in enumerate(self._scorers)
        ]

    async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
        """Waits in line with all others' items; a scorer takes many at once."""
        return await self._line.ask(items)

    async def drain_spans(self) -> list[Span]:
        """The scorers' compute spans since the last call."""
        drains = [scorer.drain_spans() for scorer in self._scorers]
        drained = await asyncio.gather(*drains, return_exceptions=True)
        return [
            span
            for spans in drained
            if not isinstance(spans, BaseException)  # a dead one has none
            for span in spans
        ]

    async def stop(self) -> None:
        """Ends the serving."""
        self._line.close("the source was stopped")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _serve(self, scorer: Scorer) -> None:
        """Takes and scores for ever; after a failure it pauses, so that others take over."""
        failures = 0
        while True:
            waiters = await self._line.take(self._section.seats, len(self._scorers))
            try:
                fine = await self._batch(scorer, waiters)
            finally:
                for waiter in waiters:
                    waiter.give(self._failed("unavailable", "the source was stopped"))
            failures = 0 if fine else failures + 1
            if not fine:
                await asyncio.sleep(
                    min(PAUSE_LIMIT_SECONDS, PAUSE_SECONDS * 2.0 ** min(failures, 20))
                )

    async def _batch(self, scorer: Scorer, waiters: Sequence[Waiter]) -> bool:
        """Scores a batch; an unrenderable text fails alone. False if the scorer failed."""
        deadline = self._section.deadline_seconds
        try:
            async with asyncio.timeout(deadline):
                logits = await scorer.logits([waiter.item for waiter in waiters])
            for waiter, logit in zip(waiters, logits, strict=True):
                waiter.give(self._reward(logit))
        except TemplateFailed as failed:
            if len(waiters) > 1:
                return all([await self._batch(scorer, [waiter]) for waiter in waiters])
            waiters[0].give(self._failed("template_error", str(failed)))
        except TimeoutError:
            return self._all_failed(waiters, "timeout", f"no scores within {deadline:g} s")
        except Exception as error:
            return self._all_failed(waiters, "unavailable", f"{type(error).__name__}: {error}")
        return True

    def _reward(self, logit: float | None) -> Reward:
        if logit is None:
            return self._failed("too_long", "the text is longer than the scorer takes")
        return Reward.scored(self._name, logit, raw=repr(logit))

    def _failed(self, cause: str, reason: str) -> Reward:
        return Reward.failed(self._name, cause, reason=reason)

    def _all_failed(self, waiters: Sequence[Waiter], cause: str, reason: str) -> bool:
        for waiter in waiters:
            waiter.give(self._failed(cause, reason))
        return False
