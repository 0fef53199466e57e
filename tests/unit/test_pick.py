"""Which reward sources score a row."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.config import RewardSourceSection
from offbeat.pick import BadPick, picked


def section(**settings: Any) -> RewardSourceSection:
    return RewardSourceSection.model_validate({"kind": "function", "function": "r.py:f"} | settings)


SOURCES = {
    "exact": section(when={"task": ["math", "code"]}),
    "judge": section(when={"task": "chat", "lang": "en"}),
    "format": section(role="veto"),
    "logged": section(weight=0.0),
}


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ({"task": "math"}, ("exact", "format", "logged")),
        ({"task": ["code", "rust"]}, ("exact", "format", "logged")),
        ({"task": "chat", "lang": "en"}, ("judge", "format", "logged")),
        ({"task": "chat", "reward": ["exact"]}, ("exact",)),
        ({"reward": "judge"}, ("judge",)),
        ({"reward": ["judge", "unused", "exact"]}, ("exact", "judge")),
        ({"task": "math", "reward": None}, ("exact", "format", "logged")),
    ],
)
def test_rows(columns: dict[str, Any], names: tuple[str, ...]) -> None:
    assert picked(columns, SOURCES, "reward", ("unused",)) == names


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"task": "chat"}, "no reward source's `when` is true"),
        ({}, "no reward source's `when` is true"),
        ({"reward": ["format"]}, "leaves no source that adds"),
        ({"reward": []}, "leaves no source that adds"),
        ({"reward": ["unused"]}, "leaves no source that adds"),
        ({"reward": ["jugde"]}, '"jugde", which is no reward source; there are exact, format'),
        ({"reward": 0.5}, "data.reward_column"),
        ({"reward": [1]}, "data.reward_column"),
    ],
)
def test_what_cannot_be_used(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(BadPick, match=said):
        picked(columns, SOURCES, "reward", ("unused",))


def test_without_a_column_a_rows_own_value_means_nothing() -> None:
    assert picked({"task": "math", "reward": 0.5}, SOURCES, "") == ("exact", "format", "logged")
