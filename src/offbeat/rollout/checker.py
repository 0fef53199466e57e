"""The exact checker of a validation: the user's function, in a worker process of its own.

It is called as a reward function is, `(prompts, completions, **columns) -> list[float | None]`,
with whole texts: where an answer ends is the checker's to say. In a process it can hang, crash or
hold the interpreter as it likes; nobody else waits. A call that fails is taken apart, so that one
odd completion is unscored and no other. What is not checked when the validation's time is over is
unscored as well, and the process is started anew for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Sequence
from pathlib import Path

from offbeat.errors import UserError
from offbeat.records import Completion, Prompt, ScoreItem
from offbeat.reward.function import WorkerFailed, WorkerProcess
from offbeat.reward.function_style import Outcome

log = logging.getLogger(__name__)
SETTING = "validate.function"
AT_ONCE = 64
"""Completions of one call at most: fewer, once so many have been too slow together."""
CALL_SECONDS = 60.0
MORE_TIMEOUTS = 3
"""So many completions more of a call, checked alone, time out than are answered before the rest is
called together again."""
ROUNDS = 2
"""Calls that a completion is in before it fails with others: one that hangs on everything takes
eight of `CALL_SECONDS` for a part."""
LATE = "validation_deadline"
"""Cause of a score or reward that was not there when the validation's time was over."""

Values = list[float | str | None]


class Checker:
    """Scores completions; `spec` and `base` say where the function is, as for reward sources."""

    def __init__(self, spec: str, base: Path) -> None:
        """Starts nothing."""
        self._worker = WorkerProcess(spec, base.resolve(), SETTING)
        self._turn = asyncio.Lock()
        self._limit = AT_ONCE

    async def start(self) -> None:
        """Starts the process; raises `UserError` where the function cannot be used."""
        try:
            await self._worker.start()
        except WorkerFailed as failed:
            raise UserError(f"{SETTING}: {failed.reason}") from None

    async def check(
        self, answers: Sequence[tuple[Prompt, Completion]], until: float = math.inf
    ) -> list[float | None]:
        """A score for each answer, None where there is none: no opinion, no number, a failure, or
        too late. At `until` (the event loop's time) a call under way is ended with its process.

        Raises `UserError` when every completion failed: then the function is to be mended.
        """
        values: Values = []
        while len(values) < len(answers):
            part = answers[len(values) : len(values) + self._limit]
            values += await self._part([item_of(prompt, answer) for prompt, answer in part], until)
        _tell(values)
        return [
            None if isinstance(value, str | None) or not math.isfinite(value) else float(value)
            for value in values
        ]

    async def stop(self) -> None:
        """Ends the process."""
        await self._worker.kill()

    async def _part(self, items: Sequence[ScoreItem], until: float, rounds: int = ROUNDS) -> Values:
        """One call, taken apart where it fails as a whole. Failures are texts."""
        values, cause = await self._call(items, until)
        if cause in (None, LATE) or len(items) == 1:
            return values
        # In no order: answers to one prompt are neighbours, and may all hang.
        untried = random.Random(0).sample(range(len(items)), len(items))
        clock = asyncio.get_running_loop().time
        late, seconds = 0, 0.0
        while untried and late < MORE_TIMEOUTS:
            place, began = untried.pop(), clock()
            (values[place],), alone = await self._call([items[place]], until)
            late += 1 if alone == "timeout" else -1
            seconds += clock() - began if alone is None else 0.0
        if cause == "timeout":
            self._shrink(len(items), seconds)
        if untried and rounds > 1:
            found = await self._part([items[place] for place in untried], until, rounds - 1)
            for place, value in zip(untried, found, strict=True):
                values[place] = value
        return values

    def _shrink(self, items: int, seconds: float) -> None:
        """A call was too late, and its answers took so long alone: later ones get fewer."""
        half = CALL_SECONDS / 2
        if seconds > half:
            self._limit = max(1, min(self._limit, int(items * half / seconds)))
            log.warning(
                "%s: %d completions take more than %.1f s, too long for one call; from now on it "
                "is called with %d at most", SETTING, items, seconds, self._limit,
            )  # fmt: skip

    async def _call(self, items: Sequence[ScoreItem], until: float) -> tuple[Values, str | None]:
        """The values, and the cause where the call as a whole failed."""
        late: Values = [LATE] * len(items)
        if asyncio.get_running_loop().time() >= until:
            return late, LATE
        try:
            async with asyncio.timeout_at(until) as limit, self._turn:
                answer = await self._worker.call(items, CALL_SECONDS)
        except WorkerFailed as failed:
            return [failed.reason] * len(items), failed.cause
        except TimeoutError:
            if not limit.expired():
                raise
            return late, LATE
        if "cause" in answer:
            return [str(answer["reason"])] * len(items), str(answer["cause"])
        return [_value(outcome) for outcome in answer["outcomes"]], None


def _tell(values: Values) -> None:
    """Says what has failed; raises `UserError` where that is everything."""
    failures = [value for value in values if isinstance(value, str) and value != LATE]
    if failures and len(failures) == len(values):
        raise UserError(
            f"{SETTING} failed on all {len(values)} completions: {failures[0]}; it must return "
            "a score or None for every completion"
        )
    if failures:
        log.warning("%s: %d completions: %s", SETTING, len(failures), failures[0])
    if late := values.count(LATE):
        log.warning(
            "%s: %d of %d completions were not checked when validate.deadline_seconds were over",
            SETTING, late, len(values),
        )  # fmt: skip


def _value(outcome: Outcome) -> float | str | None:
    return str(outcome["reason"]) if "cause" in outcome else outcome["value"]


def item_of(prompt: Prompt, completion: Completion) -> ScoreItem:
    """A completion as reward sources and the checker see it."""
    return ScoreItem(
        prompt, completion.text, completion.finish_reason, completion.tokens, completion.index
    )
