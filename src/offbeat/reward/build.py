"""Builds a reward source from its section and from the replicas that the caller placed.

The caller makes engines and scorers on the source's own pool, starts them before the source and
stops them after it; the source only uses them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import ScoreItem
from offbeat.reward.cache import shared_cache
from offbeat.reward.disrm import DisRM
from offbeat.reward.function import FunctionSource
from offbeat.reward.genrm import GenRM
from offbeat.reward.judge_engines import EngineBackend, Generator
from offbeat.reward.judge_http import HttpBackend
from offbeat.reward.replicas import RESTARTS
from offbeat.reward.source import RewardSource, Scorer


def build_source(
    name: str,
    section: RewardSourceSection,
    *,
    base: Path | None = None,
    engines: Sequence[Generator] | None = None,
    scorers: Sequence[Scorer] | None = None,
    tokenizer_path: str | Path | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
    examples: Sequence[ScoreItem] = (),
    replace_engine: Callable[[int], Awaitable[Generator]] | None = None,
    replace_scorer: Callable[[int], Awaitable[Scorer]] | None = None,
    start_deadline_seconds: float = 600.0,
    max_restarts: int = RESTARTS,
    cache_path: Path | None = None,
    seed: int = 0,
) -> RewardSource:
    """The source, not started. `base` is where function files are looked up (the current folder).

    genrm without base_url needs `engines` (and reads the judge's tokenizer from `tokenizer_path`,
    default `model`); disrm needs `scorers`, and checks them on `examples` too; `transport` replaces
    the network of a base_url.
    `replace_engine` and `replace_scorer` end a replica that died and return a started one in its
    place, within `start_deadline_seconds`; so often on end at most (`max_restarts`).
    `cache_path` is the file of a genrm's verdict cache, one for all sources of a process that name
    it. `seed` is the run's; engines have theirs from who made them (`identity.source_seed`).
    """
    limits: dict[str, Any] = {
        "start_deadline_seconds": start_deadline_seconds,
        "max_restarts": max_restarts,
    }
    if section.kind == "function":
        return FunctionSource(name, section, base or Path.cwd())
    if section.kind == "disrm":
        if not scorers:
            raise UserError(f"reward.{name}: a disrm needs scorers on a pool of its own")
        return DisRM(
            name, section, scorers, examples=examples, replace_scorer=replace_scorer, **limits
        )
    cache = None if cache_path is None else shared_cache(cache_path)
    if section.base_url is not None:
        server = HttpBackend(section, name=name, transport=transport, seed=seed)
        return GenRM(name, section, server, cache)
    tokenizer = tokenizer_path or section.model
    if tokenizer is None:
        raise UserError(
            f"reward.{name}.model is missing; set it to the judge's directory, "
            "or base_url to a server's address"
        )
    if not engines:
        raise UserError(f"reward.{name}: a genrm needs engines on a pool of its own, or a base_url")
    judge = EngineBackend(
        engines, tokenizer, section, name=name, replace_engine=replace_engine, **limits
    )
    return GenRM(name, section, judge, cache)
