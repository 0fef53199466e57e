"""What `check` says of the texts that reward models read."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from offbeat.cli_cluster import Say
from offbeat.config import Config, RewardSourceSection
from offbeat.data import Row, plain_prompt
from offbeat.errors import UserError
from offbeat.records import Prompt, ScoreItem
from offbeat.reward.judge_prompt import JudgePrompt
from offbeat.reward.template import TemplateFailed, TextTemplate

OTHER_ANSWER = "another answer"
"""What the reference is compared with, where two answers are."""

LEAST_REASONS = 64
TOKENS_A_CRITERION = 8


def check_template(
    config: Config, name: str, source: RewardSourceSection, rows: Sequence[Row], say: Say
) -> None:
    """Renders a model's template for the first row; what fails there fails everywhere."""
    if source.kind == "function" or (source.kind == "disrm" and source.template is None):
        return
    key = f"reward.{name}.template"
    judge = JudgePrompt(name, source) if source.kind == "genrm" else None
    other = TextTemplate.load(source.template, "", key) if judge is None else None
    if not rows:
        if source.template is not None:
            say(f"{key}: {source.template} is not tried, as there are no rows here")
        return
    prompt = plain_prompt(config, rows[0])
    item = ScoreItem(prompt, reference_answer(config, prompt))
    criteria = 0
    try:
        if judge is None:
            text = other.render(item) if other is not None else ""
        elif source.pairwise is not None:
            text = judge.two(item, ScoreItem(prompt, OTHER_ANSWER)).text
        else:
            asked = judge.one(item)
            text, criteria = asked.text, len(asked.criteria)
    except TemplateFailed as error:
        raise UserError(
            f"{key}: {source.template or 'the built-in one'} fails on the first row ({error}); "
            f"{_may_use(source)}"
        ) from None
    if source.template is not None:
        said = textwrap.indent(text, "  | ")
        say(f"{key} on the first row, reference answer:\n{said}")
    note = _short_of_tokens(name, source, criteria)
    if note is not None:
        say(note)


def reference_answer(config: Config, prompt: Prompt) -> str:
    """The reference as a sample would end it: with the first stop string, if there is one."""
    return (prompt.reference or "") + next(iter(config.rollout.stop), "")


def _may_use(source: RewardSourceSection) -> str:
    if source.kind == "disrm":
        return "it may use question, answer, reference and columns"
    answers = "answer" if source.pairwise is None else "answer_a, answer_b"
    return f"it may use question, {answers}, reference, rubric, columns and fence"


def _short_of_tokens(name: str, source: RewardSourceSection, criteria: int) -> str | None:
    """A note where a verdict will mostly be cut."""
    key, has = f"reward.{name}.max_tokens", source.max_tokens
    if source.parser == "last_number" and has < LEAST_REASONS:
        return f"note: {key} = {has} leaves little room for the reasons before a last number"
    if has < TOKENS_A_CRITERION * criteria:
        return f"note: {key} = {has} leaves little room for the grades of {criteria} criteria"
    return None
