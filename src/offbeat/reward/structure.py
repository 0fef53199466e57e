"""The form that a judge's verdict must have (pure): JSON, one of some words, or a number.

An engine that enforces it makes every verdict readable; `parse_verdict` reads it all the same,
because a verdict can be cut at max_tokens and a server may ignore what it was asked for. What the
structure admits and the parser refuses is only a number outside the scale.

| parser | form |
|---|---|
| `json` | an object with a score within the scale |
| `rubric` | an object with a grade within the scale for each criterion, by its number |
| `yes_no`, `choice`, pairwise | one of the words |
| `number` | a number alone |
| `last_number` | lines, the last one a number |
| `expected` | none: the judge's own probabilities are wanted |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Structure
from offbeat.reward.verdict import YES_NO

PREFERENCES = ("A", "B", "tie")
"""What a comparison of two answers comes to, where the setting choices gives no other words."""

DECIMALS = 2
"""Of a number that a regular expression admits: finer grades say nothing."""

_SPELT = '{"score": 1234567890.5}'


def structure_of(section: RewardSourceSection, criteria: int = 0) -> Structure | None:
    """What an engine of the source's own pool is asked to enforce; None: it writes freely.

    `criteria` is the number of a rubric's criteria where a row has its own, else 0. "auto" leaves
    numbers free: their verdicts may give reasons first.
    """
    if section.structured == "off" or section.engine != "vllm":
        return None
    numbers = section.pairwise is None and section.parser in {"number", "last_number"}
    if section.structured == "auto" and numbers:
        return None
    return _structure(section, criteria)


def server_fields(section: RewardSourceSection, criteria: int = 0) -> dict[str, Any]:
    """What a chat completion's body says of the form, with structured = "on" only.

    JSON by OpenAI's `response_format`. It has no form for plain words or a number: those go by
    `structured_outputs`, the field of vLLM's own server. Other servers refuse it, or ignore it.
    """
    structure = _structure(section, criteria) if section.structured == "on" else None
    if structure is None:
        return {}
    if structure.json_schema is not None:
        schema = {"name": "verdict", "strict": True, "schema": json.loads(structure.json_schema)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if structure.choices:
        return {"structured_outputs": {"choice": list(structure.choices)}}
    return {"structured_outputs": {"regex": structure.regex}}


def check_spelling(structure: Structure | None, tokenizer: Any, name: str) -> None:
    """Refuses a tokenizer that has no tokens for the structure: nothing could be generated."""
    if structure is None:
        return
    wanted = [*structure.choices] or [_SPELT if structure.json_schema else "1234567890.5"]
    for text in wanted:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        said = "".join(tokenizer.decode(ids).split())
        if said != "".join(text.split()) or tokenizer.unk_token_id in ids:
            raise UserError(
                f"reward.{name}.structured: the judge's tokenizer cannot spell {text}; "
                'set structured = "off"'
            )


def _structure(section: RewardSourceSection, criteria: int) -> Structure | None:
    parser = section.parser
    if parser == "expected":
        return None
    if section.pairwise is not None:
        return Structure(choices=tuple(section.choices) or PREFERENCES)
    if parser == "choice":
        return Structure(choices=tuple(section.choices))
    if parser == "yes_no":
        return Structure(choices=tuple(YES_NO))
    if parser == "number":
        return Structure(regex=_number(section))
    if parser == "last_number":
        return Structure(regex=rf"([^\n]*\n)*{_number(section)}")
    keys = ["score"]
    if parser == "rubric":
        keys = [str(place) for place in range(1, (criteria or len(section.rubric)) + 1)]
    return _object(section, keys) if keys else None


def _number(section: RewardSourceSection) -> str:
    low, high = section.scale
    digits = len(str(int(max(abs(low), abs(high)))))
    sign = "-?" if low < 0 else ""
    more = f"[0-9]{{0,{digits - 1}}}" if digits > 1 else ""
    return rf"{sign}(0|[1-9]{more})(\.[0-9]{{1,{DECIMALS}}})?"


def _object(section: RewardSourceSection, keys: Sequence[str]) -> Structure:
    low, high = section.scale
    grade = {"type": "number", "minimum": _plain(low), "maximum": _plain(high)}
    schema = {
        "type": "object",
        "properties": dict.fromkeys(keys, grade),
        "required": list(keys),
        "additionalProperties": False,
    }
    return Structure(json_schema=json.dumps(schema))


def _plain(bound: float) -> float:
    """An integer where it is one: some servers read 10.0 as another thing than 10."""
    return int(bound) if bound == int(bound) else bound
