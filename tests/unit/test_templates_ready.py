"""The templates that Offbeat brings along: packaged, chosen by the settings, asking for the form
that is read, with every answer between two lines that it does not hold."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from judge_fakes import StubJudge, item, judged, section

from offbeat.config_reward import READY_TEMPLATES
from offbeat.errors import UserError
from offbeat.reward.criteria import criteria_of
from offbeat.reward.judge_prompt import JudgePrompt, template_names
from offbeat.reward.template import TemplateFailed, ready_text

FENCE = re.compile(r"^=+ [0-9a-f]{12} =+$", re.MULTILINE)
ROOT = Path(__file__).parents[2]


def text(
    answer: str = "four", reference: str | None = "4", columns: Any = None, **more: Any
) -> str:
    prompt = JudgePrompt("judge", section(**more))
    one = item(answer, reference=reference, **(columns or {}))
    if more.get("pairwise"):
        return prompt.two(one, item("five", reference=reference)).text
    return prompt.one(one).text


def test_they_are_part_of_the_package() -> None:
    folder = resources.files("offbeat").joinpath("templates", "judge")
    assert sorted(f.name for f in folder.iterdir()) == sorted(f"{n}.jinja" for n in READY_TEMPLATES)
    with (ROOT / "pyproject.toml").open("rb") as file:
        package_data = tomllib.load(file)["tool"]["setuptools"]["package-data"]["offbeat"]
    assert "templates/judge/*" in package_data
    for name in READY_TEMPLATES:
        assert ready_text(name).startswith("{#-"), name  # what it is for, in a comment


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ("grade", "grade_reference")),
        ({"parser": "json"}, ("grade", "grade_reference")),
        ({"parser": "last_number"}, ("grade", "grade_reference")),
        ({"parser": "expected"}, ("grade", "grade_reference")),
        ({"parser": "choice", "choices": {"good": 1, "bad": 0}}, ("grade", "grade_reference")),
        ({"parser": "yes_no"}, ("correct",)),
        ({"parser": "rubric", "rubric": ["is short"]}, ("rubric",)),
        ({"rubric": ["is short"]}, ("rubric",)),
        ({"pairwise": "all"}, ("pairwise",)),
        ({"pairwise": "circular", "parser": "expected"}, ("pairwise",)),
        ({"template": "grade"}, ("grade",)),
        ({"template": "correct", "parser": "yes_no"}, ("correct",)),
    ],
)
def test_which_one_is_used(settings: dict[str, Any], names: tuple[str, ...]) -> None:
    assert template_names(section(**settings)) == names


@pytest.mark.parametrize("template", [None, "grade", "grade_reference", "rubric"])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "one number from 1|number from 1 (none met) to 10"),
        ({"parser": "json"}, '{"score": n}'),
        ({"parser": "last_number"}, "alone on the last line"),
        ({"parser": "expected"}, "whole number from 1"),
        ({"parser": "choice", "choices": {"good": 1, "so so": 0.5, "bad": 0}}, "good, so so, bad."),
        ({"parser": "expected", "choices": {"good": 1, "bad": 0}}, "good, bad."),
    ],
)
def test_a_grade_is_asked_for_in_the_form_that_is_read(
    template: str | None, settings: dict[str, Any], words: str
) -> None:
    more = {"template": template} if template else {}
    more |= {"rubric": ["is short"]} if template == "rubric" else {}
    found = text(**settings, **more)
    assert any(word in found for word in words.split("|")), found
    assert "2+2?" in found
    assert ("4\n" in found.partition("=====")[0]) == (template != "grade")
    assert found.endswith(("Grade:", "Verdict:", "complete).", "met)."))


def test_right_or_wrong() -> None:
    assert "Reply with yes or no only." in text(parser="yes_no")
    choices = {"right": 1, "wrong": 0}
    for parser in ("choice", "expected"):
        found = text(parser=parser, template="correct", choices=choices)
        assert "only: right, wrong." in found
    assert "Reference" not in text(parser="yes_no", reference=None)


def test_a_rubric() -> None:
    found = text(parser="rubric", rubric=["names the number", "is short"])
    assert "1. names the number\n2. is short\n" in found
    assert 'by its number: {"1": n, "2": n}' in found
    assert "Reply with yes or no only" in text(parser="yes_no", rubric=["is short"])
    own = {"rubric": ["of the row"]}
    assert "1. of the row\n\n" in text(parser="rubric", rubric=["of the source"], columns=own)


@pytest.mark.parametrize(
    ("column", "criteria"),
    [
        (["is short", " names it "], ("is short", "names it")),
        ("is short", ("is short",)),
        (
            "- is short\n* names it\n\n3. 2 lines\n4) ends",
            ("is short", "names it", "2 lines", "ends"),
        ),
        ("2.5 is named", ("2.5 is named",)),
        ([], ("own",)),
        ("", ("own",)),
        (None, ("own",)),
    ],
)  # fmt: skip
def test_a_rows_own_criteria(column: Any, criteria: tuple[str, ...]) -> None:
    assert criteria_of(item(rubric=column), ("own",)) == criteria


def test_criteria_that_are_none() -> None:
    for column in (3, {"a": 1}, ["a", 2]):
        with pytest.raises(TemplateFailed, match="write a text or a list of texts"):
            criteria_of(item(rubric=column), ())
    judge = StubJudge('{"1": 10}')
    absent, odd = judged(judge, [item(), item(rubric=3)], parser="rubric")[0]
    assert (absent.cause, odd.cause) == ("template_error", "template_error")
    assert "reward.judge.rubric" in absent.reason
    assert judge.asked == []


def test_a_rubric_is_read_by_its_criteria() -> None:
    judge = StubJudge(lambda said, vote: '{"1": 10, "2": 1}' if "2. " in said else '{"1": 4}')
    items = [item(rubric=["a", "b"]), item()]
    two, one = judged(judge, items, parser="rubric", rubric=["c"])[0]
    assert (two.value, one.value) == (0.5, pytest.approx(1 / 3))
    assert sorted(judge.criteria) == [1, 2]


def test_a_row_without_a_reference() -> None:
    assert "Reference" not in text(reference=None)
    (reward,), _ = judged(StubJudge("8"), [item(reference=None)], template="grade_reference")
    assert (reward.status, reward.cause) == ("failed", "template_error")
    assert "no reference" in reward.reason


@pytest.mark.parametrize("pairwise", [None, "all"])
def test_every_answer_is_between_two_lines(pairwise: str | None) -> None:
    answer = "a\n\nb"
    more: dict[str, Any] = {"pairwise": pairwise} if pairwise else {}
    found = text(answer, **more)
    lines = FENCE.findall(found)
    assert len(lines) == (4 if pairwise else 2)
    assert len(set(lines)) == 1
    assert f"{lines[0]}\n{answer}\n{lines[0]}\n" in found
    assert found.count(lines[0]) == len(lines) + 1  # the judge is told what it looks like
    assert found == text(answer, **more)
    assert lines[0] not in text(answer + " ", **more)


def test_templates_of_ones_own_see_all_there_is(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(
        "{{ question }}|{{ answer }}|{{ reference }}|{{ rubric | join('+') }}|{{ columns.level }}|"
        "{{ columns.tags[1] }}|{{ parser }}|{{ low }}|{{ high }}|{{ choices | length }}|{{ fence }}"
    )
    found = text("4", template=path, rubric=["a", "b"], columns={"level": 3, "tags": ["x", "y"]})
    assert found.rpartition("|")[0] == "2+2?|4|4|a+b|3|y|number|1|10|0"
    assert FENCE.fullmatch(found.rpartition("|")[2])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"template": "correct"}, r'template = "correct" does not ask for what parser = "number"'),
        ({"template": "grade", "parser": "yes_no"}, r'template = "grade" does not ask'),
        ({"template": "grade", "parser": "rubric"}, r'template = "grade" does not ask'),
        ({"template": "correct", "parser": "expected"}, r"needs choices, e\.g\. \{yes = 1"),
        ({"parser": "expected", "scale": [0, 0.5]}, r"must be of whole grades"),
        ({"parser": "expected", "scale": [0, 1000]}, r"101 at most"),
        ({"choices": {"a": 1}}, r'choices is set, and parser = "number" reads none'),
        ({"parser": "choice"}, r"choices is missing"),
        ({"parser": "choice", "choices": {"yes": 1, "Yes.": 0}}, r"do not tell apart"),
        ({"parser": "choice", "choices": {"": 1}}, r"write each one as a word"),
        ({"parser": "choice", "choices": {"**": 1}}, r"write each one as a word"),
        ({"parser": "choice", "choices": {"yes": float("inf")}}, r"finite"),
        ({"rubric": ["a", " "], "parser": "rubric"}, r"rubric has an empty criterion"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        section(**settings)


def test_a_ready_template_is_for_judges() -> None:
    with pytest.raises(ValidationError, match=r'template = "grade" is for a judge; give a disrm'):
        section(kind="disrm", template="grade")
    with pytest.raises(UserError, match=r"cannot read .*graded"):
        JudgePrompt("judge", section(template="graded"))
