"""A generative reward model: a language model reads a template and writes a grade.

The text goes to a `VerdictBackend`: engines on the source's own pool (`judge_engines.py`), or
an OpenAI-compatible server (`judge_http.py`). What comes back is read by `verdict.parse_verdict`;
the reward is (grade - low) / (high - low), 0 to 1, with the verdict's text as `Reward.raw`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Reward, ScoreItem, Span
from offbeat.reward.judge import VerdictBackend
from offbeat.reward.pool import CallFailed
from offbeat.reward.template import TemplateFailed, TextTemplate
from offbeat.reward.verdict import Unread, parse_verdict

RAW_KEPT = 4000

GRADE_TEMPLATE = """\
You are a strict judge. Grade the answer to the question.

Question:
{{ question }}
{% if reference is not none %}
Reference answer:
{{ reference }}
{% endif %}
Answer to grade:
{{ answer }}

{% if parser == "yes_no" %}Is the answer right? Reply with yes or no only.
{% elif parser == "json" %}Reply with JSON only: {"score": n}, where n is a grade from \
{{ low }} (wrong) to {{ high }} (right and complete).
{% else %}Reply with the grade only: one number from {{ low }} (wrong) to {{ high }} \
(right and complete).
{% endif %}Grade:"""
"""The built-in template, with and without a reference."""


class GenRM:
    """The reward source of a judge."""

    def __init__(self, name: str, section: RewardSourceSection, judge: VerdictBackend) -> None:
        """Starts nothing. Raises `UserError` for a scale or template that cannot be used."""
        low, high = section.scale
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise UserError(
                f"reward.{name}.scale = [{low:g}, {high:g}] is empty; give the lowest grade first"
            )
        self._name, self._section, self._judge = name, section, judge
        self._template = TextTemplate.load(
            section.template, GRADE_TEMPLATE, f"reward.{name}.template",
            parser=section.parser, low=f"{low:g}", high=f"{high:g}",
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The source's name."""
        return self._name

    async def start(self) -> None:
        """Starts the judge."""
        await self._judge.start()

    async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
        """Judges all items at once."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(item)) for item in items]
        return [task.result() for task in tasks]

    @property
    def down_since(self) -> float | None:
        """None: it serves, or says so by failures."""
        return None

    def facts(self) -> Mapping[str, float]:
        """Running numbers for metrics."""
        return {}

    async def drain_spans(self) -> list[Span]:
        """The judge's compute spans, under this source's role."""
        role = f"reward/{self._name}"
        return [replace(span, role=role) for span in await self._judge.drain_spans()]

    async def stop(self) -> None:
        """Stops the judge."""
        await self._judge.stop()

    async def _one(self, item: ScoreItem) -> Reward:
        section = self._section
        try:
            text = await asyncio.to_thread(self._template.render, item)
            verdict = await self._judge.verdict(text)
        except TemplateFailed as failed:
            return Reward.failed(self._name, "template_error", reason=str(failed))
        except CallFailed as failed:
            return Reward.failed(
                self._name, failed.cause, reason=failed.reason, retries=failed.retries
            )
        raw = verdict.text[:RAW_KEPT]
        read = parse_verdict(
            verdict.text, section.parser, section.scale,
            truncated=verdict.finish_reason == "length",
        )  # fmt: skip
        if isinstance(read, Unread):
            return Reward.failed(
                self._name, read.cause, reason=read.reason, raw=raw, retries=verdict.retries
            )
        return Reward.scored(self._name, read.value, raw=raw, retries=verdict.retries)
