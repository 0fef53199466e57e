"""The reward loop: samples go to the sources of their row and come back with one total each.

```
 sample ends ──► rate: every source that scores samples one by one, at once   ┐
 group ends  ──► finish: sources that compare, normalisation, combination     ┴─► Scored
```

Invariants: each source that the row picks gives exactly one typed outcome per sample; a failure is
retried in one place only (calls of a `base_url` by its endpoint pool, all else by this loop) and
is never a number; a sample that was lost with its replica, or left untried when others broke its
call, is asked again, whatever `retries` says; per source, scored + abstained + failed equals the
samples seen. One loop serves training, validation and `offbeat score`, each in a scope of its own:
their counts are kept apart. The loop owns no task beyond a call; deadlines of calls are the
sources' own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from offbeat.config import RewardSourceSection
from offbeat.errors import DeadlinePassed, UserError, first_of
from offbeat.pick import picked
from offbeat.records import Reward, ScoreItem, Span
from offbeat.reward.combine import Decision, combine_group, present
from offbeat.reward.normalise import Normalizer
from offbeat.reward.replicas import LOST
from offbeat.reward.source import RewardSource
from offbeat.reward.stats import Counters, SourceStats
from offbeat.reward.together import together
from offbeat.reward.waiting import UNTRIED
from offbeat.reward.watch import SourceWatch
from offbeat.track.transcripts import TranscriptWriter

__all__ = ["RewardLoop", "Scored", "SourceStats"]

BACKOFF_SECONDS = 0.1
BACKOFF_LIMIT_SECONDS = 5.0
STOP_SECONDS = 30.0
DETERMINISTIC = frozenset({"too_long", "template_error"})
"""Causes that the same sample meets again: retrying them is a waste."""
READINGS = frozenset({"unparseable", "out_of_range", "no_majority"})
"""Causes in the words of a judge, which another draw may not have."""
OF_OTHERS = frozenset({LOST, UNTRIED})
"""Causes that tell nothing of the sample: its replica died, or others of its call took the time."""
LOST_LIMIT = 2
"""Times that a sample is asked again for them. One that lost three replicas is likelier what kills
them than a victim, and a function that leaves a sample untried three times hangs on nearly all."""
TRAIN = "train"

Rewards = dict[str, Reward]


@dataclass(frozen=True, slots=True)
class Scored:
    """All rewards of one sample, their total (None if dropped), what to do with it, the total's
    parts (`Sample.parts`), and whether a veto left nothing of it."""

    rewards: Rewards
    total: float | None
    verdict: Decision
    parts: Mapping[str, float] = field(default_factory=dict)
    vetoed: bool = False


class RewardLoop:
    """Scores samples with the sources of their row; made by `await RewardLoop.create(...)`."""

    def __init__(
        self,
        sources: Mapping[str, RewardSource],
        config: Mapping[str, RewardSourceSection],
        *,
        column: str = "reward",
        known: tuple[str, ...] = (),
        transcripts: TranscriptWriter | None = None,
    ) -> None:
        """Use `create`: this one takes sources that are already started.

        `column` holds a row's own choice of sources, `known` names that it may hold beside them.
        """
        if set(sources) != set(config):
            odd = ", ".join(sorted(set(sources) ^ set(config)))
            raise UserError(f"reward sources and [reward] sections do not match: {odd}")
        self._sources, self._config = dict(sources), dict(config)
        self._column, self._known = column, known
        self._transcripts = transcripts
        self._all: dict[str, dict[str, Counters]] = {}
        self._step = {name: Counters() for name in sources}
        self._same_for_all = not any(section.when for section in config.values())
        self._normalizers = {
            name: Normalizer(section)
            for name, section in config.items()
            if section.normalize != "none"
        }
        self._watch = SourceWatch(self._sources, self._config, self._ask)

    @classmethod
    async def create(
        cls,
        sources: Mapping[str, RewardSource],
        config: Mapping[str, RewardSourceSection],
        *,
        column: str = "reward",
        known: tuple[str, ...] = (),
        transcripts: TranscriptWriter | None = None,
        deadline_seconds: float = 600.0,
    ) -> RewardLoop:
        """Starts all sources at once; if one cannot start, stops the others and says why."""
        loop = cls(sources, config, column=column, known=known, transcripts=transcripts)
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

    # -- scoring ---------------------------------------------------------------------------------

    async def rate(self, item: ScoreItem, *, scope: str = TRAIN, attempt: int = 0) -> Rewards:
        """The outcomes of the row's sources that score a sample alone, from the moment it ends."""
        names = [name for name in self._picked(item) if not self._config[name].grouped]
        found = await self._all_of(names, [item], scope, attempt)
        return {name: rewards[0] for name, rewards in found.items()}

    def spoils(self, rewards: Rewards) -> list[str]:
        """The sources whose failure drops the whole group."""
        return [
            name
            for name, reward in rewards.items()
            if reward.status == "failed" and self._config[name].on_failure == "drop_group"
        ]

    async def finish(
        self,
        items: Sequence[ScoreItem],
        rated: Sequence[Rewards],
        *,
        scope: str = TRAIN,
        attempt: int = 0,
    ) -> list[Scored]:
        """What a group comes to when all its samples have ended and were rated, in order."""
        if not items:
            return []
        names = self._picked(items[0])
        grouped = [name for name in names if self._config[name].grouped]
        compared = await self._all_of(grouped, items, scope, attempt) if grouped else {}
        rewards = [
            {name: compared[name][i] if name in compared else rated[i][name] for name in names}
            for i in range(len(items))
        ]
        rewards = self._normalised(rewards, learn=scope == TRAIN)
        combined = combine_group(rewards, self._config)
        return [
            Scored(of_sample, one.total, one.verdict, one.parts, one.vetoed)
            for of_sample, one in zip(rewards, combined, strict=True)
        ]

    async def score_group(
        self, items: Sequence[ScoreItem], *, scope: str = TRAIN, attempt: int = 0
    ) -> list[Scored]:
        """Rates and finishes samples of one prompt that have all ended."""
        rated = await together(*(self.rate(item, scope=scope, attempt=attempt) for item in items))
        return await self.finish(items, rated, scope=scope, attempt=attempt)

    async def score(self, item: ScoreItem, *, scope: str = TRAIN) -> Scored:
        """The same for one sample alone."""
        (scored,) = await self.score_group([item], scope=scope)
        return scored

    @property
    def sources(self) -> Mapping[str, RewardSource]:
        """The sources by name, for who asks them beside samples: nothing of that is counted."""
        return self._sources

    # -- sources that are down -------------------------------------------------------------------

    @property
    def stalled(self) -> tuple[str, ...]:
        """Sources that are down or fail too much: nothing is to be admitted meanwhile."""
        return self._watch.stalled

    @property
    def stalled_seconds(self) -> float:
        """Seconds in which some source was stalled, since the start."""
        return self._watch.stalled_seconds

    def notices(self) -> list[str]:
        """Lines for the user about the sources, since the last call."""
        return self._watch.notices()

    async def watch(self, on_change: Callable[[], Awaitable[None]] | None = None) -> None:
        """Watches the sources for ever: run it as a task beside the scoring.

        `on_change` is told when `stalled` has changed. Raises `RewardsDown` past a source's
        patience.
        """
        await self._watch.run(on_change or _nothing)

    # -- numbers ---------------------------------------------------------------------------------

    def stats(self, scope: str = TRAIN) -> dict[str, SourceStats]:
        """Counts since the start, by source, of one scope."""
        counters = self._counters(scope)
        return {name: counters[name].snapshot(self._facts(name)) for name in self._sources}

    def drain(self) -> dict[str, SourceStats]:
        """Counts of training since the last drain (a step's), by source."""
        drained = {name: c.snapshot(self._facts(name)) for name, c in self._step.items()}
        self._step = {name: Counters() for name in self._sources}
        return drained

    async def drain_spans(self) -> list[Span]:
        """Compute spans of all sources since the last call."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(s.drain_spans()) for s in self._sources.values()]
        return [span for task in tasks for span in task.result()]

    async def stop(self) -> None:
        """Stops all sources at once, also when one fails; waits 30 s at most."""
        stops = [source.stop() for source in self._sources.values()]
        try:
            async with asyncio.timeout(STOP_SECONDS):
                results = await asyncio.gather(*stops, return_exceptions=True)
        finally:
            if self._transcripts is not None:
                await asyncio.to_thread(self._transcripts.close)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    # -- helpers ---------------------------------------------------------------------------------

    def _picked(self, item: ScoreItem) -> tuple[str, ...]:
        columns = item.prompt.columns
        if self._same_for_all and columns.get(self._column) is None:
            return self._for_all
        return picked(columns, self._config, self._column, self._known)

    @cached_property
    def _for_all(self) -> tuple[str, ...]:
        """The sources of every row that names none, while no source has a condition."""
        return picked({}, self._config, self._column, self._known)

    def _counters(self, scope: str) -> dict[str, Counters]:
        if (found := self._all.get(scope)) is None:
            found = self._all[scope] = {name: Counters() for name in self._sources}
        return found

    def _facts(self, name: str) -> dict[str, float]:
        facts = dict(self._sources[name].facts())
        if (normalizer := self._normalizers.get(name)) is not None:
            facts |= normalizer.facts()
        return facts

    async def _all_of(
        self, names: Sequence[str], items: Sequence[ScoreItem], scope: str, attempt: int
    ) -> dict[str, list[Reward]]:
        """Asks several sources at once, and books what they said."""
        outcomes = await together(*(self._outcomes(name, items) for name in names))
        found = dict(zip(names, outcomes, strict=True))
        if self._transcripts is not None:
            rows = [{name: found[name][i] for name in names} for i in range(len(items))]
            self._transcripts.write(scope, attempt, items, rows)
        counted = [self._counters(scope), *([self._step] if scope == TRAIN else ())]
        return {
            name: [self._count(name, r, [of_all[name] for of_all in counted]) for r in of]
            for name, of in found.items()
        }

    def _count(self, name: str, reward: Reward, counted: Sequence[Counters]) -> Reward:
        """Counts what happened; with on_failure "abstain" a failure then counts as no opinion."""
        for counters in counted:
            counters.add(reward)
        if reward.status == "failed" and self._config[name].on_failure == "abstain":
            reward = replace(reward, status="abstained")
        return replace(reward, transcripts=()) if reward.transcripts else reward

    def _normalised(self, rewards: Sequence[Rewards], *, learn: bool) -> list[Rewards]:
        """With each source's own normalisation, by the same constants for the whole group."""
        found = [dict(one) for one in rewards] if self._normalizers else list(rewards)
        for name, normalizer in self._normalizers.items():
            places = [i for i, one in enumerate(found) if name in one and present(one[name])]
            values = [value for i in places if (value := found[i][name].value) is not None]
            for i, value in zip(places, normalizer.group(values, learn=learn), strict=True):
                found[i][name] = replace(found[i][name], value=value)
        return found

    async def _outcomes(self, name: str, items: Sequence[ScoreItem]) -> list[Reward]:
        """One outcome an item, after retries of a call in which all of them failed."""
        section = self._config[name]
        budget = section.retries
        retries = lost = 0
        rewards = await self._ask(name, items)
        while all(_worth_retrying(reward, section) for reward in rewards):
            spared = any(reward.cause in OF_OTHERS for reward in rewards)
            if spared and lost < LOST_LIMIT:
                lost += 1
            elif not spared and retries < budget:
                retries += 1
            else:
                break
            pause = min(BACKOFF_LIMIT_SECONDS, BACKOFF_SECONDS * 2 ** (retries + lost - 1))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            rewards = _behind(rewards, await self._ask(name, items))
        self._watch.record(name, items, rewards)
        if not (more := retries + lost):
            return rewards
        return [replace(reward, retries=reward.retries + more) for reward in rewards]

    async def _ask(self, name: str, items: Sequence[ScoreItem]) -> list[Reward]:
        """One call; what breaks the source's contract becomes a typed failure too."""
        try:
            rewards = await self._sources[name].score(items)
            if len(rewards) != len(items):
                raise ValueError(f"{len(rewards)} rewards for {len(items)} samples")
        except Exception as failure:  # boundary: a source's failure is never the run's
            error = first_of(failure)
            reason = f"{type(error).__name__}: {error}"
            return [Reward.failed(name, "source_error", reason=reason) for _ in items]
        return [
            replace(reward, status="failed", value=None, cause="non_finite")
            if reward.status == "scored" and not present(reward)
            else reward
            for reward in rewards
        ]


async def _nothing() -> None:
    """Nobody is to be told."""


def _behind(before: Sequence[Reward], rewards: Sequence[Reward]) -> list[Reward]:
    """What was said at last, with the calls of every try: all of them were made and paid for."""
    return [
        replace(reward, transcripts=(*earlier.transcripts, *reward.transcripts))
        if earlier.transcripts
        else reward
        for earlier, reward in zip(before, rewards, strict=True)
    ]


def _worth_retrying(reward: Reward, section: RewardSourceSection) -> bool:
    """Whether this loop is to ask again: of a server only for another draw of its words, as the
    endpoint pool has retried all else."""
    if reward.status != "failed" or reward.cause in DETERMINISTIC:
        return False
    if section.base_url is not None and reward.cause not in READINGS:
        return False
    if section.kind == "disrm":
        return reward.cause != "non_finite"
    if section.kind == "genrm" and section.temperature == 0:
        return reward.cause not in READINGS
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
