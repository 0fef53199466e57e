"""Checkpoints: a Hugging Face model directory with the trainer's state beside it.

The invariant: a checkpoint's name exists only when all its bytes are on disk (write beside it,
fsync, rename), so the previous one survives any crash, and the rename is the commit point. Every
file's size and checksum stand in the state, and the state's own with it: `read` finds what a disk
lost or turned round later.

    step-000050/               loads with AutoModelForCausalLM.from_pretrained as it is
      config.json, model.safetensors, tokenizer.json, ...
      trainer/state.json       version, schedule position, `extra`, size and CRC-32 of every file
      trainer/optimizer.pt     the optimizer's and the random generators' state
      trainer/ledger.sqlite    a copy of the ledger, with the payload of unfinished groups
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.faults import point

log = logging.getLogger(__name__)

STATE = "trainer/state.json"
OPTIMIZER = "trainer/optimizer.pt"
LEDGER_COPY = "trainer/ledger.sqlite"
FORMAT = 2
CHUNK_BYTES = 1 << 20
_PARTIAL = "-partial-"
_OLD = "-old-"
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


def named_otherwise(path: Path, step: int) -> bool:
    """Whether a folder bears the name of another step's checkpoint."""
    return _NAME.fullmatch(path.name) is not None and _step(path) != step


def write(path: Path, state: TrainerState, fill: Callable[[Path], None]) -> None:
    """Makes `path` appear at once with what `fill(folder)` writes and the state.

    An older checkpoint of this name is replaced, and is back if this one fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mend(path.parent)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}{_PARTIAL}", dir=path.parent))
    folder.chmod(0o755)
    try:
        (folder / STATE).parent.mkdir()
        point("checkpoint.begin")
        fill(folder)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        record: dict[str, Any] = {
            "format": FORMAT,
            "lineage": state.lineage,
            "step": state.step,
            "updates": state.updates,
            "bad_steps": state.bad_steps,
            "no_signal_steps": state.no_signal_steps,
            "extra": state.extra,
            "files": {str(p.relative_to(folder)): [p.stat().st_size, _checksum(p)] for p in files},
        }
        (folder / STATE).write_text(_sealed(record), encoding="ascii")
        for p in [*folder.rglob("*"), folder]:
            _sync(p)
        point("checkpoint.before_rename", folder)
        _put_in_place(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _sync(path.parent)
    point("checkpoint.renamed", path)


def mend(folder: Path) -> None:
    """Ends what a killed writer left half done: what it was writing goes, what it was replacing
    comes back. For the one process that writes here."""
    _bring_back(folder)
    for pattern in (_PARTIAL, _OLD):
        for left in folder.glob(f".*{pattern}*"):
            shutil.rmtree(left, ignore_errors=True)


def _bring_back(folder: Path) -> None:
    for left in folder.glob(f".*{_OLD}*/step-*"):
        if not (folder / left.name).exists():
            left.rename(folder / left.name)


def read(path: Path) -> TrainerState:
    """The state of a checkpoint, all of whose bytes are read and found as they were written.

    Raises `OffbeatError` if it is not whole.
    """
    try:
        text = (path / STATE).read_text(encoding="ascii")
        record = json.loads(text)
        if record["format"] != FORMAT:
            raise OffbeatError(f"checkpoint {path} has format {record['format']}, not {FORMAT}")
        del record["crc32"]
        if _sealed(record) != text:
            raise OffbeatError(f"checkpoint {path} is damaged: {STATE} is not what was written")
        for name, (size, crc) in record["files"].items():
            if (path / name).stat().st_size != size:
                raise OffbeatError(f"checkpoint {path} is damaged: {name} is not {size:,} bytes")
            if _checksum(path / name) != crc:
                raise OffbeatError(f"checkpoint {path} is damaged: {name} is not what was written")
        if named_otherwise(path, record["step"]):
            raise OffbeatError(f"checkpoint {path} holds step {record['step']}, not what it says")
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
    """The whole checkpoint of the highest step; damaged ones that are passed over are logged.

    For the process that writes here, or where none does.
    """
    _bring_back(folder)
    for path in reversed(all_checkpoints(folder)):
        try:
            read(path)
        except OffbeatError as damaged:
            log.warning("%s; the one before it is looked at", damaged)
            continue
        return path
    return None


def version_of(path: Path) -> int:
    """The step of a checkpoint's weights, from its name."""
    return _step(path)


def prune(folder: Path, newest: int, keep: int, every: int = 0) -> list[Path]:
    """Removes all but the newest `keep` up to step `newest`, the first, and those whose step
    `every` divides (0: none); returns what it removed.

    One of a later step is damaged: whoever goes on from a checkpoint takes the newest that is not.
    It is left alone, and counts for nothing.
    """
    paths = [path for path in all_checkpoints(folder) if _step(path) <= newest]
    doomed = paths[1:-keep] if keep < len(paths) else []
    doomed = [path for path in doomed if every == 0 or _step(path) % every]
    for path in doomed:
        gone = path.with_name(f".{path.name}{_PARTIAL}gone")
        path.rename(gone)  # at once: half a checkpoint never bears the name of one
        point("checkpoint.pruned")
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
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}{_OLD}", dir=path.parent))
    path.rename(aside / path.name)
    try:
        folder.rename(path)
    except OSError:
        (aside / path.name).rename(path)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sealed(record: Mapping[str, Any]) -> str:
    """The state's text, with its own checksum as the last key."""
    crc = zlib.crc32(json.dumps(record, indent=1).encode("ascii"))
    return json.dumps({**record, "crc32": crc}, indent=1)


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
