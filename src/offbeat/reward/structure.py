"""The form that a judge's verdict must have (pure): JSON, yes or no, or a number.

An engine that enforces it makes every verdict readable; `parse_verdict` reads it all the same,
because a verdict can be cut at max_tokens and a server may ignore what it was asked for. What the
structure admits and the parser refuses is only a number outside the scale.
"""

from __future__ import annotations

import json
from typing import Any

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Structure

YES_NO = ("yes", "no")
DECIMALS = 2
"""Of a number that a regular expression admits: finer grades say nothing."""

_SPELT = '{"score": 1234567890.5}'


def structure_of(section: RewardSourceSection, criteria: int = 0) -> Structure | None:
    """What an engine of the source's own pool is asked to enforce; None: it writes freely.

    `criteria` is the number of a rubric's criteria where a row has its own, else 0.

    "auto" leaves numbers free: their verdicts may give reasons first.
    """
    free = section.structured == "off" or section.engine != "vllm"
    if free or (section.structured == "auto" and section.parser == "number"):
        return None
    return _structure(section)


def server_fields(section: RewardSourceSection, criteria: int = 0) -> dict[str, Any]:
    """What a chat completion's body says of the form, with structured = "on" only.

    JSON by OpenAI's `response_format`. It has no form for a plain yes, no or number: those go by
    `structured_outputs`, the field of vLLM's own server. Other servers refuse it, or ignore it.
    """
    if section.structured != "on":
        return {}
    structure = _structure(section)
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


def _structure(section: RewardSourceSection) -> Structure:
    if section.parser == "yes_no":
        return Structure(choices=YES_NO)
    low, high = section.scale
    if section.parser == "number":
        digits = len(str(int(max(abs(low), abs(high)))))
        sign = "-?" if low < 0 else ""
        more = f"[0-9]{{0,{digits - 1}}}" if digits > 1 else ""
        return Structure(regex=rf"{sign}(0|[1-9]{more})(\.[0-9]{{1,{DECIMALS}}})?")
    grade = {"type": "number", "minimum": _plain(low), "maximum": _plain(high)}
    schema = {
        "type": "object",
        "properties": {"score": grade},
        "required": ["score"],
        "additionalProperties": False,
    }
    return Structure(json_schema=json.dumps(schema))


def _plain(bound: float) -> float:
    """An integer where it is one: some servers read 10.0 as another thing than 10."""
    return int(bound) if bound == int(bound) else bound
