"""Finds and calls a user's reward function. Standard library only: worker processes start fast.

`file.py:name` is a file beside the configuration, `package.module:name` an importable module (the
configuration's folder is importable too). The function takes `(prompts, completions, **columns)`
and returns one number or None for each completion; it may be async.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from offbeat.errors import UserError

RewardFunction = Callable[..., Any]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def load_function(
    spec: str, setting: str = "reward.<name>.function", base: Path | None = None
) -> RewardFunction:
    """Imports the function; raises `UserError` that names the setting, the file and the mend.

    `base` is the folder that relative files and packages are looked up in, default the current one.
    """
    base = base or Path.cwd()
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise UserError(
            f"{setting} = {spec!r} is not a function's address; "
            "write file.py:name or package.module:name"
        )
    module = _from_file(place, base, setting) if place.endswith(".py") else None
    if module is None:
        module = _from_package(place, base, setting)
    where = module.__file__ or place
    function = vars(module).get(name)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else "; define it or mend the name"
        raise UserError(f"{setting}: {where} has no function {name}{hint}")
    _check_signature(function, name, where, setting)
    return function  # type: ignore[no-any-return]


def accepted(function: RewardFunction, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the columns that the function's signature takes: all if it has `**kwargs`."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return {key: value for key, value in columns.items() if key.isidentifier()}
    names = {p.name for p in parameters[2:] if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
    return {key: value for key, value in columns.items() if key in names}


def call_function(
    function: RewardFunction,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    run: Callable[[Awaitable[Any]], Any],
) -> dict[str, Any]:
    """Calls it and sorts out what happened, as plain values.

    `{"values": [number | None | text of what else it was]}`, or `{"cause", "reason"}` for an
    exception ("raised") or a result of another length or type ("bad_result"). `run` runs an
    awaitable to its end.
    """
    try:
        result = function(list(prompts), list(completions), **accepted(function, columns))
        if inspect.isawaitable(result):
            result = run(result)
    except (Exception, SystemExit) as error:
        return {"cause": "raised", "reason": _reason(error)}
    sized = hasattr(result, "__len__") and hasattr(result, "__iter__")
    if not sized or isinstance(result, str | bytes | Mapping):
        reason = f"returned {type(result).__name__} instead of a list"
        return {"cause": "bad_result", "reason": reason}
    if len(result) != len(completions):
        reason = f"returned {len(result)} values for {len(completions)} completions"
        return {"cause": "bad_result", "reason": reason}
    return {"values": [_plain(value) for value in result]}


def _plain(value: Any) -> float | str | None:
    if value is None:
        return None
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        return f"{value!r:.80} is not a number"
    try:
        return float(value)
    except OverflowError:
        return float("inf")
    except (TypeError, ValueError) as error:
        return f"{value!r:.80} is not a number ({error})"


def _reason(error: BaseException) -> str:
    """The exception and the deepest line of it outside this file."""
    inner = (__file__, "<frozen")
    raised = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in raised if not frame.filename.startswith(inner)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:500]}{place}"


def _from_file(place: str, base: Path, setting: str) -> ModuleType:
    path = (base / place).resolve()
    if not path.is_file():
        raise UserError(f"{setting}: there is no file {path}; create it or mend the path")
    mark = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"offbeat_user_{path.stem}_{mark}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{setting}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    _importable(path.parent)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"{setting}: importing {path} raised {_reason(error)}; mend it") from error
    return module


def _from_package(place: str, base: Path, setting: str) -> ModuleType:
    _importable(base.resolve())
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{setting}: importing {place} raised {_reason(error)}; "
            "install or mend the module, or write file.py:name"
        ) from error


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _check_signature(function: Any, name: str, where: str, setting: str) -> None:
    if not callable(function):
        raise UserError(f"{setting}: {name} in {where} is not a function")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise UserError(f"{setting}: {name} in {where} has no readable signature") from error
    positional = [p for p in parameters[:2] if p.kind in _POSITIONAL]
    several = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    if len(positional) < 2 and not several:
        raise UserError(
            f"{setting}: {name} in {where} must take (prompts, completions, **columns); "
            "it cannot be called with two lists"
        )
