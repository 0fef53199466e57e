"""Checkpoints: a Hugging Face model directory with the trainer's state beside it.

The invariant: a checkpoint's name exists only when all its bytes are on disk (write beside it,
fsync, rename), so the previous one survives any crash, and the rename is the commit point.

    step-000050/               loads with AutoModelForCausalLM.from_pretrained as it is
      config.json, model.safetensors, tokenizer.json, ...
      trainer/state.json       version, schedule position, `extra`, size of every file
      trainer/optimizer.pt     the optimizer's and the random generators' state
      trainer/ledger.sqlite    a copy of the ledger, with the payload of unfinished groups
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError

STATE = "trainer/state.json"
OPTIMIZER = "trainer/optimizer.pt"
LEDGER_COPY = "trainer/ledger.sqlite"
FORMAT = 1
_PARTIAL = "-partial-"
_NAME = re.compile(r"step-(\d+)")
_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a trainer needs beside weights and optimizer. `updates`: applied steps so far (the
    schedule's position); `bad_steps`, `no_signal_steps`: on end so far; `extra` is the caller's."""

    lineage: int
    step: int
    updates: int
    bad_steps: int
    no_signal_steps: int
    extra: dict[str, Any]


def checkpoint_name(step: int) -> str:
    """`step-000050`: the folder's name after 50 steps."""
    return f"step-{step:06d}"


def write(path: Path, state: TrainerState, fill: Callable[[Path], None]) -> None:
    """Makes `path` appear at once with what `fill(folder)` writes and the state.

    An older checkpoint of this name is replaced, and is back if this one fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".*{_PARTIAL}*"):  # of a killed process
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}{_PARTIAL}", dir=path.parent))
    folder.chmod(0o755)
    try:
        (folder / STATE).parent.mkdir()
        fill(folder)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        sizes = {str(p.relative_to(folder)): p.stat().st_size for p in files}
        record = {
            "format": FORMAT,
            "lineage": state.lineage,
            "step": state.step,
            "updates": state.updates,
            "bad_steps": state.bad_steps,
            "no_signal_steps": state.no_signal_steps,
            "extra": state.extra,
            "files": sizes,
        }
        (folder / STATE).write_text(json.dumps(record, indent=1))
        for p in [*folder.rglob("*"), folder]:
            _sync(p)
        _put_in_place(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _sync(path.parent)


def read(path: Path) -> TrainerState:
    """The state of a checkpoint; raises `OffbeatError` if it is not whole."""
    try:
        record = json.loads((path / STATE).read_text())
        if record["format"] != FORMAT:
            raise OffbeatError(f"checkpoint {path} has format {record['format']}, not {FORMAT}")
        for name, size in record["files"].items():
            if (path / name).stat().st_size != size:
                raise OffbeatError(f"checkpoint {path} is damaged: {name} is not {size:,} bytes")
        return TrainerState(
            record["lineage"],
            record["step"],
            record["updates"],
            record["bad_steps"],
            record["no_signal_steps"],
            record["extra"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OffbeatError(f"checkpoint {path} is damaged: {error!r}") from error


def all_checkpoints(folder: Path) -> list[Path]:
    """Folders named like checkpoints, oldest step first; whole or not."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if p.is_dir() and _NAME.fullmatch(p.name)]
    return sorted(found, key=_step)


def newest_valid(folder: Path) -> Path | None:
    """The whole checkpoint of the highest step."""
    for path in reversed(all_checkpoints(folder)):
        try:
            read(path)
        except OffbeatError:
            continue
        return path
    return None


def version_of(path: Path) -> int:
    """The step of a checkpoint's weights, from its name."""
    return _step(path)


def prune(folder: Path, keep: int) -> list[Path]:
    """Removes all but the newest `keep` and the first; returns what it removed."""
    paths = all_checkpoints(folder)
    doomed = paths[1:-keep] if keep < len(paths) else []
    for path in doomed:
        gone = path.with_name(f".{path.name}{_PARTIAL}gone")
        path.rename(gone)  # at once: half a checkpoint never bears the name of one
        shutil.rmtree(gone)
    return doomed


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies a tokenizer's files byte for byte (writing it anew could change it)."""
    for pattern in _TOKENIZER_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)


def copy_files(files: Mapping[str, Path], target: Path) -> None:
    """Copies files under the given relative names, e.g. the ledger."""
    for name, path in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _put_in_place(folder: Path, path: Path) -> None:
    if not path.exists():
        folder.rename(path)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-old-", dir=path.parent))
    path.rename(aside / path.name)
    try:
        folder.rename(path)
    except OSError:
        (aside / path.name).rename(path)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
