"""Which number a scorer's logits stand for: one label's logit, or the labels' expected value.

Pure: knows neither torch nor transformers, so `check` refuses with it what a replica would refuse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError

LABELS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Reading:
    """From the logits of a row, in the labels' order, to one number: the logit of `index`, or with
    `values` (one a label) their expected value under the softmax."""

    labels: tuple[str, ...] = ("LABEL_0",)
    index: int = 0
    values: tuple[float, ...] = ()

    def value(self, logits: Sequence[float]) -> float:
        """The number; NaN or infinite where a logit that counts is."""
        if not self.values:
            return float(logits[self.index])
        top = max(logits)
        weights = [math.exp(logit - top) for logit in logits]  # NaN from NaN and from infinity
        total = sum(weights)
        return sum(w / total * v for w, v in zip(weights, self.values, strict=True))

    def raw(self, logits: Sequence[float]) -> str:
        """The logits in words, as a sample keeps them; of many labels the highest ones."""
        if len(logits) == 1:
            return repr(float(logits[0]))
        named = list(zip(self.labels, logits, strict=True))
        if len(named) > LABELS_SHOWN:
            named = sorted(named, key=lambda pair: -pair[1])[:LABELS_SHOWN]
        return ", ".join(f"{label} {logit:.6g}" for label, logit in named)


def reading_of(
    section: RewardSourceSection, labels: Sequence[str], name: str, path: str
) -> Reading:
    """How source `name` reads a model in `path` with these labels, in the order of its logits.

    Raises `UserError` where `label` and `label_values` do not fit the model.
    """
    model, known = f"the model in {path}", _listed(labels)
    setting = f"reward.{name}.label_values" if section.label_values else f"reward.{name}.label"
    chosen = section.label is not None or bool(section.label_values)
    if len(labels) == 1:
        if chosen:
            raise UserError(f"{setting}: {model} has one logit, which is the reward; leave it out")
        return Reading(tuple(labels))
    if not chosen:
        raise UserError(
            f"reward.{name}.model: {model} has {len(labels)} labels ({known}); set label to the "
            "one whose logit is the reward, or label_values to a value for each of them"
        )
    if section.label is not None:
        return Reading(tuple(labels), _place(section.label, labels, setting, model))
    values = _values(section.label_values, labels, setting, model)
    return Reading(tuple(labels), values=values)


def _values(
    given: Mapping[str, float], labels: Sequence[str], setting: str, model: str
) -> tuple[float, ...]:
    """The labels' values in their order."""
    found: dict[int, float] = {}
    for label, value in given.items():
        place = _place(label, labels, setting, model)
        if place in found:
            raise UserError(f"{setting}: {label!r} is there twice, by name and by number")
        found[place] = value
    lacking = [label for place, label in enumerate(labels) if place not in found]
    if lacking:
        raise UserError(f"{setting}: {model} also has {_listed(lacking)}; give each label a value")
    return tuple(found[place] for place in range(len(labels)))


def _place(label: str, labels: Sequence[str], setting: str, model: str) -> int:
    """The number of a label that is given by name or number; names go first."""
    if list(labels).count(label) == 1:
        return list(labels).index(label)
    if label.isdecimal() and int(label) < len(labels):
        return int(label)
    several = "several labels of that name among" if label in labels else "the labels"
    raise UserError(
        f"{setting}: {label!r} is no label: {model} has {several} {_listed(labels)}; give one of "
        f"them, or a number from 0 to {len(labels) - 1}"
    )


def _listed(labels: Sequence[str]) -> str:
    shown = ", ".join(labels[:LABELS_SHOWN])
    return shown if len(labels) <= LABELS_SHOWN else f"{shown}, ..."
