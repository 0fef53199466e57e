"""What `check` says of the texts that judges read, and which settings it shows of a source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offbeat.cli_check import _OF_OTHERS, settings_text
from offbeat.cli_templates import check_template
from offbeat.config import Config, RewardSourceSection
from offbeat.config_file import load_config
from offbeat.data import Row
from offbeat.errors import UserError

RUN = """
run = "r"
[model]
path = "m"
[data]
train = "t.jsonl"
"""


def config(tmp_path: Path, **judge: Any) -> Config:
    (tmp_path / "t.jsonl").write_text("{}\n")
    (tmp_path / "m").mkdir(exist_ok=True)
    (tmp_path / "m" / "config.json").write_text("{}")
    path = tmp_path / "run.toml"
    path.write_text(RUN + '[reward.judge]\nkind = "genrm"\nbase_url = "http://h/v1"\nmodel = "j"\n')
    loaded = load_config(path, [])
    section = RewardSourceSection.model_validate(
        {"kind": "genrm", "base_url": "http://h/v1", "model": "j"} | judge
    )
    return loaded.model_copy(update={"reward": {"judge": section}})


def checked(tmp_path: Path, *rows: dict[str, Any], **judge: Any) -> str:
    said: list[str] = []
    made = config(tmp_path, **judge)
    found = [Row(number, columns) for number, columns in enumerate(rows, 1)]
    check_template(made, "judge", made.reward["judge"], found, said.append)
    return "\n".join(said)


ROW = {"prompt": "2+2?", "reference": "4"}


def test_a_ready_template_is_shown_filled(tmp_path: Path) -> None:
    said = checked(tmp_path, ROW, template="grade_reference")
    assert said.startswith("reward.judge.template on the first row, reference answer:\n")
    assert "  | Reference answer:\n  | 4\n" in said
    assert said.count("=====") == 6
    both = checked(tmp_path, ROW, template="pairwise", pairwise="all")
    assert "  | Answer B:" in both
    assert "another answer" in both
    assert checked(tmp_path, ROW) == ""  # the built-in one is in the docs
    assert "no rows here" in checked(tmp_path, template="grade")


def test_what_fails_on_the_first_row_fails_everywhere(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"reward\.judge\.template: grade_reference fails on the fi"
    ):
        checked(tmp_path, {"prompt": "2+2?"}, template="grade_reference")
    with pytest.raises(UserError, match=r"the built-in one fails .*no criteria: set reward\.judge"):
        checked(tmp_path, ROW, parser="rubric")
    path = tmp_path / "own.jinja"
    path.write_text("{{ answer }}")
    with pytest.raises(UserError, match=r"may use question, answer_a, answer_b, reference"):
        checked(tmp_path, ROW, template=path, pairwise="all")


def test_notes_on_too_few_tokens(tmp_path: Path) -> None:
    assert "max_tokens = 16 leaves little room for the re" in checked(
        tmp_path, ROW, parser="last_number"
    )
    assert checked(tmp_path, ROW, parser="last_number", max_tokens=512) == ""
    row = ROW | {"rubric": ["a", "b", "c"]}
    assert "grades of 3 criteria" in checked(tmp_path, row, parser="rubric")
    assert checked(tmp_path, row, parser="rubric", max_tokens=64) == ""


def test_only_settings_of_a_sources_own_kind_are_shown(tmp_path: Path) -> None:
    for hidden in _OF_OTHERS.values():
        assert set(hidden) <= set(RewardSourceSection.model_fields)
    text = settings_text(config(tmp_path, parser="choice", choices={"a": 1, "b": 0}))
    shown = text.partition("[reward.judge]")[2]
    assert 'parser = "choice"' in shown
    assert "choices = { a = 1.0, b = 0.0 }" in shown
    for other in ("over_length", "workers", "style", "label"):
        assert f"\n{other} =" not in shown
