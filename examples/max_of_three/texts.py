"""The texts that judge and scorer read, rendered from the templates beside this file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment


@cache
def template(name: str) -> Template:
    """A template of this example, compiled once."""
    source = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return ImmutableSandboxedEnvironment().from_string(source)


def judge_text(question: str, answer: str) -> str:
    """What the judge continues with a grade."""
    return template("judge.jinja").render(question=question, answer=answer)


def scorer_text(question: str, answer: str) -> str:
    """What the scorer maps to a number."""
    return template("scorer.jinja").render(question=question, answer=answer)
