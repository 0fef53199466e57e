"""What `check` says and `train` makes sure of before anything starts. Needs neither torch nor Ray.

From cheap to dear: the run's name, devices, rows, reward functions on three rows, external judges
over HTTP, and last the tokens of every prompt.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Container, Mapping, Sequence
from itertools import islice

import numpy as np

from offbeat.cli_cluster import Assumed, Say, check_devices, check_engines
from offbeat.cli_judges import probe_judges
from offbeat.cli_models import check_models
from offbeat.cli_templates import check_template, reference_answer
from offbeat.config import Config, RewardSourceSection, Section
from offbeat.config_file import check_no_passwords
from offbeat.data import (
    Row,
    Split,
    load_prompts,
    load_tokenizer,
    plain_prompt,
    planned_steps,
    select_rows,
)
from offbeat.disk import check_local
from offbeat.errors import UserError
from offbeat.model_files import model_positions
from offbeat.pick import picked
from offbeat.records import Prompt, ScoreItem
from offbeat.reward.anchor_files import read_anchors
from offbeat.reward.function import WorkerFailed, WorkerProcess
from offbeat.reward.function_style import SHAPES, Outcome


def preflight(
    config: Config,
    say: Say,
    warn: Say | None = None,
    assumed: Assumed | None = None,
    *,
    new: bool = True,
) -> None:
    """Checks everything that can be checked without starting anything; raises `UserError`.

    `warn` is told what a run goes on without; by default it is `say`. With `assumed` the run is
    for another cluster: what is not on this machine is left out and said. `new`: its directory
    must not be there yet.
    """
    say(settings_text(config))
    if new and config.run_dir.exists():
        raise UserError(
            f"run name exists: {config.run_dir}; choose another with --run, or go on with it: "
            f"offbeat resume {config.run_dir}"
        )
    check_no_passwords(config.reward)
    if assumed is None:
        check_local(config.ledger_path)
        _check_folders(config)
    check_devices(config, say, assumed)
    check_engines(config, say, assumed=assumed is not None)
    elsewhere = assumed is not None
    rows = _rows(config, "train", elsewhere)
    held_out = _rows(config, "validation", elsewhere) if config.data.validation else []
    _check_columns(config, rows, warn or say)
    _check_functions(config, rows, held_out, say)
    for name, source in config.active_rewards.items():
        check_template(config, name, source, rows, say)
        if source.kind == "genrm" and source.base_url is not None:
            if elsewhere:
                servers = ", ".join(source.shown_servers)
                say(f"reward/{name}: {servers} is not asked from here")
            else:
                probe_judges(name, source, say, warn or say)
        _check_anchors(name, source, say)
    check_models(config, assumed=elsewhere)
    _check_prompts(config, {"train": rows, "validation": held_out}, say, warn or say)


def _rows(config: Config, split: Split, elsewhere: bool) -> Sequence[Row]:
    """The rows of a split; none if it may be on another machine and is not on this one."""
    path = config.data.train if split == "train" else config.data.validation
    if elsewhere and path is not None and not path.exists():
        return []
    return select_rows(config, split)[1]


def _check_folders(config: Config) -> None:
    """What a run will make must be able to be there."""
    places = {"runs_dir": config.run_dir, "ledger_dir": config.ledger_path.parent}
    if config.weights.folder is not None:
        places["weights.folder"] = config.weights.folder
    for setting, folder in places.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            what = "cannot be written to" if there.is_dir() else "is no folder"
            raise UserError(
                f"{setting}: {folder} cannot be made, as {there} {what}; set it to a folder that "
                "can be written to"
            )


def _check_columns(config: Config, rows: Sequence[Row], warn: Say) -> None:
    """Refuses columns that settings name and no row has; says which sources score no row."""
    data, there = config.data, {name for row in rows for name in row.columns}
    named = {f"reward.{name}.when": tuple(s.when) for name, s in config.active_rewards.items()}
    if data.reference_column != type(data).model_fields["reference_column"].default:
        named["data.reference_column"] = (data.reference_column,)
    for setting, columns in named.items():
        for column in columns if rows else ():
            if column not in there:
                raise UserError(
                    f"{setting} names the column {column!r}, which no row of {data.train} has; "
                    f"there are {', '.join(sorted(there))}"
                )
    for name in config.active_rewards:
        if rows and not _rows_of(config, name, rows):
            warn(f"reward.{name} scores no row of {data.train}: none picks it")
    if config.validation.every and data.validation is None:
        warn(
            f"validate.every = {config.validation.every} does nothing, as data.validation is not "
            "set; set it to a file of held-out prompts"
        )


_FUNCTION = ("function", "workers", "style", "arguments")
_GENRM = (
    *("base_url", "api_key_env", "requests_per_minute", "tokens_per_minute", "parser", "choices"),
    *("rubric", "votes", "vote", "pairwise", "cache", "seed", "scale", "max_tokens", "structured"),
    *("temperature", "stop"),
)
_DISRM = ("over_length", "label", "label_values")
_MODEL = (
    *("engine", "engine_args", "memory_share", "model", "replicas", "devices_per_replica", "pool"),
    *("device_share", "template", "chat", "dtype", "threads", "seats", "max_context"),
)
_OF_OTHERS: dict[str, tuple[str, ...]] = {
    "function": (*_MODEL, *_GENRM, *_DISRM),
    "genrm": (*_FUNCTION, *_DISRM),
    "disrm": (*_FUNCTION, *_GENRM),
}


def settings_text(config: Config) -> str:
    """The resolved settings as TOML, those of unused reward sources left out."""
    lines: list[str] = []

    def table(title: str, section: Section, hidden: Container[str] = ()) -> None:
        if title:
            lines.append(f"\n[{title}]")
        for name, value in section:
            if value is None or isinstance(value, Section) or name in hidden:
                continue
            if isinstance(value, dict):  # engine_args; the reward sources are tables of their own
                if name != "reward" and value:
                    inner = ", ".join(f"{key} = {_toml(item)}" for key, item in value.items())
                    lines.append(f"{name} = {{ {inner} }}")
                continue
            if isinstance(section, RewardSourceSection) and name == "base_url":
                value = [*section.shown_servers]
            lines.append(f"{name} = {_toml(value)}")

    table("", config)
    for name, value in config:
        if isinstance(value, Section):
            table(type(config).model_fields[name].alias or name, value)
    for name, source in config.active_rewards.items():
        table(f"reward.{name}", source, _OF_OTHERS[source.kind])
    return "\n".join(lines)


def _toml(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _check_functions(
    config: Config, rows: Sequence[Row], held_out: Sequence[Row], say: Say
) -> None:
    """Runs every function on three rows that it scores, with empty, reference and short answers.

    Each runs in a worker process with its deadline, as it does in training.
    """
    found = [
        (f"reward.{name}.function", source.function, _rows_of(config, name, rows), source)
        for name, source in config.active_rewards.items()
        if source.kind == "function" and source.function is not None
    ]
    spec = config.validation.function
    if spec is not None:
        seconds = config.validation.deadline_seconds
        checker = RewardSourceSection.model_validate(
            {"kind": "function", "function": spec, "deadline_seconds": seconds}
        )
        found.append(("validate.function", spec, held_out or rows, checker))
    if found:
        say("")
    for key, spec, of, source in found:
        if not of:
            none = "it scores no row" if rows else "there are no rows here"
            say(f"{key} = {spec!r} is not tried, as {none}")
            continue
        prompts = [plain_prompt(config, row) for row in of[:3]]
        worker = WorkerProcess(spec, config.base_dir, key, source.style, source.arguments)
        answers = {
            "empty": [""] * len(prompts),
            "reference": [reference_answer(config, prompt) for prompt in prompts],
            "short": ["x"] * len(prompts),
        }
        who = f"{key} = {spec!r}"
        asyncio.run(_try_function(worker, who, prompts, answers, source, say))


def _rows_of(config: Config, name: str, rows: Sequence[Row]) -> Sequence[Row]:
    """The first three rows that a source scores."""
    data, sources = config.data, config.active_rewards
    scored = (
        row
        for row in rows
        if name in picked(row.columns, sources, data.reward_column, tuple(config.reward))
    )
    return list(islice(scored, 3))


async def _try_function(
    worker: WorkerProcess,
    who: str,
    prompts: Sequence[Prompt],
    kinds: Mapping[str, Sequence[str]],
    source: RewardSourceSection,
    say: Say,
) -> None:
    failures: list[str] = []
    shape = SHAPES[source.style]
    try:
        await worker.start()
        say(f"{who} on {len(prompts)} rows:")
        for kind, answers in kinds.items():
            items = [
                ScoreItem(prompt, answer, tokens=len(answer.split()))
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
            began = time.perf_counter()
            answer = await worker.call(items, source.deadline_seconds)
            took = (time.perf_counter() - began) * 1000
            if answer.get("cause") == "bad_result":
                raise UserError(f"{who} {answer['reason']}; {shape}")
            if "cause" in answer:
                shown = f"raised {answer['reason']}"
                failures.append(shown)
            else:
                outcomes = answer["outcomes"]
                failures += [said for outcome in outcomes if (said := _unusable(outcome))][:1]
                shown = ", ".join(_shown(outcome) for outcome in outcomes)
            say(f"  {kind} answers: {shown} ({took:.1f} ms)")
    except WorkerFailed as error:
        raise UserError(f"{who} cannot be used: {error}; mend the function") from None
    finally:
        await worker.kill()
    if len(failures) == len(kinds):
        raise UserError(f"{who} fails on every kind of answer: {failures[0]}; {shape}")


def _unusable(outcome: Outcome) -> str | None:
    """Why an outcome is no reward; None if it is one or no opinion."""
    if "cause" in outcome:
        raised = "raised " if outcome["cause"] == "raised" else ""
        return f"{raised}{outcome['reason']}"
    value = outcome["value"]
    return None if value is None or math.isfinite(value) else f"returned {value}"


def _shown(outcome: Outcome) -> str:
    said = _unusable(outcome)
    if said is not None and "cause" in outcome:
        return said
    value = outcome["value"]
    return "no opinion" if value is None else f"{value:g}"


def _check_anchors(name: str, source: RewardSourceSection, say: Say) -> None:
    """Refuses a malformed file of anchors; says how many there are."""
    path = source.anchors
    if path is None:
        return
    if not path.exists():  # else it was refused before: it may be on another machine
        say(f"reward/{name}: {path} is not read, as it is not on this machine")
        return
    count = len(read_anchors(name, source))
    say(
        f"reward/{name}: {count} anchor{'s' if count > 1 else ''} of {path.name}, judged at the "
        f"start and every {source.anchors_every} steps"
    )


def _check_prompts(
    config: Config, rows: Mapping[Split, Sequence[Row]], say: Say, warn: Say
) -> None:
    """Tokenises all prompts, and says what a run comes to."""
    say("")
    total = len(rows["train"]) * config.data.epochs
    why_not = None
    try:
        source = config.model.tokenizer or config.model.path
        if source.exists():
            tokenizer = load_tokenizer(config)
        else:
            why_not = f"{source} is not on this machine"
    except ImportError as error:
        why_not = f"transformers does not import: {error}"
    for split, of in rows.items():
        if not of:
            continue
        if why_not is not None:
            word = "training" if split == "train" else split
            say(f"{len(of)} {word} rows read; not tokenised, as {why_not}")
            continue
        prompts = load_prompts(config, tokenizer, split)
        tokens = np.array([len(prompt.token_ids) for prompt in prompts.prompts])
        say(
            f"{split}: {len(prompts)} prompts, {tokens.min()} to {tokens.max()} tokens, "
            f"mean {tokens.mean():.1f}"
        )
        if prompts.skipped:
            warn(_skipped(split, prompts.skipped))
        if split == "train":
            total = prompts.total
    _say_sizes(config, total, say)


def _say_sizes(config: Config, total: int, say: Say) -> None:
    """Steps and batches; `total` prompts over all epochs, 0 if the data is not here."""
    train, rollout = config.train, config.rollout
    if total:
        steps = planned_steps(config, total)
        say(f"steps: {steps}, of {total} prompts in {config.data.epochs} epoch(s) at most")
    elif train.steps is not None:
        groups = train.steps * train.groups_per_step
        say(f"steps: {train.steps} at most, which take {groups} prompts of the data")
    say(
        f"a step: {train.groups_per_step} groups x {rollout.group_size} samples = "
        f"{config.samples_per_step} samples, {config.tokens_per_step} completion tokens at most"
    )
    say(
        f"live groups: {config.max_live_groups} at most; every sample's staleness is bounded by "
        f"{train.max_staleness}"
    )
    note = _positions_note(config)
    if note:
        say(note)


def _skipped(split: str, lines: Sequence[int]) -> str:
    """Which rows a run goes on without."""
    shown = ", ".join(map(str, lines[:10])) + (", ..." if len(lines) > 10 else "")
    return f"{split}: {len(lines)} prompts are too long and skipped, in line {shown}"


def _positions_note(config: Config) -> str | None:
    """A note when the context is longer than the positions that the model was made for."""
    positions = model_positions(config.model.path)
    if positions is None or config.rollout.max_context <= positions:
        return None
    return (
        f"note: rollout.max_context = {config.rollout.max_context} is more than the model's "
        f"{positions} positions"
    )
