"""From a judge's words to a grade (pure): strict, in bounded time, never raising.

A text gives a grade only if it can be read in one way. `8`, `Score: 8/10`, `**8**`, `8.0` and
`{"score": 8}` are an 8; `8 or 9`, `eight-ish` and `I cannot judge this` are `Unread`, and so is a
grade outside the scale. What stands in front of a closing `</think>` is no verdict. A judge may
quote what it judges, which may be a verdict: an object or a labelled line counts at the beginning
or the end of its words, not amid them.

| parser | reads |
|---|---|
| `number` | the one number of the text, or that of a first or last line like `Score: 8` |
| `last_number` | the one number of the last line: reasons may come first |
| `json` | the score, grade, rating, verdict or value of the text's JSON object |
| `yes_no` | the word yes or no, not denied |
| `choice` | one of the setting's words, not denied |
| `rubric` | a JSON object with a grade for each criterion |

`expected` reads no words but probabilities: `offbeat.reward.expected`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offbeat.config_reward import Parser
from offbeat.reward.grade import LONGEST, Grade, Unread, on_scale
from offbeat.reward.verdict_json import InJson, grade_in_json, rubric_in_json
from offbeat.reward.verdict_numbers import grade_in_line, grade_in_text, other_grade
from offbeat.reward.verdict_words import choice_in_text

__all__ = ["LONGEST", "YES_NO", "Grade", "Parser", "Unread", "parse_verdict"]

YES_NO: Mapping[str, float] = {"yes": 1.0, "no": 0.0}

LONGEST_REASONS = 400_000
"""Characters of a text whose last line is read."""

NO_OBJECT = Unread("unparseable", "no JSON object with a score, grade, rating or verdict")


def parse_verdict(
    text: str,
    parser: Parser,
    scale: tuple[float, float],
    *,
    truncated: bool = False,
    choices: Mapping[str, float] | None = None,
    criteria: Sequence[str] = (),
) -> Grade | Unread:
    """The grade in a verdict. `scale` bounds the parsers that read numbers; `choices` are the
    words of "choice" with their values, `criteria` those of "rubric".

    A truncated text counts if its verdict stands alone or at its beginning, and not if that could
    have gone on to another one (`1` to `10`, `8.` to `8.5`).
    """
    text, thought, rest = text.rpartition("</think>")
    text = rest
    if not thought and text[:200].lstrip().startswith("<think>"):
        return Unread("unparseable", "cut while it still thinks: raise max_tokens")
    if len(text) > (LONGEST_REASONS if parser == "last_number" else LONGEST):
        return Unread("unparseable", f"verdict of {len(text)} characters")
    if parser == "yes_no":
        return choice_in_text(text, YES_NO, truncated)
    if parser == "choice":
        return choice_in_text(text, choices or {}, truncated)
    if parser == "rubric":
        return rubric_in_json(text, criteria, scale, truncated)
    if parser == "expected":
        return Unread("unparseable", "an expected value is read from probabilities")
    found = _number(text, parser, scale, truncated)
    return found if isinstance(found, Unread) else on_scale(found, scale)


def _number(
    text: str, parser: Parser, scale: tuple[float, float], truncated: bool
) -> float | Unread:
    if parser == "last_number":
        return _last_number(text, scale, truncated)
    found = grade_in_json(text, scale, truncated)
    if isinstance(found, Unread):
        return found
    if parser == "json":
        return NO_OBJECT if found is None else found.grade
    if found is not None:
        beside = other_grade(found.before, found.after, found.grade, scale)
        return found.grade if beside is None else beside
    if text.lstrip().startswith(("{", "```json")):
        return NO_OBJECT
    return grade_in_text(text, scale, truncated)


def _last_number(text: str, scale: tuple[float, float], truncated: bool) -> float | Unread:
    """The last line that is not empty must hold exactly one number: what it reasons with is
    written above it. A JSON object may stand there too, also over several lines."""
    if truncated:
        return Unread("unparseable", "cut before its end: raise max_tokens")
    lines = [line for line in map(str.strip, text.splitlines()) if line.strip("`*_ ")]
    if not lines:
        return Unread("unparseable", "no text")
    last = lines[-1]
    if len(last) > LONGEST:
        return Unread("unparseable", f"a last line of {len(last)} characters")
    if last.startswith("{") or last.endswith("}"):
        found = grade_in_json(last if "{" in last else text[-LONGEST:], scale, truncated)
        return found.grade if isinstance(found, InJson) else found or NO_OBJECT
    return grade_in_line(last, scale)
