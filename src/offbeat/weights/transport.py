"""Published weights: one safetensors file a version in a folder that engines map into memory.

The invariant: a manifest's file is complete before the manifest exists (atomic rename), and a
tensor whose bytes differ from the manifest's checksum is never handed out.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offbeat.config import Config
from offbeat.errors import OffbeatError, UserError
from offbeat.records import Manifest, PolicyVersion, TensorEntry

KEEP_VERSIONS = 3
MEMORY_FOLDER = Path("/dev/shm")
ROOM_FACTOR = KEEP_VERSIONS + 1
_PREFIX = "offbeat-"
_OWNER = "owner.json"
_SLACK_BYTES = 1 << 20
_UNOWNED_SECONDS = 600.0

_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class FolderTransport:
    """Publishes versions into a folder of its own under `folder`; sweeps those of dead runs."""

    def __init__(self, folder: Path, run_id: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sweep(folder)
            self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{run_id}-", dir=folder))
        except OSError as error:
            raise UserError(
                f"weights.folder: {folder} cannot be written to ({error.strerror}); set it to a "
                f"folder with room for {ROOM_FACTOR} versions"
            ) from None
        self.folder.chmod(0o755)
        (self.folder / _OWNER).write_text(json.dumps(_identity(os.getpid())))
        self._published: list[Path] = []

    def publish(
        self, tensors: Mapping[str, Tensor], tied: Mapping[str, str], version: PolicyVersion
    ) -> Manifest:
        """Writes a version and returns its manifest; keeps the newest 3.

        `tensors` are on any device; tied ones are stored once and named by `tied`.
        """
        path = self.folder / f"{version}.safetensors"
        self._check_room(sum(_bytes(tensor) for tensor in tensors.values()))
        partial = path.with_suffix(".partial")
        try:
            entries = _write(partial, tensors)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OffbeatError(
                f"cannot publish version {version} to weights.folder {self.folder}: {error}"
            ) from error
        partial.replace(path)
        self._published = [old for old in self._published if old != path] + [path]
        while len(self._published) > KEEP_VERSIONS:
            self._published.pop(0).unlink(missing_ok=True)
        return Manifest(version, "full", str(path), entries, tied=dict(tied))

    def close(self) -> None:
        """Removes the folder; files that engines still map live on until they let go."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < needed + _SLACK_BYTES:
            raise UserError(
                f"publishing a version needs {needed:,} bytes and {self.folder} has {free:,} free: "
                f"set weights.folder to a folder with room for {ROOM_FACTOR} versions"
            )


def load_manifest(manifest: Manifest, verify: bool = True) -> dict[str, Tensor]:
    """Name -> CPU tensor mapped from the file, tied names included (same tensor).

    Raises `OffbeatError` if the file is gone, or a tensor is missing, of another shape or type,
    or (with `verify`) its bytes do not give the manifest's checksum. Do not write to the tensors.
    """
    found: dict[str, Tensor] = {}
    try:
        with safe_open(manifest.path, framework="pt") as file:
            for name in manifest.tensors:
                found[name] = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise OffbeatError(f"version {manifest.version} cannot be read: {error}") from error
    for name, entry in manifest.tensors.items():
        tensor = found[name]
        if (dtype_name(tensor.dtype), tuple(tensor.shape)) != (entry.dtype, entry.shape):
            raise OffbeatError(
                f"tensor {name} of version {manifest.version} is {tensor.dtype} "
                f"{tuple(tensor.shape)}, its manifest says {entry.dtype} {entry.shape}"
            )
        if verify and zlib.crc32(_buffer(tensor)) != entry.checksum:
            raise OffbeatError(
                f"tensor {name} of version {manifest.version} in {manifest.path} is corrupt: "
                f"its checksum differs from the manifest's"
            )
    for name, stored in manifest.tied.items():
        found[name] = found[stored]
    return found


def choose_folder(config: Config, bytes_needed: int) -> Path:
    """Where versions go: `weights.folder`, else /dev/shm if it has 4 x room, else the run's own."""
    if config.weights.folder is not None:
        return config.weights.folder
    memory = MEMORY_FOLDER
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    if usable and shutil.disk_usage(memory).free >= ROOM_FACTOR * bytes_needed:
        return memory
    return config.run_dir / "weights"


def sweep(folder: Path) -> list[Path]:
    """Removes Offbeat's folders under `folder` whose owner on this host is dead; returns them."""
    swept = []
    for path in folder.glob(f"{_PREFIX}*"):
        if path.is_dir() and _is_dead(path):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _is_dead(path: Path) -> bool:
    try:
        owner = json.loads((path / _OWNER).read_text())
    except (OSError, ValueError):  # being made right now, or long left behind
        try:
            return time.time() - path.stat().st_mtime > _UNOWNED_SECONDS
        except OSError:
            return False
    if owner.get("host") != socket.gethostname():
        return False
    return bool(owner != _identity(int(owner["pid"])))


def _identity(pid: int) -> dict[str, Any]:
    """Who a process is: its id alone is given again after it ended, its start time is not."""
    return {"host": socket.gethostname(), "pid": pid, "started": _start_time(pid)}


def _start_time(pid: int) -> str | None:
    """Boot and clock ticks of a process's start; None if there is no such process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else f"{boot}/{fields[19]}"
    except FileNotFoundError:
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:  # no /proc: only whether it lives
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "alive"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _buffer(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(cast(Any, flat.view(torch.uint8).numpy()))


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Writes the safetensors format straight from the tensors' memory, summing on the way."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + _bytes(tensor)
        kind = _NAMES.get(tensor.dtype)
        if kind is None:
            raise OffbeatError(f"tensor {name} has type {tensor.dtype}, which is not published")
        header[name] = {
            "dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, end]
        }  # fmt: skip
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    entries: dict[str, TensorEntry] = {}
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for name, tensor in tensors.items():
            data = _buffer(tensor)
            _write_all(file.fileno(), data)
            entries[name] = TensorEntry(
                dtype_name(tensor.dtype), tuple(tensor.shape), zlib.crc32(data)
            )
    return entries


def _write_all(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]
