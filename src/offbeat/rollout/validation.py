"""Greedy validation: held-out prompts through any engine, and an exact checker's verdict.

The run's own validation and `offbeat eval` share this. The checker has the signature of a reward
function, `(prompts, completions, **columns) -> list[float | None]`; a completion's text is handed
over whole, and where its answer ends is the checker's to say.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from offbeat.errors import RequestRefused, UserError
from offbeat.records import Completion, GenerateRequest, Progress, Prompt, Sampling

Generate = Callable[[GenerateRequest], AsyncIterator[Completion | Progress]]
Check = Callable[..., Any]


def greedy(max_tokens: int, stop: tuple[str, ...] = ()) -> Sampling:
    """Greedy sampling as validation uses it."""
    return Sampling(max_tokens=max_tokens, temperature=0.0, stop=stop)


async def validate(
    engine_generate: Generate,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    check: Check,
    *,
    name: str = "validation",
    concurrency: int = 64,
) -> dict[str, float]:
    """One completion of each prompt, checked: accuracy, n, mean_tokens, truncated, unscored.

    `accuracy` is the mean over what the checker scored: None and non-finite values, and prompts
    that the engine refuses, are counted as `unscored` and enter no mean (nan if nothing is left).
    `truncated` is the share of completions that ended at max_tokens. Raises `UserError` when the
    checker raises or returns the wrong number of scores.
    """
    gate = asyncio.Semaphore(concurrency)
    answers: list[Completion | None] = [None] * len(prompts)

    async def answer(place: int, prompt: Prompt) -> None:
        request = GenerateRequest(f"{name}/{place}", prompt.token_ids, 1, sampling)
        async with gate:
            try:
                async for item in engine_generate(request):
                    if isinstance(item, Completion):
                        answers[place] = item
            except RequestRefused:
                return

    async with asyncio.TaskGroup() as group:
        for place, prompt in enumerate(prompts):
            group.create_task(answer(place, prompt))
    done = [(p, a) for p, a in zip(prompts, answers, strict=True) if a is not None]
    scores = await run_check(check, [p for p, _ in done], [a.text for _, a in done])
    good = [score for score in scores if score is not None and math.isfinite(score)]
    return {
        "accuracy": _mean(good),
        "n": float(len(prompts)),
        "mean_tokens": _mean([float(a.tokens) for _, a in done]),
        "truncated": _mean([float(a.finish_reason == "length") for _, a in done]),
        "unscored": float(len(prompts) - len(good)),
    }


def unchecked(prompts: list[str], completions: list[str], **_: object) -> list[float | None]:
    """The checker of a run that has none: nothing is scored."""
    return [None] * len(completions)


async def run_check(
    check: Check, prompts: Sequence[Prompt], completions: Sequence[str]
) -> list[float | None]:
    """The checker's scores; a plain function runs in a thread, so that the loop stays free."""
    if not prompts:
        return []
    columns = _accepted(check, columns_of(prompts))
    texts = [prompt.text for prompt in prompts]
    try:
        if inspect.iscoroutinefunction(check):
            scores = await check(texts, list(completions), **columns)
        else:
            scores = await asyncio.to_thread(check, texts, list(completions), **columns)
            if inspect.isawaitable(scores):
                scores = await scores
    except Exception as error:  # the user's function may raise anything
        raise UserError(
            f"validate.function raised {type(error).__name__}: {error}; it must return a score "
            "or None for every completion"
        ) from error
    return as_scores(scores, len(prompts), "validate.function")


def as_scores(scores: object, wanted: int, who: str) -> list[float | None]:
    """A function's return value as scores; `UserError` when it is not `wanted` numbers or None."""
    try:
        found = [None if score is None else float(score) for score in scores]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise UserError(
            f"{who} returned {scores!r:.80}; it must return a list of numbers"
        ) from None
    if len(found) != wanted:
        raise UserError(
            f"{who} returned {len(found)} scores for {wanted} completions; it must return one each"
        )
    return found


def columns_of(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """The rows' columns as lists, aligned with the prompts; None where a row lacks one."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
    columns.setdefault("reference", [prompt.reference for prompt in prompts])
    return columns


def _accepted(check: Check, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns that the checker's signature takes: all with `**columns`, else those it names."""
    parameters = list(inspect.signature(check).parameters.values())
    every = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters[2:]}
    return {k: v for k, v in columns.items() if (k.isidentifier() if every else k in names)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
