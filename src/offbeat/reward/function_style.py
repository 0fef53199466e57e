"""How a reward function is called, and what its answer is: Offbeat's, TRL's and verl's conventions.

Standard library only: worker processes import it and start fast. Whatever the style, an answer is a
list of outcomes, one a sample: `{"value": number | None}`, perhaps with `raw`, its text; or
`{"cause", "reason"}`. A call that failed as a whole is one `{"cause", "reason"}` alone.

Invariant: whatever a function raises or returns becomes an outcome, also an object that raises at
all that is asked of it. Only what ends the process outright does so.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from offbeat.errors import UserError

RewardFunction = Callable[..., Any]
Style = Literal["offbeat", "trl", "verl"]
Outcome = dict[str, Any]
Run = Callable[[Awaitable[Any]], Any]

RAW_KEPT = 4000
SPECIAL = ("finish_reason", "completion_tokens")
"""What is told of a completion to a function that names it."""
SHAPES: Mapping[str, str] = {
    "offbeat": "it must take (prompts, completions, **columns) and return a number or None for "
    "each completion",
    "trl": "it must take prompts, completions and columns by name, as TRL's reward_funcs do, and "
    "return a number or None for each completion",
    "verl": "it must take data_source, solution_str, ground_truth and extra_info by name, as "
    "verl's compute_score does, and return a number, or a dict with a score",
}
_NO_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a data set that TRL hands to no function."""
_NOT_HERE = {
    "completion_ids": "a reward source sees texts; name completion_tokens, their number, instead",
    "environments": "there are no environments",
}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Calls:
    """Samples to be scored in one call, as lists of equal length; `columns` are the rows' own.

    `messages` are those of a conversational prompt, else None. `tokens` None: not counted.
    """

    prompts: list[str]
    completions: list[str]
    columns: dict[str, list[Any]]
    messages: list[list[dict[str, str]] | None] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)

    def special(self) -> dict[str, list[Any]]:
        """The special columns."""
        return {"finish_reason": self.finish_reasons, "completion_tokens": self.tokens}


@dataclass(frozen=True, slots=True)
class Caller:
    """A function with its style and the arguments that the configuration gives it."""

    function: RewardFunction
    style: Style
    arguments: Mapping[str, Any]

    @property
    def one_by_one(self) -> bool:
        """Whether it scores one sample after another, so that a deadline is one sample's."""
        return self.style == "verl" and not _is_async(self.function)

    def check(self, who: str, setting: str) -> None:
        """Raises `UserError` for a function that cannot be called so, and for arguments that it
        does not take. `who` names the function, `setting` where it is set."""
        parameters = _parameters(self.function, who, setting)
        if self.style == "offbeat":
            _check_two_lists(parameters, who, setting)
        else:
            needed = "completions" if self.style == "trl" else "solution_str"
            _check_by_name(parameters, needed, self.style, who, setting)
        ours = {"trl": ("prompts", "completions"), "verl": ("solution_str",)}.get(self.style, ())
        _check_arguments(self, parameters, ours, who, setting.removesuffix(".function"))

    def __call__(self, calls: Calls, run: Run) -> dict[str, Any]:
        """Calls the function and sorts out what happened, as plain values: `{"outcomes": [...]}`,
        or `{"cause", "reason"}` for an exception ("raised") or an answer of another length or type
        ("bad_result"). `run` runs an awaitable to its end."""
        if self.style == "verl":
            return {"outcomes": self._each(calls, run)}
        try:
            result = self._offbeat(calls) if self.style == "offbeat" else self._trl(calls)
            if _is_awaitable(result):
                result = run(result)
        except BaseException as error:  # boundary
            return {"cause": "raised", "reason": reason_of(error)}
        try:
            return _listed(result, len(calls.completions))
        except BaseException as error:  # boundary
            return _bad(f"returned {type(result).__name__} that is no list ({_text(error)})")

    def _offbeat(self, calls: Calls) -> Any:
        taken = accepted(self.function, calls.columns, calls.special(), skip=2)
        return self.function(
            list(calls.prompts), list(calls.completions), **(taken | dict(self.arguments))
        )

    def _trl(self, calls: Calls) -> Any:
        """By keyword; a conversational prompt gives its completion as a list of one message."""
        conversations = calls.messages or [None] * len(calls.prompts)
        given: dict[str, Any] = {
            "prompts": [
                prompt if messages is None else messages
                for prompt, messages in zip(calls.prompts, conversations, strict=True)
            ],
            "completions": [
                text if messages is None else [{"role": "assistant", "content": text}]
                for text, messages in zip(calls.completions, conversations, strict=True)
            ],
            "trainer_state": None,
            "log_extra": _unlogged,
            "log_metric": _unlogged,
        }
        columns = {k: v for k, v in calls.columns.items() if k not in _NO_COLUMNS}
        given = columns | given | dict(self.arguments)
        return self.function(**accepted(self.function, given, calls.special()))

    def _each(self, calls: Calls, run: Run) -> list[Outcome]:
        """verl's function scores a sample alone; async ones are awaited together."""
        outcomes: list[Any] = [self._guarded(calls, i) for i in range(len(calls.completions))]
        waiting = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, _Waiting)]
        if waiting:
            for i, result in zip(waiting, self._awaited(outcomes, waiting, run), strict=True):
                outcomes[i] = result
        return [_outcome(outcome) for outcome in outcomes]

    def _awaited(self, outcomes: Sequence[Any], waiting: Sequence[int], run: Run) -> list[Any]:
        try:
            found: list[Any] = run(_gathered([outcomes[i].result for i in waiting]))
        except BaseException as error:  # boundary
            return [_Raised(reason_of(error))] * len(waiting)
        return found

    def _guarded(self, calls: Calls, i: int) -> Any:
        try:
            result = self._verl(calls, i)
            return _Waiting(result) if _is_awaitable(result) else result
        except BaseException as error:  # boundary
            return _Raised(reason_of(error))

    def _verl(self, calls: Calls, i: int) -> Any:
        row = {name: values[i] for name, values in calls.columns.items()}
        model = row.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else None
        extra = row.get("extra_info")
        given: dict[str, Any] = {
            "data_source": row.get("data_source") or "",
            "solution_str": calls.completions[i],
            "ground_truth": row.get("reference") if truth is None else truth,
            "extra_info": {} if extra is None else extra,
        }
        special = {name: values[i] for name, values in calls.special().items() if values}
        return self.function(**accepted(self.function, given | dict(self.arguments), special))


@dataclass(frozen=True, slots=True)
class _Raised:
    """What a function raised for one sample, told apart from what it may return."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What a function returned for one sample, to be awaited."""

    result: Awaitable[Any]


def accepted(
    function: RewardFunction,
    given: Mapping[str, Any],
    named_only: Mapping[str, Any] | None = None,
    *,
    skip: int = 0,
) -> dict[str, Any]:
    """Those of the values that the signature takes by keyword: all if it has `**kwargs`.

    What is `named_only` goes only to a parameter of its own name. The first `skip` parameters are
    given by place.
    """
    parameters = list(inspect.signature(function).parameters.values())
    names = {
        p.name for p in parameters[skip:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    every = any(p.kind is p.VAR_KEYWORD for p in parameters)
    placed = {p.name for p in parameters[:skip]}
    taken = {
        key: value
        for key, value in given.items()
        if key in names or (every and key.isidentifier() and key not in placed)
    }
    return taken | {k: v for k, v in (named_only or {}).items() if k in names}


def reason_of(error: BaseException) -> str:
    """The exception and the deepest line of it outside the code that imports and calls."""
    inner = (__file__, str(Path(__file__).with_name("loader.py")), "<frozen")
    raised = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in raised if not frame.filename.startswith(inner)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {_text(error)[:500]}{place}"


# -- what comes back -----------------------------------------------------------------------------


def _listed(result: Any, wanted: int) -> dict[str, Any]:
    sized = hasattr(result, "__len__") and hasattr(result, "__iter__")
    if not sized or isinstance(result, str | bytes | Mapping):
        return _bad(f"returned {type(result).__name__} instead of a list")
    if (count := len(result)) == wanted:
        values = list(islice(result, wanted + 1))
        count = len(values)  # not always what it says
    if count != wanted:
        return _bad(f"returned {count} values for {wanted} completions")
    return {"outcomes": [_plain(value) for value in values]}


def _outcome(result: Any) -> Outcome:
    """A result of verl's: a number, or a dict with a score, of which the rest is kept as text."""
    if isinstance(result, _Raised):
        return {"cause": "raised", "reason": result.reason}
    try:
        if not isinstance(result, Mapping):
            return _plain(result)
        items = dict(result)
        raw = _raw(items)
        if "score" not in items:
            return _bad("returned a dict without score") | {"raw": raw}
        return _plain(items["score"]) | {"raw": raw}
    except BaseException as error:  # boundary
        return _bad(f"returned {type(result).__name__} that cannot be read ({_text(error)})")


def _plain(value: Any) -> Outcome:
    if value is None:
        return {"value": None}
    why = ""
    try:
        if not isinstance(value, str | bytes) and hasattr(type(value), "__float__"):
            return {"value": float(value)}
    except OverflowError:
        return {"value": float("inf")}
    except BaseException as error:  # boundary
        why = f" ({_text(error)})"
    return _bad(f"{_text(value, repr):.80} is not a number{why}")


def _bad(reason: str) -> Outcome:
    return {"cause": "bad_result", "reason": reason}


def _raw(items: Mapping[Any, Any]) -> str:
    """As JSON, with the text of what JSON does not have."""
    pairs = (f"{_json(_text(key))}: {_json(value)}" for key, value in items.items())
    return f"{{{', '.join(pairs)}}}"[:RAW_KEPT]


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=_text)
    except BaseException:  # boundary
        text = json.dumps(_text(value), ensure_ascii=False)
    return _text(text)


def _text(value: Any, words: Callable[[Any], str] = str) -> str:
    """The text of whatever it is, such as every file takes: no half of a character."""
    try:
        return words(value).encode("utf-8", "replace").decode("utf-8")
    except BaseException:  # boundary
        return f"<{type(value).__name__}>"


def _is_awaitable(result: Any) -> bool:
    try:
        return inspect.isawaitable(result)
    except BaseException:  # boundary
        return False


async def _gathered(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*(_awaited(one) for one in awaitables))


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except BaseException as error:  # boundary
        return _Raised(reason_of(error))


def _unlogged(*_: Any, **__: Any) -> None:
    """TRL's log_extra and log_metric: there is no table of completions to log to."""


# -- what can be called --------------------------------------------------------------------------


def _is_async(function: RewardFunction) -> bool:
    called = type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _parameters(function: Any, who: str, setting: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise UserError(f"{setting}: {who} has no readable signature") from error


def _check_two_lists(parameters: Sequence[inspect.Parameter], who: str, setting: str) -> None:
    positional = [p for p in parameters[:2] if p.kind in _POSITIONAL]
    several = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    if len(positional) < 2 and not several:
        raise UserError(
            f"{setting}: {who} must take (prompts, completions, **columns); it cannot be called "
            "with two lists"
        )


def _check_by_name(
    parameters: Sequence[inspect.Parameter], needed: str, style: Style, who: str, setting: str
) -> None:
    """`needed` must be taken by name, and nothing may be required that nobody can give."""
    every = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not every and needed not in {p.name for p in named}:
        raise UserError(
            f'{setting}: {who} does not take {needed} by name, as style = "{style}" gives it; it '
            f"takes {', '.join(p.name for p in parameters) or 'nothing'}"
        )
    for parameter in named:
        why = _NOT_HERE.get(parameter.name) if style == "trl" else None
        if why is not None and parameter.default is parameter.empty:
            raise UserError(f"{setting}: {who} requires {parameter.name}, and {why}")


def _check_arguments(
    caller: Caller,
    parameters: Sequence[inspect.Parameter],
    ours: Sequence[str],
    who: str,
    section: str,
) -> None:
    if not caller.arguments:
        return
    by_place = 2 if caller.style == "offbeat" else 0
    placed = [p.name for p in parameters[:by_place] if p.kind in _POSITIONAL] + list(ours)
    takes = [
        p.name
        for p in parameters[by_place:]
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in placed
    ]
    every = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    for name in caller.arguments:
        if name in placed:
            raise UserError(
                f"{section}.arguments.{name} is what {who} is called with for every sample; take "
                "it out"
            )
        if name not in takes and not every:
            raise UserError(
                f"{section}.arguments.{name} is no parameter of {who}, which takes "
                f"{', '.join(takes) or 'none'}"
            )
