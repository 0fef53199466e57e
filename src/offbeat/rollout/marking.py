"""What becomes of a validation's answers: scored prompt by prompt, checked, and summed up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.errors import OffbeatError
from offbeat.records import Completion, Prompt, Reward
from offbeat.reward.loop import RewardLoop, Scored
from offbeat.rollout.checker import LATE, Checker, item_of
from offbeat.rollout.validation_metrics import Answer, summarise
from offbeat.texts import writable

log = logging.getLogger(__name__)
SCOPE = "validation"
AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Scoring:
    """The reward loop (None: nothing is scored), its sources' names, and how many prompts at once:
    the gate is shared by all validations of a run."""

    rewards: RewardLoop | None
    names: tuple[str, ...]
    gate: asyncio.Semaphore


class Marking:
    """One validation's answers. `tasks` owns the scoring."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        scoring: Scoring,
        checker: Checker | None,
        *,
        samples: int,
        column: str,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """`samples` are asked for of each prompt; `column` holds a row's data source."""
        self._prompts, self._scoring, self._checker = prompts, scoring, checker
        self._samples, self._column, self._tasks = samples, column, tasks
        self._answers: dict[int, Sequence[Completion]] = {}
        self._running: dict[int, asyncio.Task[list[Scored]]] = {}

    @property
    def answered_prompts(self) -> int:
        """Prompts whose answers are there."""
        return len(self._answers)

    def answered(self, place: int, completions: Sequence[Completion]) -> None:
        """Takes all completions of one prompt; their scoring begins."""
        self._answers[place] = completions
        if self._scoring.rewards is not None and completions:
            work = self._score(self._scoring.rewards, place, completions)
            self._running[place] = self._tasks.create_task(work, name=f"{SCOPE}/{place}")

    async def take(self, completions: Sequence[Completion]) -> None:
        """Takes completions of any prompts, told apart by their request's id."""
        by_place = await asyncio.to_thread(_by_place, completions, len(self._prompts))
        for place, found in enumerate(by_place):
            self.answered(place, found)
            if place % AT_ONCE == 0:
                await asyncio.sleep(0)  # nobody waits for thousands of tasks to be made

    def forget(self) -> None:
        """Drops all answers and ends their scoring."""
        for task in self._running.values():
            task.cancel()
        self._answers, self._running = {}, {}

    def step(self, expected: int) -> int:
        """The step of the one version that made all answers; `expected` where there is none.

        Raises `OffbeatError` when they are of several.
        """
        found = {step for c in self._all() for step in (c.version_min, c.version_max)}
        if len(found) > 1:
            raise OffbeatError(f"validation got answers of versions {sorted(found)} for one")
        return found.pop() if found else expected

    async def metrics(self, until: float) -> dict[str, float]:
        """Waits for scores and checks, not beyond `until` (the event loop's time)."""
        scores = await self._check(until)
        scored = await self._scored(until)
        return await asyncio.to_thread(self._summary, scores, scored)

    def _all(self) -> list[Completion]:
        """All completions, by prompt, then by index."""
        return [c for place in sorted(self._answers) for c in self._answers[place]]

    async def _score(
        self, rewards: RewardLoop, place: int, completions: Sequence[Completion]
    ) -> list[Scored]:
        items = [item_of(self._prompts[place], completion) for completion in completions]
        async with self._scoring.gate:
            return await rewards.score_group(items, scope=SCOPE, attempt=completions[0].version_max)

    async def _check(self, until: float) -> list[float | None]:
        """The checker's scores of all completions, in order; None for those that are late."""
        if self._checker is None:
            return [None] * len(self._all())
        pairs = [
            (self._prompts[place], completion)
            for place in sorted(self._answers)
            for completion in self._answers[place]
        ]
        return await self._checker.check(pairs, until)

    async def _scored(self, until: float) -> Mapping[int, list[Scored]]:
        """By prompt; those that are late are cancelled and absent."""
        if not self._running:
            return {}
        left = max(0.0, until - asyncio.get_running_loop().time())
        done, late = await asyncio.wait(self._running.values(), timeout=left)
        for task in late:
            task.cancel()
        if late:
            log.warning("%d prompts were not scored when the validation ended", len(late))
        return {place: task.result() for place, task in self._running.items() if task in done}

    def _summary(
        self, scores: Sequence[float | None], scored: Mapping[int, list[Scored]]
    ) -> dict[str, float]:
        names = self._scoring.names
        late = Scored({name: Reward.failed(name, LATE) for name in names}, None, "drop_sample")
        answers: list[Answer] = []
        checked = iter(scores)
        for place in sorted(self._answers):
            found = scored.get(place, [late] * len(self._answers[place]))
            for completion, of in zip(self._answers[place], found, strict=True):
                answers.append(
                    Answer(
                        place,
                        completion.tokens,
                        completion.finish_reason,
                        next(checked),
                        of.rewards,
                        of.total,
                    )
                )
        sources = [prompt.columns.get(self._column) for prompt in self._prompts]
        return summarise(
            answers,
            samples=self._samples,
            sources=[None if source is None else writable(str(source)) for source in sources],
            rewards=names,
        )


def _by_place(completions: Sequence[Completion], prompts: int) -> list[list[Completion]]:
    """The completions of each prompt, by index."""
    found: list[list[Completion]] = [[] for _ in range(prompts)]
    for completion in completions:
        found[int(completion.request_id.rpartition("/")[2])].append(completion)
    return [sorted(of, key=lambda completion: completion.index) for of in found]
