"""From a configuration file and overrides to a `Config`, or to one sentence that says the mend.

Order: read TOML (or a run's own config.json), put the overrides in, refuse unknown keys, check
types and bounds, resolve relative paths against the file's folder, and see that files are there.
Everything that is wrong is a `UserError` that names where the setting came from.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from offbeat.config import Config, RewardSourceSection, Section
from offbeat.config_reward import READY_TEMPLATES
from offbeat.config_schema import allowed, field_of, nearest, settings_of, takes
from offbeat.errors import UserError

Raw = dict[str, Any]
Origins = dict[str, str]
S = TypeVar("S", bound=Section)

_WITH_USER = re.compile(r"[^/@]*/*[^/]*@")
"""How an address begins that holds a user, also one whose `http://` is missing or misspelt."""


def load_config(
    path: Path, overrides: Sequence[str] = (), *, files: bool = True, base: Path | None = None
) -> Config:
    """The configuration of `path` with `--section.key value` overrides put in.

    Relative paths, also those of overrides, are relative to `base`, by default the file's folder.
    `files=False` leaves out whether the files and directories that it names exist.
    """
    raw = _read(path)
    origins = _apply(raw, parse_overrides(overrides))
    _refuse_unknown(raw, Config, (), path, origins)
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise UserError(_sentence(error, raw, path, origins)) from None
    config = _resolved(config, path.parent.resolve() if base is None else base)
    if files:
        check_files(config, path)
    return config


def save_config(config: Config, path: Path) -> None:
    """Writes the resolved configuration as JSON; `load_config` reads it back."""
    path.write_text(config.model_dump_json(by_alias=True, indent=2) + "\n", encoding="utf-8")


def parse_overrides(arguments: Sequence[str]) -> list[tuple[tuple[str, ...], str | None]]:
    """`--a.b v` and `--a.b=v` as (("a", "b"), "v"); the value is None for a flag without one."""
    found: list[tuple[tuple[str, ...], str | None]] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise UserError(f"`{word}` is no override; write --section.key value")
        key, equals, text = word[2:].partition("=")
        value: str | None = text if equals else None
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        found.append((tuple(key.split(".")), value))
    return found


def check_files(
    config: Config,
    path: Path,
    absent: Callable[[str], None] | None = None,
    *,
    rewards_only: bool = False,
) -> None:
    """Refuses model directories, data, templates and keys that are named and not there.

    With `absent` it is told of models, data and keys that are not there instead, as they may be
    on another machine; what is there is checked all the same. `rewards_only`: what the reward
    sources need.
    """

    def gone(key: str, value: Path, wanted: str) -> None:
        if absent is None:
            raise UserError(f"{path}: {key} = {str(value)!r} does not exist; set it to {wanted}")
        base = path.parent.resolve()
        absent(f"{key} = {value.relative_to(base) if value.is_relative_to(base) else value}")

    for key, model in _models(config)[1 if rewards_only else 0 :]:
        if not model.exists():
            gone(key, model, "a Hugging Face model directory")
        elif not (model / "config.json").is_file():
            raise UserError(
                f"{path}: {key} = {str(model)!r} is no Hugging Face model directory because it has "
                "no config.json; set it to one made with save_pretrained"
            )
    for key, value, wanted in (
        ("model.tokenizer", config.model.tokenizer, "a directory"),
        ("data.train", config.data.train, "a JSONL or parquet file or directory"),
        ("data.validation", config.data.validation, "a JSONL or parquet file or directory"),
    ):
        if value is not None and not value.exists() and not rewards_only:
            gone(key, value, wanted)
    _check_reward_files(config, path, gone)
    for name, variable in _keys_not_set(config):
        if absent is None:
            raise UserError(
                f"{path}: reward.{name}.api_key_env names the environment variable {variable}, "
                "which is not set; export it with the endpoint's key"
            )
        absent(f"the environment variable {variable}")


def check_no_passwords(
    sources: Mapping[str, RewardSourceSection], keeper: str = "the run's config.json"
) -> None:
    """Refuses addresses that hold a password: `keeper`, a file, holds what these sources are."""
    for name, source in sources.items():
        if any(_WITH_USER.match(url) for url in source.base_urls):
            raise UserError(
                f"reward.{name}.base_url holds a user or a password, which {keeper} would keep; "
                "take it out of the address, put the server's key into an environment variable, "
                f"and name that with reward.{name}.api_key_env"
            )


def _check_reward_files(config: Config, path: Path, gone: Callable[[str, Path, str], None]) -> None:
    """Templates must be here; anchors may be told as missing by `gone`."""
    for name, source in config.active_rewards.items():
        template = source.template
        if template is not None and str(template) not in READY_TEMPLATES and not template.is_file():
            raise UserError(
                f"{path}: reward.{name}.template = {str(template)!r} does not exist; set it to a "
                f"Jinja file, or to one of the ready ones: {', '.join(READY_TEMPLATES)}"
            )
        if source.anchors is not None and not source.anchors.is_file():
            gone(f"reward.{name}.anchors", source.anchors, "a JSONL file of graded answers")


def _keys_not_set(config: Config) -> list[tuple[str, str]]:
    """Reward sources with the environment variables that they name and that are not set."""
    named = [(name, s.api_key_env) for name, s in config.active_rewards.items()]
    return [(name, key) for name, key in named if key is not None and key not in os.environ]


def _models(config: Config) -> list[tuple[str, Path]]:
    """The model directories that a run needs, with the settings that name them; the actor first."""
    sources = config.active_rewards.items()
    judges = [(f"reward.{n}.model", Path(s.model)) for n, s in sources if s.has_pool and s.model]
    return [("model.path", config.model.path), *judges]


def _read(path: Path) -> Raw:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; `offbeat init DIR` writes one to start") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    form = "JSON" if path.suffix == ".json" else "TOML"
    try:
        raw = json.loads(text) if form == "JSON" else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not valid {form}: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold a table of settings")
    if "validation" in raw:
        raw.setdefault("validate", raw.pop("validation"))
    return raw


def _apply(raw: Raw, overrides: list[tuple[tuple[str, ...], str | None]]) -> Origins:
    """Puts overrides into `raw`; returns the option that each overridden key came from."""
    origins: Origins = {}
    new_sources = {key[1] for key, _ in overrides if len(key) == 3 and key[2] == "kind"}
    for written, text in overrides:
        option = "--" + ".".join(written)
        table: Raw = raw
        schema: type[Section] = Config
        place: tuple[str, ...] = ()
        names = list(written)
        while len(names) > 1:
            name, schema = _step(raw, schema, names, option, new_sources, place)
            place += name
            for part in name:
                inner = table.setdefault(part, {})
                if not isinstance(inner, dict):
                    raise UserError(f"{option} has no place: {'.'.join(place)} is no table")
                table = inner
            del names[: len(name)]
        key, field = field_of(schema, names[0])
        if field is None:
            raise UserError(f"{option} is no setting{nearest(names[0], schema, place)}")
        table[key] = _typed(field, text, option)
        origins[".".join((*place, key))] = option
    return origins


def _step(
    raw: Raw,
    schema: type[Section],
    names: list[str],
    option: str,
    new_sources: set[str],
    place: tuple[str, ...],
) -> tuple[tuple[str, ...], type[Section]]:
    """One table down: its key (two for a reward source) and the schema of what it holds."""
    key, field = field_of(schema, names[0])
    inner = None if field is None else takes(field)
    if inner is None:
        raise UserError(f"{option} is no setting{nearest(names[0], schema, place)}")
    if inner is not RewardSourceSection:
        return (key,), inner
    if len(names) < 3:
        raise UserError(f"{option} is no setting; write --reward.NAME.key value")
    sources = raw.setdefault("reward", {})
    for source in sources:
        if source.replace("-", "_") == names[1].replace("-", "_"):
            return (key, source), inner
    if names[1] in new_sources:
        return (key, names[1]), inner
    there = ", ".join(sources) or "none"
    raise UserError(f"{option} names no reward source of the file, which has: {there}")


def _typed(field: FieldInfo, text: str | None, option: str) -> Any:
    """An override's text as the value that the schema checks further."""
    kind = allowed(field)
    if takes(field) is not None:
        raise UserError(f"{option} is a section; write {option}.key value")
    if text is None:
        if kind == "true or false":
            return True
        raise UserError(f"{option} has no value; it must be {kind}")
    if text.lower() in {"none", "null"} and field.default is None:
        return None
    table = kind == "a table"
    if not table and "a list of" not in kind:
        return text
    if table or text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            example = """, written as JSON: '{"name": 1}'""" if table else ""
            raise UserError(f"{option} = {text} must be {kind}{example}") from None
    return [part.strip() for part in text.split(",")] if text else []


def _refuse_unknown(
    raw: Raw, schema: type[Section], place: tuple[str, ...], path: Path, origins: Origins
) -> None:
    for name, value in raw.items():
        key, field = field_of(schema, name)
        if field is None or key != name:
            full = ".".join((*place, name))
            raise UserError(f"{path}: unknown key {full}{nearest(name, schema, place)}")
        inner = takes(field)
        if inner is None or not isinstance(value, dict):
            continue
        if inner is not RewardSourceSection:
            _refuse_unknown(value, inner, (*place, name), path, origins)
            continue
        for source, table in value.items():
            if isinstance(table, dict):
                _refuse_unknown(table, inner, (*place, name, source), path, origins)


def _sentence(error: ValidationError, raw: Raw, path: Path, origins: Origins) -> str:
    """The first thing that is wrong: where it came from, the key, its value, what is allowed."""
    first = error.errors(include_url=False)[0]
    schema: type[Section] | None = Config
    field: FieldInfo | None = None
    value: Any = raw
    place: tuple[str, ...] = ()
    for part in first["loc"]:
        if schema is None or not isinstance(part, str):
            break
        named = field is not None and takes(field) is RewardSourceSection and len(place) == 1
        if not named:
            _, field = field_of(schema, part)
            inner = None if field is None else takes(field)
            schema = Config if inner is RewardSourceSection else inner
        else:
            schema, field = RewardSourceSection, None
        value = value.get(part) if isinstance(value, dict) else value
        place += (part,)
    key = ".".join(place)
    if first["type"] == "value_error":
        said = str(first["ctx"]["error"])
        mine = f"{key}.{said}" if key else said
        return f"{origins.get(mine.split(' ', 1)[0], path)}: {mine}"
    origin = origins.get(key, str(path))
    if field is None or takes(field) is not None:
        shown = json.dumps(value, default=str)
        return f"{origin}: {key} = {shown} must be a table: write [{key}] with its settings"
    if first["type"] == "missing":
        return f"{origin}: {key} is missing; set it to {allowed(field)} ({field.description})"
    shown = json.dumps(value, default=str)
    return f"{origin}: {key} = {shown} must be {allowed(field)} ({field.description})"


def _resolved(section: S, base: Path) -> S:
    """The section with every path in it absolute."""
    updates: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, Section):
            updates[name] = _resolved(value, base)
        elif name == "reward":
            updates[name] = {source: _resolved(table, base) for source, table in value.items()}
        elif isinstance(value, Path):
            ready = name == "template" and str(value) in READY_TEMPLATES
            updates[name] = value if ready else _absolute(value, base)
        elif name == "function" and value is not None:
            file, colon, function = value.rpartition(":")
            if file.endswith(".py"):
                updates[name] = f"{_absolute(Path(file), base)}{colon}{function}"
        elif isinstance(section, RewardSourceSection) and name == "model" and section.has_pool:
            updates[name] = None if value is None else str(_absolute(Path(value), base))
    return section.model_copy(update=updates)


def _absolute(path: Path, base: Path) -> Path:
    return Path(os.path.normpath(base / path.expanduser()))


def reference() -> str:
    """All settings as Markdown tables: docs/configuration.md."""
    parts = [_HEAD]
    for title, purpose, rows in settings_of(Config):
        parts.append(f"## {title}\n\n{purpose}\n")
        parts.append("| setting | takes | default | what it is for |\n|---|---|---|---|")
        parts.append("\n".join(f"| `{n}` | {t} | {d} | {p} |" for n, t, d, p in rows) + "\n")
    return "\n".join(parts)


_HEAD = """# Configuration

Generated from the schema by `python -m offbeat.config_file`; do not edit.

A run is one TOML file. `offbeat check run.toml` prints what comes out of it. Any setting can be
given on the command line instead: `--train.learning_rate 1e-5`, `--reward.judge.weight=0.5`,
`--run second`; hyphens and underscores are the same there, lists are written `a,b` or as JSON,
tables (`engine_args`) as JSON, and `none` takes an optional setting back. Relative paths, in the
file and in overrides, are relative to the file's folder. Unknown keys are refused.

To train from some of the configured rewards only: `--use_rewards judge` (or `judge,scorer`).
"""


if __name__ == "__main__":
    print(reference(), end="")
