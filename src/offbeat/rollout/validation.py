"""Validation: held-out prompts, answered by one version of the policy, checked and scored.

```
 requests ──► rollout's engines │ engines of their own │ the trainer ──► answers of one version
                                                                            │
     metrics ◄── checker (a process of its own) and the run's reward loop ◄─┘
```

A prompt's answers are scored when all of them are there, by the same reward loop that serves
training, in the scope "validation"; only so many at once that training's samples find the judges
free. The version is pinned while answers are made; checking and scoring hold nothing up. Requests
and results are in the file's order, whoever answered first.

The run and `offbeat eval` share this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from offbeat.config import Config
from offbeat.errors import DeadlinePassed, RequestRefused, first_of
from offbeat.records import (
    Completion,
    GenerateRequest,
    PolicyVersion,
    Progress,
    Prompt,
    Sampling,
    Span,
)
from offbeat.reward.loop import RewardLoop
from offbeat.rollout.checker import Checker
from offbeat.rollout.dedicated import DedicatedEngines
from offbeat.rollout.engine import Engine
from offbeat.rollout.generation import Generation
from offbeat.rollout.marking import SCOPE, Marking, Scoring
from offbeat.weights.sync import WeightSync

log = logging.getLogger(__name__)
SHARE = 4
"""A fourth of what the narrowest reward source takes at once is validation's."""

Generate = Callable[[GenerateRequest], AsyncGenerator[Completion | Progress, None]]
Answered = Callable[[int, Sequence[Completion]], None]


class Validator:
    """A run's held-out prompts, its checker and its rewards."""

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        *,
        checker: Checker | None = None,
        rewards: RewardLoop | None = None,
        dedicated: DedicatedEngines | None = None,
    ) -> None:
        """Without a checker there is no accuracy; without rewards there are none of theirs."""
        self.config = config
        self.prompts = prompts
        self.checker = checker
        self.rewards = rewards if config.validation.rewards else None
        self.dedicated = dedicated
        narrowest = min((s.concurrency for s in config.active_rewards.values()), default=1)
        self._gate = asyncio.Semaphore(max(1, narrowest // (SHARE * config.validation.samples)))

    def requests(self) -> list[GenerateRequest]:
        """One request a prompt, in the file's order."""
        rollout, section = self.config.rollout, self.config.validation
        sampling = Sampling(rollout.max_tokens, section.temperature, rollout.stop)
        return [
            GenerateRequest(f"{SCOPE}/{place}", prompt.token_ids, section.samples, sampling)
            for place, prompt in enumerate(self.prompts)
        ]

    async def validate(
        self, published: WeightSync[Engine], generation: Generation
    ) -> tuple[int, dict[str, float]]:
        """Answers by the engines that `validate.on` names; the step of the version, and metrics.

        Through rollout's engines publications wait until the answers are there; engines of their
        own hold them up only while they load. Raises `DeadlinePassed` when the answers are not
        there by `validate.deadline_seconds`; what is not scored by then is counted as failed.
        """
        seconds = self.config.validation.deadline_seconds
        until = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.TaskGroup() as tasks:
                marking = self._marking(tasks)
                try:
                    async with asyncio.timeout_at(until) as limit:
                        step = await self._answers(published, generation, marking)
                except TimeoutError as late:
                    if not limit.expired():
                        raise
                    raise DeadlinePassed(
                        f'validation through validate.on = "{self.config.validation.on}" has '
                        f"{marking.answered_prompts} of {len(self.prompts)} prompts answered at "
                        f"validate.deadline_seconds = {seconds:g}"
                    ) from late
                metrics = await marking.metrics(until)
        except ExceptionGroup as group:
            raise first_of(group) from None
        return step, metrics

    async def through(self, generate: Generate) -> dict[str, float]:
        """Metrics of answers by one engine."""
        found: list[Completion] = []
        await ask(generate, self.requests(), self._at_once(), lambda _, part: found.extend(part))
        return await self.assess(found)

    async def assess(self, completions: Sequence[Completion]) -> dict[str, float]:
        """Metrics of answers that were made elsewhere to `requests`."""
        until = asyncio.get_running_loop().time() + self.config.validation.deadline_seconds
        try:
            async with asyncio.TaskGroup() as tasks:
                marking = self._marking(tasks)
                await marking.take(completions)
                return await marking.metrics(until)
        except ExceptionGroup as group:
            raise first_of(group) from None

    async def drain_spans(self) -> list[Span]:
        """Compute spans of the engines of its own since the last call."""
        return [] if self.dedicated is None else await self.dedicated.drain_spans()

    async def _answers(
        self, published: WeightSync[Engine], generation: Generation, marking: Marking
    ) -> int:
        """Has all answers made; the step of the version that made them."""
        if self.dedicated is None:
            async with published.lock:
                await ask(generation.patient, self.requests(), self._at_once(), marking.answered)
                return marking.step(published.floor)

        async def through(own: Generation, version: PolicyVersion) -> int:
            marking.forget()  # answers of an older version, if this is not the first time
            await ask(own.patient, self.requests(), self._at_once(), marking.answered)
            return marking.step(version.step)

        return await self.dedicated.pinned(published, through)

    def _at_once(self) -> int:
        """Requests in flight: as many as fill the seats of all engines."""
        section, rollout = self.config.validation, self.config.rollout
        engines = section.replicas if section.on == "dedicated" else rollout.replicas
        return max(1, rollout.seats * engines // section.samples)

    def _marking(self, tasks: asyncio.TaskGroup) -> Marking:
        names = () if self.rewards is None else tuple(self.config.active_rewards)
        return Marking(
            self.prompts,
            Scoring(self.rewards, names, self._gate),
            self.checker,
            samples=self.config.validation.samples,
            column=self.config.data.source_column,
            tasks=tasks,
        )


async def ask(
    generate: Generate, requests: Sequence[GenerateRequest], at_once: int, answered: Answered
) -> None:
    """Sends the requests in order, `at_once` at a time; tells the completions of each, by index,
    when all are there. One that the engine refuses is told without any."""
    waiting = iter(enumerate(requests))

    async def one_after_another() -> None:
        for place, request in waiting:
            found: list[Completion] = []
            try:
                async with contextlib.aclosing(generate(request)) as stream:
                    async for item in stream:
                        if isinstance(item, Completion):
                            found.append(replace(item, ref=None))  # nobody wants its tokens
            except RequestRefused as refused:
                log.warning("not validated: %s", refused)
            answered(place, sorted(found, key=lambda completion: completion.index))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(at_once, len(requests))):
            tasks.create_task(one_after_another())
