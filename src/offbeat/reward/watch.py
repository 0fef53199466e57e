"""Sources that are down or fail too much: admission stalls, and past their patience the run ends.

A source is *stalled* while nobody is there to score (`RewardSource.down_since`) or while more than
`max_failed_share` of its last scores failed (`FailureBudget`), from the very score that tipped it.
What is in flight goes on. While a source fails too much its last failed samples are asked again now
and then, several so that one which fails for good decides nothing, so that it is noticed when it is
well again, although nothing new is admitted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from offbeat.config import RewardSourceSection
from offbeat.errors import RewardsDown, first_of
from offbeat.records import Reward, ScoreItem
from offbeat.reward.budget import RECOVERY_MINIMUM, FailureBudget
from offbeat.reward.source import RewardSource

LOOK_SECONDS = 0.25
PROBE_SECONDS = 2.0
FAILED_KEPT = 8
"""Calls of a source that failed, to be asked again."""
NOTICES_KEPT = 100
HOPELESS = frozenset({"raised", "bad_result", "template_error", "too_long", "non_finite"})
"""Causes that no waiting mends: the function, the template, the texts."""

log = logging.getLogger(__name__)
Ask = Callable[[str, Sequence[ScoreItem]], Awaitable[Sequence[Reward]]]


@dataclass(slots=True)
class _State:
    """What is known of one source."""

    budget: FailureBudget
    since: float | None = None  # stalled since, the event loop's time
    failed: deque[Sequence[ScoreItem]] = field(default_factory=lambda: deque(maxlen=FAILED_KEPT))
    probe: asyncio.Task[None] | None = None
    probes: int = 0


class SourceWatch:
    """Watches all sources of a reward loop. `run` as a task; `ask` scores samples once more."""

    def __init__(
        self,
        sources: Mapping[str, RewardSource],
        config: Mapping[str, RewardSourceSection],
        ask: Ask,
    ) -> None:
        self._sources, self._config, self._ask = sources, config, ask
        self._states = {
            name: _State(FailureBudget(section.max_failed_share))
            for name, section in config.items()
        }
        self._notices: list[str] = []
        self._changed = False  # `stalled`, since `on_change` was told
        self._stalled_before = 0.0
        self._stalled_since: float | None = None

    def record(self, name: str, items: Sequence[ScoreItem], rewards: Sequence[Reward]) -> None:
        """Books the outcomes of one call of a source."""
        state = self._states[name]
        self._spend(name, rewards)
        causes = {reward.cause for reward in rewards if reward.status == "failed"}
        if causes - HOPELESS:
            state.failed.append(items)

    @property
    def stalled(self) -> tuple[str, ...]:
        """The sources for which admission waits."""
        return tuple(name for name, state in self._states.items() if state.since is not None)

    @property
    def stalled_seconds(self) -> float:
        """Seconds in which some source was stalled, since the start."""
        if self._stalled_since is None:
            return self._stalled_before
        return self._stalled_before + asyncio.get_running_loop().time() - self._stalled_since

    def notices(self) -> list[str]:
        """What there is to say, since the last call."""
        found, self._notices = self._notices, []
        return found

    async def run(self, on_change: Callable[[], Awaitable[None]]) -> None:
        """Looks for ever. `on_change` is told when admission may have to stall or may go on.

        Raises `RewardsDown` when a source was stalled for its `patience_seconds`.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    for name in self._states:
                        self._look(name)
                    if self._changed:
                        self._changed = False
                        await on_change()
                    self._start_probes(tasks)
                    await asyncio.sleep(LOOK_SECONDS)
        except ExceptionGroup as group:
            raise first_of(group) from None

    def _look(self, name: str) -> None:
        state, now = self._states[name], asyncio.get_running_loop().time()
        down = self._sources[name].down_since
        over = state.budget.over
        if down is None and not over:
            if state.since is not None:
                self._say(f"reward.{name} is back after {now - state.since:.0f} s; rollout goes on")
                state.since = None
                self._clock()
            return
        patience = self._config[name].patience_seconds
        why = self._gone(name) if down is not None else self._over(name)
        since = state.since
        if since is None:
            since = now if down is None else down
            self._stall(name, since, why)
        if over and down is None and state.budget.commonest in HOPELESS:
            raise RewardsDown(
                f"reward.{name}: {why}; that does not pass by waiting: mend its "
                "function, template or model (other settings take another run)"
            )
        if now - since >= patience:
            raise RewardsDown(
                f"reward.{name}: {why}, for {now - since:.0f} s now "
                f"(reward.{name}.patience_seconds = {patience:g})"
            )

    def _spend(self, name: str, rewards: Sequence[Reward]) -> None:
        state = self._states[name]
        for reward in rewards:
            state.budget.record(reward.cause if reward.status == "failed" else None)
        if state.budget.over and state.since is None:
            self._stall(name, asyncio.get_running_loop().time(), self._over(name))

    def _stall(self, name: str, since: float, why: str) -> None:
        """From now on nothing is admitted; `_look` ends that."""
        self._states[name].since = since
        self._clock()
        patience = self._config[name].patience_seconds
        self._say(
            f"reward.{name}: {why}; no group is admitted until it is back, for "
            f"{patience:g} s at most (reward.{name}.patience_seconds)"
        )

    def _gone(self, name: str) -> str:
        servers = " or ".join(self._config[name].shown_servers)
        return "nobody is there to score" + (f" at {servers}" if servers else "")

    def _over(self, name: str) -> str:
        budget = self._states[name].budget
        return (
            f"{budget.share:.0%} of its last scores failed ({budget.causes()}), more than "
            f"max_failed_share = {self._config[name].max_failed_share:g}"
        )

    def _start_probes(self, tasks: asyncio.TaskGroup) -> None:
        for name, state in self._states.items():
            if self._is_due(name, state):
                probe = self._probe(name, state)
                state.probe = tasks.create_task(probe, name=f"reward/{name}/probe")

    def _is_due(self, name: str, state: _State) -> bool:
        """Whether what failed last is to be asked again: of a source that serves and fails."""
        if not (state.budget.over and state.failed) or self._sources[name].down_since is not None:
            return False
        return state.probe is None or state.probe.done()

    async def _probe(self, name: str, state: _State) -> None:
        """Asks some of what failed last again, anew: no verdict that was kept will do."""
        await asyncio.sleep(PROBE_SECONDS)
        state.probes += 1
        asked: list[Sequence[ScoreItem]] = []
        while state.failed and sum(map(len, asked)) < RECOVERY_MINIMUM:
            asked.append(state.failed.popleft())
        state.failed.extend(asked)  # the others' turn is next
        again = [[replace(item, draw=state.probes) for item in items] for items in asked]
        for rewards in await asyncio.gather(*(self._ask(name, items) for items in again)):
            self._spend(name, rewards)

    def _clock(self) -> None:
        """After whatever changed `stalled`."""
        self._changed = True
        now = asyncio.get_running_loop().time()
        if self.stalled and self._stalled_since is None:
            self._stalled_since = now
        elif not self.stalled and self._stalled_since is not None:
            self._stalled_before += now - self._stalled_since
            self._stalled_since = None

    def _say(self, line: str) -> None:
        log.warning(line)
        self._notices = [*self._notices, line][-NOTICES_KEPT:]
