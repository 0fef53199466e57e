"""Which number a scorer's logits stand for, and labels that do not fit the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.reward.logits import Reading, reading_of

STARS = ("1", "2", "3", "4", "5")
WORDS = ("bad", "ok", "good")


def read(labels: Sequence[str], **settings: Any) -> Reading:
    section = RewardSourceSection.model_validate({"kind": "disrm", "model": "m"} | settings)
    return reading_of(section, labels, "scorer", "models/m")


def test_one_logit_is_the_reward() -> None:
    assert read(["LABEL_0"]).value([-2.5]) == -2.5
    assert read(["LABEL_0"]).raw([-2.5]) == "-2.5"


@pytest.mark.parametrize(
    ("labels", "label", "index"),
    [
        (WORDS, "good", 2),
        (WORDS, "2", 2),
        (WORDS, 0, 0),
        (STARS, "1", 0),  # names go first: this one is number 0
        (STARS, "0", 0),
        (("a", "a", "1"), "1", 2),
        (("a", "a", "b"), 1, 1),
    ],
)
def test_a_label_by_name_or_number(labels: Sequence[str], label: str | int, index: int) -> None:
    reading = read(labels, label=label)
    logits = [10.0 + place for place in range(len(labels))]
    assert reading.index == index
    assert reading.value(logits) == 10.0 + index
    assert reading.raw(logits).startswith(f"{labels[0]} 10, ")


@given(
    st.lists(st.floats(-50, 50), min_size=2, max_size=6),
    st.data(),
)
def test_the_expected_value_is_that_of_the_softmax(
    logits: list[float], data: st.DataObject
) -> None:
    labels = [f"l{place}" for place in range(len(logits))]
    values = {label: data.draw(st.floats(-100, 100)) for label in labels}
    found = read(labels, label_values=values).value(logits)
    weights = torch.softmax(torch.tensor(logits, dtype=torch.float64), 0)
    wanted = float(weights @ torch.tensor(list(values.values()), dtype=torch.float64))
    assert found == pytest.approx(wanted, abs=1e-9)
    assert min(values.values()) - 1e-9 <= found <= max(values.values()) + 1e-9


def test_values_go_to_their_labels_in_any_order_by_name_or_number() -> None:
    reading = read(WORDS, label_values={"good": 1, "0": -1, "ok": 0.25})
    assert reading.values == (-1.0, 0.25, 1.0)
    assert reading.value([0.0, 0.0, 1000.0]) == 1.0
    assert reading.value([-math.inf, 5.0, 5.0]) == pytest.approx(0.625)


@pytest.mark.parametrize("logits", [[math.nan, 0, 0], [0, math.nan, 0], [0, 0, math.inf]])
def test_what_is_not_finite_becomes_no_number(logits: list[float]) -> None:
    assert math.isnan(read(WORDS, label_values=dict.fromkeys(WORDS, 1.0)).value(logits))
    assert read(WORDS, label="ok").value([math.nan, 3.0, math.inf]) == 3.0
    assert math.isnan(read(WORDS, label="bad").value([math.nan, 3.0, 0.0]))


def test_of_many_labels_the_highest_are_shown() -> None:
    reading = read([f"l{i}" for i in range(40)], label="l3")
    shown = reading.raw([float(i) for i in range(40)])
    assert shown.startswith("l39 39, l38 38, ")
    assert shown.count(",") == 11


@pytest.mark.parametrize(
    ("labels", "settings", "words"),
    [
        (
            WORDS,
            {},
            r"reward\.scorer\.model: the model in models/m has 3 labels \(bad, ok, good\); set "
            "label to .* or label_values to a value for each",
        ),
        (["LABEL_0"], {"label": "LABEL_0"}, r"reward\.scorer\.label: .* one logit.*leave it out"),
        (["LABEL_0"], {"label_values": {"0": 1}}, r"reward\.scorer\.label_values: .* one logit"),
        (
            WORDS,
            {"label": "Good"},
            r"reward\.scorer\.label: 'Good' is no label: the model in models/m has the labels bad, "
            "ok, good; give one of them, or a number from 0 to 2",
        ),
        (WORDS, {"label": 3}, "'3' is no label"),
        (WORDS, {"label": -1}, "'-1' is no label"),
        (("a", "a", "b"), {"label": "a"}, "several labels of that name among a, a, b; .* number"),
        (WORDS, {"label_values": {"good": 1}}, r"label_values: .* also has bad, ok; give each"),
        (WORDS, {"label_values": {"best": 1}}, "label_values: 'best' is no label"),
        (
            WORDS,
            {"label_values": {"bad": 0, "ok": 1, "good": 2, "2": 3}},
            "label_values: '2' is there twice, by name and by number",
        ),
        ([f"l{i}" for i in range(1000)], {}, r"has 1000 labels \(l0, .*, l11, \.\.\.\)"),
    ],
)
def test_labels_that_do_not_fit(
    labels: Sequence[str], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        read(labels, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"label": "a", "label_values": {"a": 1}}, "leave one out"),
        ({"kind": "function", "function": "m:f", "label": "a"}, 'kind = "function"'),
        ({"kind": "genrm", "label_values": {"a": 1}}, 'kind = "genrm"'),
        ({"affine": [2, 1]}, 'set normalize = "affine", or leave affine out'),
        ({"affine": [2, 1], "normalize": "running"}, "has no effect"),
        ({"normalize": "affine"}, "affine is missing"),
        ({"normalize": "affine", "affine": [0, 1]}, "all scores the same"),
        ({"label_values": {"a": "nan"}}, "finite"),
        ({"label": True}, "valid string"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RewardSourceSection.model_validate({"kind": "disrm", "model": "m"} | settings)
