"""The texts that a judge reads: a template, filled so that no answer can speak to the judge.

Beside what all templates see (`offbeat.reward.template`) a judge's sees

| variable | is |
|---|---|
| `answer` | the text to judge; with `pairwise` there are `answer_a` and `answer_b` instead |
| `rubric` | the criteria, a list of texts: the row's column `rubric`, or the setting |
| `fence` | a line that stands in none of the texts, to be put around every answer |
| `parser`, `low`, `high`, `choices` | what the verdict is to look like, as set |

Every text that comes from outside of the template has its special tokens broken (`neutral`), so
none of them ends the judge's turn. What a text holds of Jinja is text: it is never evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.config import RewardSourceSection
from offbeat.records import ScoreItem
from offbeat.reward.criteria import criteria_of
from offbeat.reward.neutral import Neutralizer, fence, texts_in
from offbeat.reward.template import TemplateFailed, TextTemplate


@dataclass(frozen=True, slots=True)
class JudgeText:
    """A rendered text and the criteria that it asks for (none if it is no rubric)."""

    text: str
    criteria: tuple[str, ...] = ()


class JudgePrompt:
    """Renders one source's texts; from any thread."""

    def __init__(self, name: str, section: RewardSourceSection) -> None:
        """Raises `UserError` for a template that cannot be used."""
        self._name, self._section = name, section
        self._neutral = Neutralizer()
        low, high = section.scale
        self._names = template_names(section)
        self._templates = [
            TextTemplate.load(
                Path(template), "", f"reward.{name}.template",
                parser=section.parser, low=f"{low:g}", high=f"{high:g}",
                choices=dict(section.choices),
            )
            for template in self._names
        ]  # fmt: skip

    def know(self, special_tokens: Sequence[str]) -> None:
        """Breaks these tokens too from now on: the judge's own."""
        self._neutral = Neutralizer(special_tokens)

    def one(self, item: ScoreItem) -> JudgeText:
        """The text that has one answer judged; raises `TemplateFailed`."""
        return self._fill(item, answer=item.completion)

    def two(self, first: ScoreItem, second: ScoreItem) -> JudgeText:
        """The text that has two answers to one question compared; raises `TemplateFailed`."""
        return self._fill(first, answer_a=first.completion, answer_b=second.completion)

    def _fill(self, item: ScoreItem, **answers: str) -> JudgeText:
        prompt, neutral = item.prompt, self._neutral
        criteria = self._criteria(item)
        if prompt.reference is None and self._names == ("grade_reference",):
            raise TemplateFailed("the row has no reference, and template grade_reference shows it")
        values: dict[str, Any] = {
            "question": prompt.question,
            "reference": prompt.reference,
            "columns": dict(prompt.columns),
            "rubric": list(criteria),
            **answers,
        }
        values = {key: neutral.value(value) for key, value in values.items()}
        template = self._templates[0 if prompt.reference is None else -1]
        text = template.fill(**values, fence=fence(texts_in(values), neutral))
        return JudgeText(text, criteria if self._section.parser == "rubric" else ())

    def _criteria(self, item: ScoreItem) -> tuple[str, ...]:
        section = self._section
        asked = section.parser == "rubric" or self._names == ("rubric",)
        criteria = criteria_of(item, section.rubric) if asked or section.rubric else ()
        if asked and not criteria:
            raise TemplateFailed(
                f"no criteria: set reward.{self._name}.rubric, or give the row a column rubric"
            )
        return criteria


def template_names(section: RewardSourceSection) -> tuple[str, ...]:
    """The template by name or path. Two are for rows without and rows with a reference."""
    if section.template is not None:
        return (str(section.template),)
    if section.pairwise is not None:
        return ("pairwise",)
    if section.parser == "rubric" or section.rubric:
        return ("rubric",)
    return ("correct",) if section.parser == "yes_no" else ("grade", "grade_reference")
