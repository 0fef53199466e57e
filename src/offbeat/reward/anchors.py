"""Anchors: answers with known grades that a source judges again and again while it trains.

A look asks the source itself, beside training's calls and with a few of its own at a time, and
nothing of it enters training's rewards, counts or failure budget. It tells how far the verdicts
are from the known grades, whether they have drifted since the first look, and how far the same
answer's verdicts lie apart. What the next look needs to know is kept in the run's ledger. A source
that draws (temperature above 0) judges each anchor twice a look; of any other the two are this
look's and the one's before. `anchor_files.py` reads them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from offbeat.config import RewardSourceSection
from offbeat.records import Reward, ScoreItem
from offbeat.reward.anchor_files import Anchor, anchors_mark
from offbeat.reward.replicas import LOST
from offbeat.reward.source import RewardSource
from offbeat.reward.waiting import UNTRIED
from offbeat.track.ranks import RankCorrelation

CALLS_AT_ONCE = 4
"""Of one source's anchors: so few that training's samples find its judges free."""
LOOK_SECONDS = 600.0
"""A look takes no longer, whatever the source's own deadline comes to."""
TRIES = 3
"""Of a call that is lost with its replica, or left untried when others broke it."""
DRIFTED = 0.25
"""Drift worth a warning, in standard deviations of the anchors' values at the first look."""
HALF_NORMAL = math.sqrt(2 / math.pi)

META_PREFIX = "anchors/"
"""Of the ledger's keys, one a source."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnchorReport:
    """One look at a source's `n` anchors, after `step` steps.

    `judged` of them have a value; `failed` counts the calls without one by cause. On the source's
    values (genrm: 0 to 1): `mean`; `error`, the mean |value - known|; `spearman` of both; `drift`,
    the mean |value - value at the first look|; `repeat`, the variance of one anchor's verdicts.
    None where there is nothing to tell: a first look has no drift, and of comparisons no error.
    """

    source: str
    step: int
    n: int
    judged: int
    failed: Mapping[str, int]
    mean: float | None
    error: float | None
    spearman: float | None
    drift: float | None
    repeat: float | None
    seconds: float
    warning: str | None = None

    def record(self) -> dict[str, Any]:
        """As metrics.jsonl has it."""
        return {key: value for key, value in asdict(self).items() if key != "warning"}


@dataclass(slots=True)
class _State:
    """What is kept of one source between its looks; `mark` tells its anchors from others."""

    anchors: Sequence[Anchor]
    mark: str
    due: int = 0
    looking: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # no look is due or under way
    draws: int = 0
    first: dict[int, float] = field(default_factory=dict)  # values by place of the anchor
    last: dict[int, float] = field(default_factory=dict)
    repeat: float | None = None
    first_spearman: float | None = None
    warned: set[str] = field(default_factory=set)

    def packed(self, step: int) -> str:
        """After a look at `step`, for a start that goes on."""
        kept = {name: getattr(self, name) for name in ("mark", "draws", "first", "last", "repeat")}
        agreement, warned = self.first_spearman, sorted(self.warned)
        return json.dumps(kept | {"step": step, "first_spearman": agreement, "warned": warned})

    def unpack(self, packed: str, every: int) -> bool:
        """Goes on from there; False, and nothing is changed, if those were other anchors."""
        kept = json.loads(packed)
        if kept["mark"] != self.mark:
            return False
        self.due = _next(kept["step"], every)
        self.draws, self.repeat = kept["draws"], kept["repeat"]
        self.first, self.last = (
            {int(place): value for place, value in kept[name].items()} for name in ("first", "last")
        )
        self.first_spearman, self.warned = kept["first_spearman"], set(kept["warned"])
        return True


class Anchors:
    """All anchors of a run. `run` is a task beside rollout that looks when `trained` makes a look
    due; what it finds is there for `drain`."""

    def __init__(
        self,
        sources: Mapping[str, RewardSource],
        config: Mapping[str, RewardSourceSection],
        anchors: Mapping[str, Sequence[Anchor]],
        *,
        step: int = 0,
        kept: Mapping[str, str] | None = None,
        keep: Callable[[str, str], object] = lambda key, value: None,
    ) -> None:
        """`anchors` by source, as `anchors_of` gives them; the sources are started.

        `step` steps are done. `keep(key, value)` is called after each look; with what it was given
        (`kept`, of any keys) the next start goes on.
        """
        self._sources, self._config, self._keep = sources, config, keep
        rows = {name: found for name, found in anchors.items() if found}
        self._states = {name: _State(found, anchors_mark(found)) for name, found in rows.items()}
        self._reports: list[AnchorReport] = []
        self._notices: list[str] = []
        self._steps = step
        for name, state in self._states.items():
            packed = (kept or {}).get(META_PREFIX + name)
            if packed and not state.unpack(packed, config[name].anchors_every):
                self._notices.append(
                    f"the anchors of reward.{name} are others than before: drift is told from the "
                    "look that comes now"
                )
            if step < state.due:
                state.settled.set()

    async def run(self) -> None:
        """Looks for ever: at the start, and whenever a look is due. Never raises."""
        async with asyncio.TaskGroup() as tasks:
            for name in self._states:
                tasks.create_task(self._serve(name), name=f"reward/{name}/anchors")

    def trained(self, steps: int) -> None:
        """So many steps are done."""
        self._steps = steps
        for state in self._states.values():
            if steps >= state.due:
                state.settled.clear()
                state.changed.set()

    async def settle(self, seconds: float) -> None:
        """Waits until no look is due or under way, for so long at most: at the end of a run."""
        try:
            async with asyncio.timeout(seconds):
                for state in self._states.values():
                    await state.settled.wait()
        except TimeoutError:
            log.warning("a look at anchors was under way for more than %g s; it is lost", seconds)

    def due(self, step: int) -> bool:
        """Whether a look is due after `step` steps: at 0, then every `anchors_every`."""
        return any(step >= state.due and not state.looking for state in self._states.values())

    async def look(self, step: int) -> list[AnchorReport]:
        """Judges the anchors of all sources that are due, at once.

        Never raises for what a source does. The reports are also there for `drain`.
        """
        names = [n for n, s in self._states.items() if step >= s.due and not s.looking]
        return list(await asyncio.gather(*(self._look(name, step) for name in names)))

    def drain(self) -> list[AnchorReport]:
        """Reports since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def notices(self) -> list[str]:
        """Lines for the user since the last call."""
        notices, self._notices = self._notices, []
        return notices

    async def _serve(self, name: str) -> None:
        state = self._states[name]
        while True:
            state.changed.clear()
            if self._steps < state.due:
                await state.changed.wait()
                continue
            try:
                await self._look(name, self._steps)
            except Exception:  # boundary: telemetry never changes training
                log.warning("a look at the anchors of reward.%s is lost", name, exc_info=True)

    def _twice(self, name: str) -> bool:
        section = self._config[name]
        draws = section.kind == "genrm" and section.temperature > 0
        return draws and section.parser != "expected"  # which reads the same probabilities

    # -- one source ------------------------------------------------------------------------------

    async def _look(self, name: str, step: int) -> AnchorReport:
        """One look at one source, within `LOOK_SECONDS`."""
        state, every = self._states[name], self._config[name].anchors_every
        state.looking, state.due = True, _next(step, every)
        try:
            report = await self._judge(name, step)
        finally:
            state.looking = False
            if self._steps < state.due:
                state.settled.set()
        self._reports.append(report)
        self._keep(META_PREFIX + name, state.packed(step))
        return report

    async def _judge(self, name: str, step: int) -> AnchorReport:
        state, section = self._states[name], self._config[name]
        clock = asyncio.get_running_loop().time
        start = clock()
        calls = _calls(state.anchors, together=section.grouped)
        draws = [state.draws + 1 + number for number in range(2 if self._twice(name) else 1)]
        state.draws = draws[-1]
        rounds = math.ceil(len(calls) * len(draws) / CALLS_AT_ONCE) + 1
        until = start + min(LOOK_SECONDS, rounds * section.deadline_seconds)
        gate = asyncio.Semaphore(CALLS_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            asked = [
                (of, tasks.create_task(self._ask(name, of, draw, gate, until)))
                for draw in draws
                for of in calls
            ]
        values: dict[int, list[float]] = {}
        failed: Counter[str] = Counter()
        for of, task in asked:
            for anchor, reward in zip(of, task.result(), strict=True):
                if reward.status == "scored" and reward.value is not None:
                    values.setdefault(anchor.place, []).append(reward.value)
                else:
                    failed[reward.cause or reward.status] += 1
        return self._report(name, step, values, failed, clock() - start)

    async def _ask(
        self, name: str, of: Sequence[Anchor], draw: int, gate: asyncio.Semaphore, until: float
    ) -> list[Reward]:
        """One call of the source; whatever goes wrong is a failure with a cause."""
        items = [
            ScoreItem(anchor.prompt, anchor.answer, index=index, draw=draw)
            for index, anchor in enumerate(of)
        ]
        cause = reason = ""
        try:
            async with asyncio.timeout_at(until), gate:
                for _ in range(TRIES):
                    rewards = await self._sources[name].score(items)
                    if len(rewards) != len(items):
                        raise ValueError(f"{len(rewards)} rewards for {len(items)} answers")
                    if not any(reward.cause in {LOST, UNTRIED} for reward in rewards):
                        break
                return rewards
        except TimeoutError:
            cause = "timeout"
        except Exception as error:  # boundary: a look never ends what it looks at
            cause, reason = "source_error", f"{type(error).__name__}: {error}"
        return [Reward.failed(name, cause, reason=reason) for _ in items]

    def _report(
        self,
        name: str,
        step: int,
        values: Mapping[int, Sequence[float]],
        failed: Mapping[str, int],
        seconds: float,
    ) -> AnchorReport:
        state, grouped, twice = self._states[name], self._config[name].grouped, self._twice(name)
        known = {anchor.place: anchor for anchor in state.anchors}
        now = {place: math.fsum(found) / len(found) for place, found in sorted(values.items())}
        before = {place: state.first[place] for place in now if place in state.first}
        pairs = [tuple(found) for found in values.values() if len(found) == 2]
        if not twice:
            pairs = [(value, state.last[p]) for p, value in now.items() if p in state.last]
        spearman = RankCorrelation()
        there = [known[place] for place in now]
        spearman.add(
            np.array(list(now.values())),
            np.array([anchor.known for anchor in there]),
            np.array([anchor.question if grouped else 0 for anchor in there], dtype=np.int64),
        )
        report = AnchorReport(
            name,
            step,
            n=len(state.anchors),
            judged=len(now),
            failed=dict(failed),
            mean=_mean(list(now.values())),
            error=None if grouped else _mean([abs(now[a.place] - a.known) for a in there]),
            spearman=spearman.value,
            drift=_mean([abs(now[place] - value) for place, value in before.items()]),
            repeat=_mean([(one - other) ** 2 / 2 for one, other in pairs]),
            seconds=seconds,
        )
        # Across looks a verdict's changes are what a drift is told from: those before this look.
        noise = report.repeat if twice else state.repeat
        report = replace(report, warning=_warning(report, state, noise or 0.0))
        state.repeat = report.repeat
        state.first = now | state.first
        state.last = state.last | now
        if state.first_spearman is None:
            state.first_spearman = report.spearman
        return report


def _warning(report: AnchorReport, state: _State, noise: float) -> str | None:
    """What is wrong for the first time since it was right; `noise` is a verdict's variance."""
    found: dict[str, str] = {}
    if report.judged == 0:
        causes = ", ".join(f"{cause} {count}" for cause, count in report.failed.items())
        found["lost"] = (
            f"warning: none of the {report.n} anchors of reward.{report.source} could be judged "
            f"({causes})"
        )
    values = list(state.first.values())
    unit = float(np.std(values)) if values else 0.0
    chance = HALF_NORMAL * math.sqrt(2 * noise)  # so far are two verdicts apart by themselves
    if report.drift is not None and report.drift > max(DRIFTED * unit, 2 * chance):
        agreement = f"{_shown(state.first_spearman)} -> {_shown(report.spearman)}"
        found["drift"] = (
            f"warning: reward.{report.source} judges its anchors otherwise than at first: they are "
            f"{report.drift:.3f} away from their first values, which differ by {unit:.3f}; "
            f"agreement with the known grades {agreement}. Is it the same model still?"
        )
    new = [line for kind, line in found.items() if kind not in state.warned]
    state.warned = set(found)
    return new[0] if new else None


def _next(step: int, every: int) -> int:
    """When the look after one at `step` is due."""
    return (step // every + 1) * every


def _calls(anchors: Sequence[Anchor], *, together: bool) -> list[list[Anchor]]:
    """One anchor a call, or, for a source that compares, all answers to one question."""
    calls: dict[int, list[Anchor]] = {}
    for anchor in anchors:
        calls.setdefault(anchor.question if together else anchor.place, []).append(anchor)
    return list(calls.values())


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
