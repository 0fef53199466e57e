"""Finds a user's reward function. Standard library only: worker processes start fast.

`file.py:name` is a file beside the configuration, `package.module:name` an importable module (the
configuration's folder is importable too). How it is called says `function_style.py`; by default it
takes `(prompts, completions, **columns)` and returns one number or None for each completion.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from offbeat.errors import UserError
from offbeat.reward.function_style import Caller, RewardFunction, Style, reason_of

__all__ = ["RewardFunction", "load_caller", "load_function"]


def load_function(
    spec: str, setting: str = "reward.<name>.function", base: Path | None = None
) -> RewardFunction:
    """Imports a function of Offbeat's own style; raises `UserError` that names the setting, the
    file and the mend.

    `base` is the folder that relative files and packages are looked up in, default the current one.
    """
    return load_caller(spec, setting, base).function


def load_caller(
    spec: str,
    setting: str = "reward.<name>.function",
    base: Path | None = None,
    style: Style = "offbeat",
    arguments: Mapping[str, Any] | None = None,
) -> Caller:
    """Imports a function to be called in a style, with further keyword arguments; raises
    `UserError` also where it cannot be called so."""
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
    function = _member(module, name, setting)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else "; define it or mend the name"
        raise UserError(f"{setting}: {where} has no function {name}{hint}")
    if not callable(function):
        raise UserError(f"{setting}: {name} in {where} is not a function")
    caller = Caller(function, style, arguments or {})
    caller.check(f"{name} in {where}", setting)
    return caller


def _member(module: ModuleType, name: str, setting: str) -> Any:
    """What a module calls so, also if it makes it when it is asked for; None if nothing."""
    try:
        return getattr(module, name, None)
    except ImportError as error:  # made when asked for, from a library that is not there
        raise UserError(f"{setting}: {error}") from error


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
        raise UserError(
            f"{setting}: importing {path} raised {reason_of(error)}; mend it"
        ) from error
    return module


def _from_package(place: str, base: Path, setting: str) -> ModuleType:
    _importable(base.resolve())
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{setting}: importing {place} raised {reason_of(error)}; "
            "install or mend the module, or write file.py:name"
        ) from error


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
