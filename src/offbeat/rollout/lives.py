"""A group's life from admission up to ready: generate, score every sample as it ends, try again.

```
 begin ──► generate ──► score ──► ready            what fails begins again as the next attempt,
             ▲  tokens durable │    rewards durable   under the same ordinal; a late answer of an
             └── attempt + 1 ──┘                      older attempt is ignored
```
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count

from offbeat.config import Config
from offbeat.errors import OffbeatError, RequestRefused, RunFailed, first_of
from offbeat.faults import apoint
from offbeat.records import Completion, GenerateRequest, Payload, Prompt, Sample, Sampling
from offbeat.reward.budget import WINDOW
from offbeat.reward.loop import RewardLoop
from offbeat.rollout.books import Books
from offbeat.rollout.generation import Generation
from offbeat.rollout.parts import GroupFailed, Tally, cause_of
from offbeat.rollout.router import Place
from offbeat.rollout.scoring import Rated, combine, rate

log = logging.getLogger(__name__)
Fetch = Callable[[Sequence[Completion]], Awaitable[list[Payload]]]


async def here(completions: Sequence[Completion]) -> list[Payload]:
    """The payloads of completions that carry them."""
    return [completion.ref for completion in completions]


class Lives:
    """Runs groups; `open` is set while engines hold what they are to generate with.

    `floor` is the engines' at the moment; `changed` is notified whenever a batch may have become
    possible; `fetch` gives the token arrays behind completions.
    """

    def __init__(
        self,
        config: Config,
        books: Books,
        rewards: RewardLoop,
        generation: Generation,
        sampling: Sampling,
        floor: Callable[[], int],
        changed: asyncio.Condition,
        fetch: Fetch = here,
    ) -> None:
        self.open = asyncio.Event()
        self.tally = Tally()
        self._size = config.rollout.group_size
        self._max_attempts = config.rollout.max_attempts
        self._min_scored = config.train.min_scored
        self._most_failures = max(3 * config.max_live_groups, WINDOW // self._size)
        self._failures_in_a_row = 0
        self._books, self._rewards, self._generation = books, rewards, generation
        self._sampling, self._floor, self._changed, self._fetch = sampling, floor, changed, fetch

    async def begin(self, prompt: Prompt) -> None:
        """A group that has just been admitted."""
        await self._life(prompt, 0, None)

    async def again(self, prompt: Prompt, attempt: int) -> None:
        """A group whose tokens are lost: the next attempt, once engines may be asked."""
        new = await self._retry(prompt.ordinal, attempt)
        if new is not None:
            await self._life(prompt, new, None)

    async def score(self, prompt: Prompt, attempt: int, generated: Sequence[Completion]) -> None:
        """A group that has its samples, but not their rewards."""
        await self._life(prompt, attempt, generated)

    async def discard(self, ordinal: int, attempt: int, reason: str) -> bool:
        """The group is over, by name; `RunFailed` after too many on end. False if this attempt was
        over before."""
        async with self._changed:
            if not await self._books.discard(ordinal, attempt, reason):
                return False  # discarded before, as a straggler
            self._failures_in_a_row += 1
            self._changed.notify_all()
        log.warning("group %d discarded: %s", ordinal, reason)
        most = self._most_failures
        if self._failures_in_a_row >= most and not self._rewards.stalled:
            raise RunFailed(f"{most} groups on end were discarded, the last one for: {reason}")
        return True

    async def _life(
        self, prompt: Prompt, attempt: int, generated: Sequence[Completion] | None
    ) -> None:
        place = Place()
        for failures in count(1):
            try:
                if generated is None:
                    samples = await self._generate(prompt, attempt, place)
                else:
                    samples = await self._scored(prompt, attempt, _each(generated), fresh=False)
            except GroupFailed as failure:
                await self.discard(prompt.ordinal, attempt, str(failure))
                return None
            except Exception as error:  # boundary: one group's failure never touches another
                cause = cause_of(error)
                log.warning("group %d attempt %d: %s: %s", prompt.ordinal, attempt, cause, error)
                if failures >= self._max_attempts:
                    await self.discard(prompt.ordinal, attempt, f"generation: {cause}")
                    return None
                new = await self._retry(prompt.ordinal, attempt)
                if new is None:
                    return None  # discarded meanwhile, as a straggler, or now, as too late
                attempt, generated = new, None
                continue
            return await self._finish(prompt, attempt, samples)

    async def _retry(self, ordinal: int, attempt: int) -> int | None:
        """The next attempt, once engines may be asked; None if the group is over."""
        await self.open.wait()
        new = await self._books.retry(ordinal, attempt, self._floor())
        if new is None:
            async with self._changed:  # another group may take its place
                self._changed.notify_all()
        return new

    async def _generate(self, prompt: Prompt, attempt: int, place: Place) -> list[Sample]:
        """Generates on one engine at a time."""
        request = GenerateRequest(
            f"{prompt.ordinal}.{attempt}", prompt.token_ids, self._size, self._sampling
        )
        await apoint("rollout.generate")
        samples = self._generation.once(request, place)
        return await self._scored(prompt, attempt, samples, fresh=True)

    async def _scored(
        self, prompt: Prompt, attempt: int, samples: AsyncIterator[Completion], *, fresh: bool
    ) -> list[Sample]:
        """Scores every sample from the moment it comes; when all have come, `fresh` tokens are made
        durable."""
        rating: list[asyncio.Task[Rated]] = []
        completions: list[Completion] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                async for completion in samples:
                    await apoint("rollout.completion")
                    completions.append(completion)
                    one = rate(self._rewards, prompt, completion, attempt)
                    rating.append(tasks.create_task(one))
                    self.tally.generated_tokens += completion.tokens if fresh else 0
                if fresh:
                    await self._generated(prompt, attempt, completions)
        except ExceptionGroup as group:
            error = first_of(group)
            if isinstance(error, RequestRefused):
                raise GroupFailed("refused") from error
            raise error from None
        rated = [task.result() for task in rating]
        return await combine(self._rewards, rated, attempt, self._min_scored)

    async def _generated(self, prompt: Prompt, attempt: int, completions: list[Completion]) -> None:
        if len(completions) != self._size:
            raise OffbeatError(f"engine gave {len(completions)} of {self._size} samples")
        payloads = await self._fetch(completions)
        if not await self._books.generated(prompt, attempt, completions, payloads):
            raise GroupFailed("superseded")

    async def _finish(self, prompt: Prompt, attempt: int, samples: list[Sample]) -> None:
        async with self._changed:
            if await self._books.ready(prompt, attempt, samples):
                self._failures_in_a_row = 0
                if self._books.buffer.may_be_taken():
                    self._changed.notify_all()


async def _each(samples: Sequence[Completion]) -> AsyncIterator[Completion]:
    for sample in samples:
        yield sample
