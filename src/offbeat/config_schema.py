"""What the schema in `config` says about itself: names, what a setting takes, the nearest name."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from offbeat.config import Config, Section

Row = tuple[str, str, str, str]

_PLAIN: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    tuple[str, ...]: "a list of texts",
    tuple[float, float]: "a list of two numbers",
}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def field_of(schema: type[Section], written: str) -> tuple[str, FieldInfo | None]:
    """The key and field that a name means: hyphens are underscores, aliases stand for fields."""
    name = written.replace("-", "_")
    for field_name, field in schema.model_fields.items():
        if name in (field_name, field.alias):
            return field.alias or field_name, field
    return written, None


def takes(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds (for `reward`: the one of each source), if it does."""
    kind = field.annotation
    if get_origin(kind) is dict:
        kind = get_args(kind)[1]
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def allowed(field: FieldInfo) -> str:
    """What a field takes, in words: its type, choices and bounds."""
    return _words(field.annotation, field.metadata)


def _words(kind: Any, metadata: list[Any]) -> str:
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        return _words(inner, [m for item in more for m in getattr(item, "metadata", [item])])
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        quoted = ", ".join(json.dumps(choice) for choice in choices)
        return quoted if len(choices) == 1 else f"one of {quoted}"
    if get_origin(kind) in (typing.Union, types.UnionType):
        return _words(next(k for k in get_args(kind) if k is not type(None)), metadata)
    bounds = [
        f"{word} {getattr(item, name):g}"
        for item in metadata
        for name, word in _BOUNDS.items()
        if getattr(item, name, None) is not None
    ]
    if any(getattr(item, "pattern", None) for item in metadata):
        bounds.append("made of letters, digits, `.`, `_` and `-`")
    text = _PLAIN.get(kind, "a table")
    return f"{text} {' and '.join(bounds)}" if bounds else text


def nearest(name: str, schema: type[Section], place: tuple[str, ...]) -> str:
    """What to write instead of an unknown name: the same name elsewhere, else the closest here."""
    wanted = name.replace("-", "_")
    here = [field.alias or key for key, field in schema.model_fields.items()]
    close = difflib.get_close_matches(wanted, here, 1, 0.75)
    if not close:
        for title, _, rows in settings_of(Config):
            if any(row[0] == wanted for row in rows) and schema is not Config:
                return f"; {wanted} belongs to {title.replace('Top level', 'the top level')}"
    close = close or difflib.get_close_matches(wanted, here, 1, 0.0) or here[:1]
    return f"; did you mean {'.'.join((*place, close[0]))}?"


def settings_of(schema: type[Config]) -> Iterator[tuple[str, str, list[Row]]]:
    """Every section: its title, its purpose, and name, type, default and use of each setting."""
    top = [_row(n, f) for n, f in schema.model_fields.items() if takes(f) is None]
    yield "Top level", "Before the first section of the file.", top
    for name, field in schema.model_fields.items():
        section = takes(field)
        if section is None:
            continue
        key = field.alias or name
        title = "[reward.NAME]" if key == "reward" else f"[{key}]"
        rows = [_row(n, f) for n, f in section.model_fields.items()]
        yield title, (section.__doc__ or "").strip().splitlines()[0], rows


def _row(name: str, field: FieldInfo) -> Row:
    if field.is_required():
        default = "required"
    elif field.default in (None, PydanticUndefined):
        default = "none"
    else:
        default = f"`{_toml(field.default)}`"
    return name, allowed(field).replace("|", "\\|"), default, field.description or ""


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, default=str)
