"""The reward loop: a finished sample goes to all sources at once and comes back with one verdict.

Invariants: each source gives exactly one typed outcome per sample; a failure is retried in one
place only (the endpoint pool for a `base_url`, this loop for everything else) and is never a
number; a call that was lost with its replica is asked again, whatever `retries` says; per source,
scored + abstained + failed equals the samples seen. The loop owns no task beyond a call of
`score`; deadlines of calls are the sources' own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from offbeat.config import RewardSourceSection
from offbeat.errors import DeadlinePassed, UserError
from offbeat.records import Reward, ScoreItem, Span
from offbeat.reward.combine import Decision, combine, decide, present
from offbeat.reward.replicas import LOST
from offbeat.reward.source import RewardSource

__all__ = ["RewardLoop", "Scored", "SourceStats"]

BACKOFF_SECONDS = 0.1
BACKOFF_LIMIT_SECONDS = 5.0
STOP_SECONDS = 30.0
DETERMINISTIC = frozenset({"too_long", "template_error"})
"""Causes that the same sample meets again: retrying them is a waste."""
LOST_LIMIT = 2
"""Times that a sample is asked again because its replica died. One that lost three replicas is
likelier what kills them than a victim."""


@dataclass(frozen=True, slots=True)
class Scored:
    """All sources' rewards of one sample, their total (None if dropped) and what to do with it."""

    rewards: dict[str, Reward]
    total: float | None
    verdict: Decision


@dataclass(frozen=True, slots=True)
class SourceStats:
    """What a source did: counts of outcomes, failures by cause, retries, mean of scored values."""

    scored: int = 0
    abstained: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    retries: int = 0
    mean: float | None = None


class _Counters:
    """Running counts of one source."""

    def __init__(self) -> None:
        self.scored = self.abstained = self.retries = 0
        self.failed: Counter[str] = Counter()
        self.mean = 0.0

    def add(self, reward: Reward) -> None:
        self.retries += reward.retries
        if reward.status == "scored" and reward.value is not None:
            self.scored += 1
            self.mean += (reward.value - self.mean) / self.scored
        elif reward.status == "abstained":
            self.abstained += 1
        else:
            self.failed[reward.cause or "unknown"] += 1

    def snapshot(self) -> SourceStats:
        mean = self.mean if self.scored else None
        return SourceStats(self.scored, self.abstained, dict(self.failed), self.retries, mean)


class RewardLoop:
    """Scores samples with all sources; made by `await RewardLoop.create(...)`."""

    def __init__(
        self, sources: Mapping[str, RewardSource], config: Mapping[str, RewardSourceSection]
    ) -> None:
        """Use `create`: this one takes sources that are already started."""
        if set(sources) != set(config):
            odd = ", ".join(sorted(set(sources) ^ set(config)))
            raise UserError(f"reward sources and [reward] sections do not match: {odd}")
        self._sources = dict(sources)
        self._config = dict(config)
        self._weights = {name: section.weight for name, section in config.items()}
        self._all = {name: _Counters() for name in sources}
        self._step = {name: _Counters() for name in sources}

    @classmethod
    async def create(
        cls,
        sources: Mapping[str, RewardSource],
        config: Mapping[str, RewardSourceSection],
        *,
        deadline_seconds: float = 600.0,
    ) -> RewardLoop:
        """Starts all sources at once; if one cannot start, stops the others and says why."""
        loop = cls(sources, config)
        started = False
        try:
            async with asyncio.timeout(deadline_seconds), asyncio.TaskGroup() as group:
                for name, source in sources.items():
                    group.create_task(source.start(), name=f"start reward/{name}")
            started = True
        except TimeoutError as late:
            names = ", ".join(sources)
            raise DeadlinePassed(
                f"reward sources ({names}) did not start within {deadline_seconds:g} s"
            ) from late
        except BaseExceptionGroup as failures:
            raise _first(failures) from failures
        finally:
            if not started:
                with contextlib.suppress(Exception):  # what went wrong first is what matters
                    await loop.stop()
        return loop

    async def score(self, item: ScoreItem) -> Scored:
        """Asks all sources at once; returns their outcomes, the total and the verdict."""
        async with asyncio.TaskGroup() as group:
            tasks = {
                name: group.create_task(self._outcome(name, item), name=f"reward/{name}")
                for name in self._sources
            }
        rewards = {name: self._count(name, task.result()) for name, task in tasks.items()}
        total = combine(rewards, self._weights)
        verdict = decide(rewards, self._config, total)
        return Scored(rewards, total if verdict == "keep" else None, verdict)

    def stats(self) -> dict[str, SourceStats]:
        """Counts since the start, by source."""
        return {name: counters.snapshot() for name, counters in self._all.items()}

    def drain(self) -> dict[str, SourceStats]:
        """Counts since the last drain (a step's), by source."""
        drained = {name: counters.snapshot() for name, counters in self._step.items()}
        self._step = {name: _Counters() for name in self._sources}
        return drained

    async def drain_spans(self) -> list[Span]:
        """Compute spans of all sources since the last call."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(s.drain_spans()) for s in self._sources.values()]
        return [span for task in tasks for span in task.result()]

    async def stop(self) -> None:
        """Stops all sources at once, also when one fails; waits 30 s at most."""
        stops = [source.stop() for source in self._sources.values()]
        async with asyncio.timeout(STOP_SECONDS):
            results = await asyncio.gather(*stops, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _count(self, name: str, reward: Reward) -> Reward:
        """Counts what happened; with on_failure "abstain" a failure then counts as no opinion."""
        self._all[name].add(reward)
        self._step[name].add(reward)
        if reward.status == "failed" and self._config[name].on_failure == "abstain":
            return replace(reward, status="abstained")
        return reward

    async def _outcome(self, name: str, item: ScoreItem) -> Reward:
        section = self._config[name]
        budget = 0 if section.base_url is not None else section.retries
        retries = lost = 0
        reward = await self._ask(name, item)
        while _worth_retrying(reward, section):
            if reward.cause == LOST and lost < LOST_LIMIT:
                lost += 1
            elif reward.cause != LOST and retries < budget:
                retries += 1
            else:
                break
            pause = min(BACKOFF_LIMIT_SECONDS, BACKOFF_SECONDS * 2 ** (retries + lost - 1))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            reward = await self._ask(name, item)
        return replace(reward, retries=reward.retries + retries + lost)

    async def _ask(self, name: str, item: ScoreItem) -> Reward:
        """One call; what breaks the source's contract becomes a typed failure too."""
        try:
            (reward,) = await self._sources[name].score([item])
        except Exception as error:
            return Reward.failed(name, "source_error", reason=f"{type(error).__name__}: {error}")
        if reward.status == "scored" and not present(reward):
            return replace(reward, status="failed", value=None, cause="non_finite")
        return reward


def _worth_retrying(reward: Reward, section: RewardSourceSection) -> bool:
    if reward.status != "failed" or reward.cause in DETERMINISTIC:
        return False
    if section.kind == "disrm":
        return reward.cause != "non_finite"
    if section.kind == "genrm" and section.temperature == 0:
        return reward.cause not in {"unparseable", "out_of_range"}
    return True


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The user's own mistake if there is one, else the first failure."""
    flat: list[BaseException] = []
    pending: list[BaseException] = [failures]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            flat.append(error)
    return next((error for error in flat if isinstance(error, UserError)), flat[0])
