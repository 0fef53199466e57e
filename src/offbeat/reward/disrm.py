"""A discriminative reward model: a model that classifies sequences, or tokens at the last one.

`DisRM` keeps the line of waiting samples. As many servers as replicas take what waits, and each
batch goes to a replica that is free, so a slow one gets less and a dead one none. The sample's text
(never policy tokens) is rendered with the scorer's own template and encoded with its own tokenizer.
The reward is the raw logit, one label's logit, or the labels' expected value.

Invariant: no replica serves whose scores depend on what a row is batched with, or are not those of
transformers and of the other replicas: all are asked at start, and each one that replaces a dead
one before it joins (`parity`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from offbeat.config import RewardSourceSection
from offbeat.errors import DeadlinePassed, OffbeatError, RequestRefused, RunFailed, UserError
from offbeat.records import Reward, ScoreItem, Span
from offbeat.reward.parity import Difference, RowCheck, difference
from offbeat.reward.pool import CallFailed
from offbeat.reward.replicas import RESTARTS, Replicas
from offbeat.reward.scorer import TransformersScorer
from offbeat.reward.source import Logit, Scorer
from offbeat.reward.template import TemplateFailed
from offbeat.reward.waiting import Waiter, WaitingLine, untried

__all__ = ["DisRM", "TransformersScorer"]

STOP_SECONDS = 10.0
MORE_FAILURES = 3
"""So many samples more of a batch, scored alone, fail than are answered before the rest is left
untried."""


class DisRM:
    """The reward source of scorers: micro-batches what waits, routes it to whoever is free."""

    def __init__(
        self,
        name: str,
        section: RewardSourceSection,
        scorers: Sequence[Scorer],
        *,
        examples: Sequence[ScoreItem] = (),
        replace_scorer: Callable[[int], Awaitable[Scorer]] | None = None,
        start_deadline_seconds: float = 600.0,
        max_restarts: int = RESTARTS,
    ) -> None:
        """Starts nothing. Whoever placed the scorers starts them before and stops them after.

        `examples` of the run's own data are among the rows of the check at start.
        `replace_scorer` ends a scorer that died and starts another in its place (`Replicas`).
        """
        if not scorers:
            raise UserError(f"reward.{name}.replicas: a disrm needs at least one scorer")
        self._name, self._section = name, section
        self._servers, self._examples = len(scorers), tuple(examples)
        self._replace_scorer, self._start_deadline = replace_scorer, start_deadline_seconds
        self._replicas: Replicas[Scorer] = Replicas(
            name,
            scorers,
            deadline_seconds=section.deadline_seconds,
            start_deadline_seconds=start_deadline_seconds,
            replace=None if replace_scorer is None else self._replace,
            at_once=1,
            max_restarts=max_restarts,
        )
        self._line = WaitingLine(name)
        self._proven: RowCheck | None = None
        self._cut = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        """The source's name."""
        return self._name

    async def start(self) -> None:
        """Checks the scorers, which are started, and serves the line with them.

        Raises `UserError` where their scores differ.
        """
        await self._prove()
        self._tasks = [
            asyncio.create_task(self._serve(), name=f"reward/{self._name}/{number}")
            for number in range(self._servers)
        ]

    async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
        """Waits in line with all others' items; a scorer takes many at once."""
        return await self._line.ask(items)

    @property
    def down_since(self) -> float | None:
        """Since when (the event loop's time) no replica has served; samples wait meanwhile."""
        return self._replicas.down_since

    def facts(self) -> Mapping[str, float]:
        """Replicas that serve, texts that wait, and texts cut from the front so far."""
        numbers = {"replicas": len(self._replicas.serving), "waiting": len(self._line)}
        if self._section.over_length == "cut_front":
            numbers["cut"] = self._cut
        return {name: float(number) for name, number in numbers.items()}

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
            except Exception as error:  # boundary: whatever it is, the next batch is served
                reason = f"{type(error).__name__}: {error}"
                for waiter in waiters:
                    waiter.give(self._failed("unavailable", reason))
            finally:
                for waiter in waiters:
                    waiter.give(self._failed("unavailable", "the source was stopped"))

    async def _batch(self, waiters: Sequence[Waiter]) -> None:
        """Scores a batch; what a well replica cannot score fails alone."""
        try:
            logits = await self._replicas.call(
                lambda scorer: _logits(scorer, [waiter.item for waiter in waiters])
            )
        except TemplateFailed as failed:
            await self._apart(waiters, "template_error", str(failed))
        except RequestRefused as refused:
            await self._apart(waiters, "too_long", str(refused))
        except CallFailed as failed:
            if failed.cause == "unavailable" and self._replicas.down_since is None:
                await self._apart(waiters, failed.cause, failed.reason)
                return
            for waiter in waiters:
                waiter.give(self._failed(failed.cause, failed.reason))
        else:
            for waiter, logit in zip(waiters, logits, strict=True):
                waiter.give(self._reward(logit))

    async def _apart(self, waiters: Sequence[Waiter], cause: str, reason: str) -> None:
        """After a batch that failed as a whole: each sample alone, for it may be one's own.

        A scorer that fails at everything is not asked for each; the reward loop asks again for
        those that were left.
        """
        if len(waiters) == 1:
            waiters[0].give(self._failed(cause, reason))
            return
        vain = 0
        for waiter in waiters:
            if vain < MORE_FAILURES:
                await self._batch([waiter])
                vain += 1 if self._is_unavailable(waiter) else -1
            else:
                waiter.give(untried(self._name, reason))

    @staticmethod
    def _is_unavailable(waiter: Waiter) -> bool:
        answer = waiter.answer
        return not answer.cancelled() and answer.result().cause == "unavailable"

    def _reward(self, logit: Logit) -> Reward:
        if logit.wrong:
            return self._failed("template_error", logit.wrong)
        if logit.value is None:
            reason = f"the text has {logit.tokens} tokens, more than the scorer takes"
            return self._failed("too_long", reason)
        reason = ""
        if logit.kept < logit.tokens:
            self._cut += 1
            reason = f"cut from the front, from {logit.tokens} to {logit.kept} tokens"
        return Reward.scored(self._name, logit.value, raw=logit.raw, reason=reason)

    def _failed(self, cause: str, reason: str) -> Reward:
        return Reward.failed(self._name, cause, reason=reason)

    # -- the check -------------------------------------------------------------------------------

    async def _prove(self) -> None:
        """Asks all replicas for their scores of the same rows, the first for transformers' too."""
        scorers = list(self._replicas.serving.values())
        asked = [
            scorer.check_rows(self._examples, reference=place == 0)
            for place, scorer in enumerate(scorers)
        ]
        try:
            async with asyncio.timeout(self._start_deadline):
                found = await asyncio.gather(*asked, return_exceptions=True)
        except TimeoutError as late:
            raise DeadlinePassed(
                f"reward.{self._name}: its replicas did not score a handful of rows within "
                f"cluster.start_deadline_seconds = {self._start_deadline:g}"
            ) from late
        failed = {i: one for i, one in enumerate(found) if isinstance(one, BaseException)}
        for error in failed.values():
            if isinstance(error, UserError):
                raise error
        for i, error in failed.items():
            raise RunFailed(
                f"reward.{self._name}: replica {i} failed at a handful of rows: "
                f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            ) from error
        checks = [one for one in found if not isinstance(one, BaseException)]
        self._refuse(difference({f"replica {i}": check for i, check in enumerate(checks)}))
        self._proven = replace(checks[0], transformers=None, padded=None)

    async def _replace(self, index: int) -> Scorer:
        """A replica in place of a dead one; one that scores otherwise does not join."""
        if self._replace_scorer is None:
            raise RuntimeError("a scorer that cannot be replaced is never taken out")
        scorer = await self._replace_scorer(index)
        try:
            if self._proven is not None:
                fresh = await scorer.check_rows(self._examples, reference=False)
                names = ("the first replica at start", f"replica {index} after its restart")
                self._refuse(difference(dict(zip(names, (self._proven, fresh), strict=True))))
        except BaseException:
            with contextlib.suppress(Exception):  # what went wrong first is what matters
                await asyncio.wait_for(scorer.stop(), STOP_SECONDS)
            raise
        return scorer

    def _refuse(self, wrong: Difference | None) -> None:
        if wrong is not None:
            raise UserError(
                f"reward.{self._name}.model: {self._section.model} does not give a row the same "
                f"finite score in every way: {wrong.words}; {self._mend(wrong)}"
            )

    def _mend(self, wrong: Difference) -> str:
        """What to do about a difference."""
        if wrong.kind == "not_finite":
            return "give a model whose scores are finite numbers"
        if wrong.kind == "replicas":
            return "see to it that every node has the same files of the model"
        if wrong.kind == "padding":
            return "set seats = 1, so that no row is padded, or give another model"
        if self._section.engine == "vllm":
            return 'set engine = "transformers"'
        if self._section.dtype != "float32":
            return 'set dtype = "float32"'
        if wrong.kind == "batch":
            return "set seats = 1, so that every row is scored alone"
        return "give another model"


async def _logits(scorer: Scorer, items: Sequence[ScoreItem]) -> list[Logit]:
    logits = await scorer.logits(items)
    if len(logits) != len(items):
        raise OffbeatError(f"the scorer gave {len(logits)} logits for {len(items)} texts")
    return logits
