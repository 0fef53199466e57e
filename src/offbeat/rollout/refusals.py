"""Which requests cannot be run, and which models: each is refused in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from offbeat.errors import RequestRefused, UserError
from offbeat.records import FinishReason, GenerateRequest, Payload

Ends = Callable[[Sequence[int]], FinishReason | None]
MOST_WATCHED = 128
"""Tokens of `Sampling.watch`: vLLM tells of no more."""


def check_request(request: GenerateRequest, *, context: int, vocabulary: int, ends: Ends) -> None:
    """Raises `RequestRefused` for what cannot be run.

    `context` is the engine's, in tokens; `ends(ids)` says why a sample ends with its newest token,
    None if it goes on.
    """
    name, sampling, prompt = request.request_id, request.sampling, np.asarray(request.prompt_ids)
    size, more = len(prompt), sampling.max_tokens
    if size + more > context:
        raise RequestRefused(
            f"{name}: {size} prompt tokens + {more} max_tokens = {size + more} "
            f"exceed the context of {context}"
        )
    if size < 1 or more < 1 or request.n < 1:
        raise RequestRefused(
            f"{name}: {size} prompt tokens, {more} max_tokens and {request.n} completions must "
            "each be at least 1"
        )
    _check_tokens(f"{name}: prompt tokens", prompt, vocabulary)
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise RequestRefused(f"{name}: temperature {sampling.temperature} must be 0 or more")
    if len(sampling.watch) > MOST_WATCHED:
        raise RequestRefused(
            f"{name}: {len(sampling.watch)} tokens to watch are more than {MOST_WATCHED}"
        )
    if sampling.watch:
        _check_tokens(f"{name}: tokens to watch", np.asarray(sampling.watch), vocabulary)
    if any(not stop for stop in sampling.stop):
        raise RequestRefused(f"{name}: a stop string is empty")
    _check_indices(request)
    for index, tokens in request.resume:
        _check_resumed(f"{name}, sample {index}", tokens, vocabulary, ends)


def _check_indices(request: GenerateRequest) -> None:
    resumed = [index for index, _ in request.resume]
    known = [*request.done, *resumed]
    if len(set(known)) < len(known) or not all(0 <= index < request.n for index in known):
        raise RequestRefused(
            f"{request.request_id}: samples done {sorted(request.done)} and to be resumed "
            f"{sorted(resumed)} must be different ones of 0..{request.n - 1}"
        )


def _check_resumed(who: str, tokens: Payload, vocabulary: int, ends: Ends) -> None:
    sizes = len(tokens.token_ids), len(tokens.logprobs), len(tokens.versions)
    if len(set(sizes)) > 1:
        raise RequestRefused(
            f"{who} is to be resumed from {sizes[0]} tokens, {sizes[1]} log-probs and {sizes[2]} "
            "versions: they must be as many"
        )
    if not sizes[0]:
        return
    _check_tokens(f"{who}: tokens to resume from", tokens.token_ids, vocabulary)
    if (reason := ends(tokens.token_ids.tolist())) is not None:
        raise RequestRefused(
            f"{who} cannot be resumed: it has ended with its {sizes[0]} tokens ({reason})"
        )


def _check_tokens(what: str, ids: np.ndarray, vocabulary: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise RequestRefused(f"{what} {low}..{high} are not all in the vocabulary of {vocabulary}")


def check_architecture(model_path: str, config: Any) -> None:
    """Refuses by name what would be computed wrongly on longer contexts than a probe sees."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "layer_types", None) is None and getattr(
        config, "sliding_window", None
    )
    if kinds != {"full_attention"} or windowed:
        raise UserError(f"{model_path}: only full attention is supported, the model has {kinds}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        raise UserError(
            f"{model_path}: rope type {rope['rope_type']} depends on the longest sample, "
            "which running samples cannot share"
        )
