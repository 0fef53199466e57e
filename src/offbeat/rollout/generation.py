"""One request on one engine: routed, counted, within its deadline, and the engine's end noticed.

Invariant: when a request has failed, its engine is either well or out of routing before the caller
hears of it, so that whoever tries again does not meet a dead engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from offbeat.config import RolloutSection
from offbeat.errors import OffbeatError, RequestRefused
from offbeat.records import Completion, GenerateRequest, Progress
from offbeat.rollout.engine import Engine
from offbeat.rollout.router import Router
from offbeat.weights.sync import WeightSync


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

    async def once(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        """The completions as they end; `TimeoutError` at the deadline."""
        until = asyncio.get_running_loop().time() + self._deadline
        replica = await self._router.pick(self._deadline)
        engine = replica.engine
        with self._router.load(replica, request.n):
            try:
                async with contextlib.aclosing(engine.generate(request)) as completions:
                    while True:
                        async with asyncio.timeout_at(until):
                            completion = await anext(completions, None)
                        if completion is None:
                            return
                        if isinstance(completion, Progress):
                            continue
                        if completion.finish_reason == "aborted":
                            raise OffbeatError("generation was aborted")
                        yield completion
            except RequestRefused:
                raise
            except (
                Exception
            ) as error:  # boundary: whatever ends a request may have ended its engine
                await self._sync().check(replica, engine, error)
                raise

    async def patient(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        """The same, begun anew when it fails: for those who have no attempts of their own."""
        for left in reversed(range(self._max_attempts)):
            try:
                async for completion in self.once(request):
                    yield completion
                return
            except RequestRefused:
                raise
            except Exception:  # boundary: the last failure is the caller's
                if not left:
                    raise
