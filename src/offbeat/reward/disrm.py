"""A discriminative reward model: a sequence-classification model with one logit.

`DisRM` keeps the line of waiting samples. As many servers as replicas take what waits, and each
batch goes to a replica that is free, so a slow one gets less and a dead one none. The sample's text
(never policy tokens) is rendered with the scorer's own template and encoded with its own tokenizer.
The reward is the raw logit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from offbeat.config import RewardSourceSection
from offbeat.errors import OffbeatError, UserError
from offbeat.records import Reward, ScoreItem, Span
from offbeat.reward.pool import CallFailed
from offbeat.reward.replicas import Replicas
from offbeat.reward.scorer import TransformersScorer
from offbeat.reward.source import Scorer
from offbeat.reward.template import TemplateFailed
from offbeat.reward.waiting import Waiter, WaitingLine

__all__ = ["DisRM", "TransformersScorer"]


class DisRM:
    """The reward source of scorers: micro-batches what waits, routes it to whoever is free."""

    def __init__(
        self,
        name: str,
        section: RewardSourceSection,
        scorers: Sequence[Scorer],
        *,
        replace_scorer: Callable[[int], Awaitable[Scorer]] | None = None,
        start_deadline_seconds: float = 600.0,
    ) -> None:
        """Starts nothing. Whoever placed the scorers starts them before and stops them after.

        `replace_scorer` ends a scorer that died and starts another in its place (`Replicas`).
        """
        if not scorers:
            raise UserError(f"reward.{name}.replicas: a disrm needs at least one scorer")
        self._name, self._section = name, section
        self._servers = len(scorers)
        self._replicas: Replicas[Scorer] = Replicas(
            name,
            scorers,
            deadline_seconds=section.deadline_seconds,
            start_deadline_seconds=start_deadline_seconds,
            replace=replace_scorer,
            at_once=1,
        )
        self._line = WaitingLine(name)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        """The source's name."""
        return self._name

    async def start(self) -> None:
        """Serves the line with scorers that are started."""
        self._tasks = [
            asyncio.create_task(self._serve(), name=f"reward/{self._name}/{number}")
            for number in range(self._servers)
        ]

    async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
        """Waits in line with all others' items; a scorer takes many at once."""
        return await self._line.ask(items)

    @property
    def down_since(self) -> float | None:
        """None: it serves, or says so by failures."""
        return None

    def facts(self) -> Mapping[str, float]:
        """Running numbers for metrics."""
        return {}

    async def drain_spans(self) -> list[Span]:
        """The scorers' compute spans since the last call."""
        drains = [scorer.drain_spans() for scorer in self._replicas.serving.values()]
        drained = await asyncio.gather(*drains, return_exceptions=True)
        return [
            span
            for spans in drained
            if not isinstance(spans, BaseException)  # a dead one has none
            for span in spans
        ]

    async def stop(self) -> None:
        """Ends the serving and the restarts that are under way."""
        self._line.close("the source was stopped")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._replicas.stop()

    async def _serve(self) -> None:
        """Takes and scores for ever."""
        while True:
            waiters = await self._line.take(self._section.seats, len(self._replicas.serving) or 1)
            try:
                await self._batch(waiters)
            finally:
                for waiter in waiters:
                    waiter.give(self._failed("unavailable", "the source was stopped"))

    async def _batch(self, waiters: Sequence[Waiter]) -> None:
        """Scores a batch; an unrenderable text fails alone."""
        try:
            logits = await self._replicas.call(
                lambda scorer: _logits(scorer, [waiter.item for waiter in waiters])
            )
        except TemplateFailed as failed:
            if len(waiters) > 1:
                for waiter in waiters:
                    await self._batch([waiter])
            else:
                waiters[0].give(self._failed("template_error", str(failed)))
        except CallFailed as failed:
            for waiter in waiters:
                waiter.give(self._failed(failed.cause, failed.reason))
        else:
            for waiter, logit in zip(waiters, logits, strict=True):
                waiter.give(self._reward(logit))

    def _reward(self, logit: float | None) -> Reward:
        if logit is None:
            return self._failed("too_long", "the text is longer than the scorer takes")
        return Reward.scored(self._name, logit, raw=repr(logit))

    def _failed(self, cause: str, reason: str) -> Reward:
        return Reward.failed(self._name, cause, reason=reason)


async def _logits(scorer: Scorer, items: Sequence[ScoreItem]) -> list[float | None]:
    logits = await scorer.logits(items)
    if len(logits) != len(items):
        raise OffbeatError(f"the scorer gave {len(logits)} logits for {len(items)} texts")
    return logits
