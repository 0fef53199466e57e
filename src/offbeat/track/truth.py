"""A warning when what a source pays rises while the true check falls (pure).

Validation has the truth: `accuracy` of an exact checker on `n` held-out prompts. The newest two
validations (the newest, while there are fewer than four) are compared with the best two on end
among the ten before. Accuracy *falls* where it is lower by `FALL_ERRORS` binomial standard errors
of the difference, and the newest alone is lower too. A reward *rises* where it is higher by
`RISE_ERRORS` of its own, likewise: the mean of the same validations (`reward/<source>`, `reward`),
or, where they have none, of the groups that were trained before them. With an accuracy that only
jitters, about 1 run in 100 of fifty validations would be warned, and that only if a reward rose
all the while. Several answers of one prompt count as one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offbeat.records import Batch
from offbeat.track.health import TOTAL, before, value_of
from offbeat.track.moments import Moments
from offbeat.track.ranks import spearman

FALL_ERRORS = 4.0
RISE_ERRORS = 2.0
LOOK_BACK = 10
"""Validations before the newest that it is compared with."""
ENOUGH = 4
"""Validations from which on two on end are taken together: one alone is half noise."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Warned:
    """One warning: the version, the source (or the total), and the sentence."""

    version: int
    source: str
    line: str

    def record(self) -> dict[str, Any]:
        """As it is kept in metrics.jsonl and summary.json."""
        return {"version": self.version, "source": self.source, "line": self.line}


@dataclass(frozen=True, slots=True)
class Look:
    """One validation: its version, accuracy, `n` checked prompts, the mean rewards of its answers,
    and those of the groups that were trained from the validation before to this one."""

    version: int
    accuracy: Mean
    n: float
    held_out: Mapping[str, float]
    trained: Mapping[str, Mean]


class TruthWatch:
    """Takes steps and validations; says what is to be warned of, once while it goes on."""

    def __init__(self, deviation: Callable[[str], float | None]) -> None:
        """`deviation(source)` is that of a source's values, for the error of a mean of them."""
        self._deviation = deviation
        self._looks: deque[Look] = deque(maxlen=LOOK_BACK + 2)
        self._groups: dict[int, dict[str, Moments]] = {}  # of the groups' means, by step
        self._warned: set[str] = set()

    def step(self, batch: Batch) -> dict[str, dict[str, float]]:
        """Takes the rewards of a step's groups; what `recall` needs of them.

        A step that is done again replaces itself, and those after it, which follow.
        """
        means: dict[str, Moments] = {}
        for group in batch.groups:
            found: dict[str, list[float]] = {}
            for sample in group.samples:
                named = {name: value_of(sample, name) for name in sample.rewards}
                for name, value in (named | {TOTAL: sample.total}).items():
                    if value is not None:
                        found.setdefault(name, []).append(value)
            for name, values in found.items():
                means.setdefault(name, Moments()).add(sum(values) / len(values))
        self._groups = before(self._groups, batch.step) | {batch.step: means}
        return {name: asdict(of) for name, of in means.items()}

    def recall(self, step: int, groups: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes what `step` gave in an earlier start."""
        found = {name: Moments(**of) for name, of in groups.items()}
        self._groups = before(self._groups, step) | {step: found}

    def validation(self, version: int, metrics: Mapping[str, float]) -> list[Warned]:
        """Takes a validation; what is new to be warned of. One of a version that had one replaces
        it, and those of later versions, which follow."""
        accuracy, n = metrics.get("accuracy", math.nan), _checked(metrics)
        if not (0 <= accuracy <= 1 and n >= 1):
            return []
        while self._looks and self._looks[-1].version >= version:
            self._looks.pop()
        since = self._looks[-1].version if self._looks else 0
        trained = self._trained(since, version)
        self._looks.append(Look(version, _share(accuracy, n), n, rewards_of(metrics), trained))
        return self._compare()

    def _trained(self, since: int, version: int) -> dict[str, Mean]:
        """Means of the groups of steps `since` to `version`, of two groups or more."""
        pooled: dict[str, Moments] = {}
        for step in range(since, version):
            for name, of in self._groups.get(step, {}).items():
                pooled.setdefault(name, Moments()).pool(of)
        return {
            name: Mean(of.mean, deviation / math.sqrt(of.n))
            for name, of in pooled.items()
            if (deviation := of.deviation) is not None
        }

    def _compare(self) -> list[Warned]:
        looks = list(self._looks)
        width = 2 if len(looks) >= ENOUGH else 1
        new = looks[-width:]
        before = [looks[i : i + width] for i in range(len(looks) - 2 * width + 1)]
        if not before:
            return []
        best = max(before, key=lambda part: _together([look.accuracy for look in part]).value)
        then, now = (_together([look.accuracy for look in part]) for part in (best, new))
        fell = _errors(now, then) if new[-1].accuracy.value < then.value else 0.0
        said: list[Warned] = []
        for name in _names(new[-1]):
            reward, newest = (self._rewards(name, best, part) for part in (new, new[-1:]))
            above = newest is not None and newest[1].value > newest[0].value
            rose = _errors(*reward) if reward is not None and above else 0.0
            if reward is not None and fell >= FALL_ERRORS and rose >= RISE_ERRORS:
                if name not in self._warned:
                    n = min(look.n for look in (*best, *new))
                    truth = f"{then.value:.3f} -> {now.value:.3f} (n = {n:.0f}, {fell:.1f}"
                    said.append(_warned(name, reward, truth, best, new))
                self._warned.add(name)
            elif fell < FALL_ERRORS / 2 or rose == 0:  # over, and not only on the limit
                self._warned.discard(name)
        return said

    def _rewards(
        self, name: str, best: Sequence[Look], new: Sequence[Look]
    ) -> tuple[Mean, Mean] | None:
        """A source's mean then and now: both of validations, or both of what was trained."""
        if all(name in look.held_out for look in (*best, *new)):
            deviation = self._deviation(name)
            if deviation is None:
                return None
            then, now = (
                [Mean(look.held_out[name], deviation / math.sqrt(look.n)) for look in part]
                for part in (best, new)
            )
        else:  # before the first validation nothing was trained: two on end count by the other
            then, now = (
                [mean for look in part if (mean := look.trained.get(name)) is not None]
                for part in (best, new)
            )
        return (_together(then), _together(now)) if then and now else None


def _names(look: Look) -> list[str]:
    """The sources, and the total where it is not that of a single one."""
    names = list({**look.held_out, **look.trained})
    return [name for name in names if name != TOTAL or len(names) > 2]


def rewards_of(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """A validation's mean rewards by source and in total, those that are numbers."""
    return {
        TOTAL if key == "reward" else key.removeprefix("reward/"): value
        for key, value in metrics.items()
        if (key == "reward" or key.startswith("reward/"))
        and value is not None
        and math.isfinite(value)
    }


def truth_agreement(validations: Iterable[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Spearman's correlation of each source's mean reward and the accuracy, over validations."""
    series: dict[str, list[tuple[float, float]]] = {}
    for metrics in validations:
        accuracy = metrics.get("accuracy")
        if accuracy is not None and math.isfinite(accuracy):
            for name, value in rewards_of(metrics).items():
                series.setdefault(name, []).append((value, accuracy))
    return {name: spearman(*zip(*of, strict=True)) for name, of in series.items()}


def _checked(metrics: Mapping[str, float]) -> float:
    """Prompts whose answers have a score. Several answers of one prompt count as one."""
    samples = max([int(key[5:]) for key in metrics if key.startswith("pass@")], default=1)
    return metrics.get("n", 0.0) - metrics.get("unscored", 0.0) / samples


def _warned(
    name: str, reward: tuple[Mean, Mean], truth: str, best: Sequence[Look], new: Sequence[Look]
) -> Warned:
    who = "the total reward" if name == TOTAL else f"reward.{name}"
    then, now = (" and ".join(str(look.version) for look in part) for part in (best, new))
    line = (
        f"warning: {who} rises while truth falls: {reward[0].value:.3f} -> {reward[1].value:.3f}, "
        f"accuracy {truth} standard errors) from version {then} to {now}; read samples/ for what "
        "the policy is paid for"
    )
    return Warned(new[-1].version, name, line)


def _share(accuracy: float, n: float) -> Mean:
    """With one right and one wrong more, so that none of n right has an error too."""
    p = (accuracy * n + 1) / (n + 2)
    return Mean(accuracy, math.sqrt(p * (1 - p) / n))


def _together(means: Sequence[Mean]) -> Mean:
    k = len(means)
    return Mean(
        sum(mean.value for mean in means) / k, math.sqrt(sum(mean.error**2 for mean in means)) / k
    )


def _errors(low: Mean, high: Mean) -> float:
    """By how many standard errors of the difference `high` is above `low`."""
    apart, error = high.value - low.value, math.hypot(low.error, high.error)
    if apart <= 0:
        return 0.0
    return apart / error if error > 0 else math.inf
