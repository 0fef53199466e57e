"""One request: routed, counted, within its deadline, and carried on when its engine ends.

```
 request ──► pick a replica ──► completions and snapshots ──► all samples have ended
                  ▲                        │
                  └── the rest, with ──────┘  the engine failed, was taken out, or gave samples up
                      the tokens so far
```

Invariants: a completion is yielded once; when a request has failed, its engine is either well or
out of routing before the caller hears of it, so that whoever tries again does not meet a dead
engine; a sample's tokens all come from engines that were routable when they were asked, so none is
older than the floor at which the attempt began (`docs/staleness.md`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from offbeat.config import RolloutSection
from offbeat.errors import OffbeatError, RequestRefused
from offbeat.records import Completion, GenerateRequest, Progress
from offbeat.rollout.engine import Engine
from offbeat.rollout.router import Place, Router
from offbeat.weights.sync import Replica, WeightSync

log = logging.getLogger(__name__)


class EngineLeft(OffbeatError):
    """An engine was taken out of routing while it worked on a request."""


@dataclass(slots=True)
class _Work:
    """What is left of one request: which samples have ended, the newest tokens of the others.

    Only the newest snapshot of a sample is held, so that older ones are freed; `news` says whether
    anything came since the request was last sent.
    """

    request: GenerateRequest
    done: set[int] = field(default_factory=set)
    tokens: dict[int, tuple[int, Any]] = field(default_factory=dict)
    news: bool = False

    @property
    def left(self) -> int:
        """Samples that have not ended."""
        return self.request.n - len(self.done)

    def rest(self, snapshot_every: int) -> GenerateRequest:
        """The request for what is left."""
        self.news = False
        resume = tuple((index, ref) for index, (_, ref) in sorted(self.tokens.items()))
        return replace(
            self.request,
            done=frozenset(self.done),
            resume=resume,
            snapshot_every=snapshot_every,
        )

    def take(self, item: Completion | Progress) -> Completion | None:
        """Books what an engine gave; returns it if the caller is to have it."""
        if item.request_id != self.request.request_id or item.index in self.done:
            return None  # of another attempt, or a second time
        known, _ = self.tokens.get(item.index, (0, None))
        if isinstance(item, Progress) or item.finish_reason == "aborted":
            if item.tokens > known:
                self.tokens[item.index] = (item.tokens, item.ref)
                self.news = True
            return None
        self.done.add(item.index)
        self.tokens.pop(item.index, None)
        self.news = True
        return item

    def goes_on(self, *, left: bool) -> bool:
        """Whether there is something to carry on with after a failure; `left` says that the engine
        is out.

        With nothing kept, a new attempt loses nothing and counts its staleness from a newer floor.
        A well engine that gave nothing new has failed on this request, and would again.
        """
        return bool(self.done or self.tokens) and (left or self.news)


class Generation:
    """Runs requests on whichever engine the router picks."""

    def __init__(
        self,
        router: Router,
        sync: Callable[[], WeightSync[Engine]],
        section: RolloutSection,
    ) -> None:
        self._router = router
        self._sync = sync
        self._deadline = section.deadline_seconds
        self._max_attempts = section.max_attempts
        self._snapshot_every = section.snapshot_tokens

    def once(
        self, request: GenerateRequest, place: Place | None = None
    ) -> AsyncGenerator[Completion, None]:
        """The completions as they end, all within one deadline; `place` says where the group was.

        When the engine ends or gives samples up, the rest goes on from its newest tokens, on the
        same replica if that is well, else on another, at most `max_attempts` times. Raises the
        last failure, `TimeoutError` at the deadline.
        """
        return self._carry(_Work(request), place or Place())

    async def patient(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        """The same, its unfinished samples begun anew when it fails: for those who have no
        attempts of their own."""
        work, place = _Work(request), Place()
        for left in reversed(range(self._max_attempts)):
            try:
                async with contextlib.aclosing(self._carry(work, place)) as completions:
                    async for completion in completions:
                        yield completion
                return
            except RequestRefused:
                raise
            except Exception:  # boundary: the last failure is the caller's
                if not left:
                    raise
                work.tokens.clear()

    async def _carry(self, work: _Work, place: Place) -> AsyncGenerator[Completion, None]:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._deadline
        for left in reversed(range(self._max_attempts + 1)):
            replica = await self._router.pick(max(until - loop.time(), 0), work.left, place)
            engine = place.take(replica)
            try:
                async with contextlib.aclosing(self._on(replica, work, until)) as completions:
                    async for completion in completions:
                        yield completion
                if work.left == 0:
                    return
                raise OffbeatError(
                    f"engine {replica.index} gave {len(work.done)} of {work.request.n} samples"
                )
            except RequestRefused:
                raise
            except (
                Exception
            ) as error:  # boundary: whatever ends a request may have ended its engine
                if not replica.has_left(engine):
                    await self._sync().check(replica, engine, error)
                out = replica.has_left(engine)
                if not left or loop.time() >= until or not work.goes_on(left=out):
                    raise
                log.info(
                    "request %s goes on with %d samples, %d of them begun: %s",
                    work.request.request_id, work.left, len(work.tokens), error or repr(error),
                )  # fmt: skip

    async def _on(
        self, replica: Replica[Engine], work: _Work, until: float
    ) -> AsyncGenerator[Completion, None]:
        """What is left of a request on one engine, to the end of its stream."""
        stream = replica.engine.generate(work.rest(self._snapshot_every))
        limit = _Limit(replica, until)
        with self._router.load(replica, work.left) as one_ended, limit:
            async with contextlib.aclosing(stream):
                while (item := await limit.next(stream)) is not None:
                    if (completion := work.take(item)) is not None:
                        one_ended()
                        yield completion


class _Limit:
    """Ends the wait for an item at `until`, or in the moment the engine is taken out.

    One timer for a whole stream: entered around it, by the task that takes items with `next`.
    """

    def __init__(self, replica: Replica[Engine], until: float) -> None:
        self._replica, self._engine, self._until = replica, replica.engine, until
        self._over = False
        self._waiting = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watched = self._replica.watched(self._end)
        self._watched.__enter__()
        self._timer = asyncio.get_running_loop().call_at(self._until, self._end)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._watched.__exit__(None, None, None)

    async def next(
        self, stream: AsyncGenerator[Completion | Progress, None]
    ) -> Completion | Progress | None:
        """The stream's next item, None at its end.

        Raises `EngineLeft` once the engine is taken out, `TimeoutError` at `until`.
        """
        if self._over or self._replica.has_left(self._engine):
            raise self._why()
        self._waiting, others = True, self._task.cancelling()
        try:
            return await anext(stream, None)
        except asyncio.CancelledError:
            if self._over and self._task.cancelling() == others + 1:
                raise self._why() from None
            raise
        finally:
            self._waiting = False
            if self._over:
                self._task.uncancel()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            if self._waiting:
                self._task.cancel()

    def _why(self) -> Exception:
        if self._replica.has_left(self._engine):
            return EngineLeft(f"engine {self._replica.index} was taken out")
        return TimeoutError()
