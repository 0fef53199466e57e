"""Published weights: how versions travel from the trainer to the engines.

The trainer holds a `Transport` of the kind that `weights.transport` names; whoever holds an
engine's weights calls `load_manifest`, which knows by the manifest how to get them. The folder
transport is here: one safetensors file a version in a folder that engines map into memory; the
others are in `broadcast.py` and `ipc.py`.

The invariant: a manifest exists only when its version can be loaded whole (a file is renamed into
place, a snapshot is complete), and a tensor whose bytes differ from the manifest's checksum is
never handed out.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offbeat.config import Config
from offbeat.errors import OffbeatError, UserError
from offbeat.records import Manifest, PolicyVersion, TensorEntry
from offbeat.weights.packed import dtype_name

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


class Transport(Protocol):
    """The trainer's side of weight sync. Versions are kept for engines that are late, and to be
    read again (`recall`) by the trainer itself."""

    def publish(
        self, tensors: Mapping[str, Tensor], tied: Mapping[str, str], version: PolicyVersion
    ) -> Manifest:
        """Makes a version loadable; it stays so when the tensors change afterwards.

        `tensors` are on the trainer's device; tied ones are stored once and named by `tied`.
        """
        ...

    def kept(self) -> list[PolicyVersion]:
        """Versions that can be recalled, oldest publication first."""
        ...

    def recall(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """A kept version's tensors, tied names not needed; do not write to them."""
        ...

    def close(self) -> None:
        """Removes the published versions."""
        ...


def make_transport(config: Config, device: torch.device, folder: Path, run_id: str) -> Transport:
    """The transport that `weights.transport` names, for a trainer on `device`."""
    if config.weights.transport == "broadcast":
        from offbeat.weights.broadcast import BroadcastTransport

        return BroadcastTransport(device, deadline_seconds=config.weights.deadline_seconds)
    if config.weights.transport == "ipc":
        from offbeat.weights.ipc import IpcTransport

        return IpcTransport(device)
    return FolderTransport(folder, run_id)


class FolderTransport:
    """Publishes versions into a folder of its own under `folder`; sweeps those of dead runs.

    Where a trainer of this very run has died, its newest version stays until all engines have one
    of this transport: an engine that is replaced meanwhile has something to join with.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._before = _keep_newest(folder, run_id)
            sweep(folder, keep=self._before)
            self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{run_id}-", dir=folder))
        except OSError as error:
            raise UserError(
                f"weights.folder: {folder} cannot be written to ({error.strerror}); set it to a "
                f"folder with room for {ROOM_FACTOR} versions"
            ) from None
        self.folder.chmod(0o755)
        (self.folder / _OWNER).write_text(json.dumps(_identity(os.getpid())))
        self._published: list[Manifest] = []

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
        manifest = Manifest(version, "full", str(path), entries, tied=dict(tied))
        self._published = [old for old in self._published if old.version != version] + [manifest]
        if len(self._published) == KEEP_VERSIONS:  # engines have all but the newest
            self._forget_before()
        while len(self._published) > KEEP_VERSIONS:
            Path(self._published.pop(0).path).unlink(missing_ok=True)
        return manifest

    def kept(self) -> list[PolicyVersion]:
        """Versions whose files are there, oldest publication first."""
        return [manifest.version for manifest in self._published]

    def recall(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """A kept version's tensors, mapped from its file."""
        (manifest,) = (found for found in self._published if found.version == version)
        return load_manifest(manifest, verify=False)

    def close(self) -> None:
        """Removes the folder; files that engines still map live on until they let go."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._forget_before()

    def _forget_before(self) -> None:
        while self._before:
            shutil.rmtree(self._before.pop(), ignore_errors=True)

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < needed + _SLACK_BYTES:
            raise UserError(
                f"publishing a version needs {needed:,} bytes and {self.folder} has {free:,} free: "
                f"set weights.folder to a folder with room for {ROOM_FACTOR} versions"
            )


def load_manifest(
    manifest: Manifest, verify: bool = True, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Name -> tensor on `device`, tied names included (same tensor). The one entry for engines,
    called in whatever process holds the engine's weights.

    By default the tensors are on the CPU: mapped from the file (kind "full") or received
    ("broadcast"); those of kind "ipc" are the trainer's own copy on the GPU. Raises `OffbeatError`
    if the version is gone or does not come by the deadline, or a tensor is missing, of another
    shape or type, or (with `verify`) its bytes do not give the manifest's checksum. Do not write
    to the tensors.
    """
    if manifest.kind == "broadcast":
        from offbeat.weights.broadcast import load_broadcast

        return load_broadcast(manifest, verify, device)
    if manifest.kind == "ipc":
        from offbeat.weights.ipc import load_ipc

        return load_ipc(manifest, verify)
    found = _load_file(manifest, verify)
    if device is not None:
        found = {name: tensor.to(device) for name, tensor in found.items()}
    return found | {name: found[stored] for name, stored in manifest.tied.items()}


def _load_file(manifest: Manifest, verify: bool) -> dict[str, Tensor]:
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


def _keep_newest(folder: Path, run_id: str) -> list[Path]:
    """The folders of dead trainers of a run, with their newest version alone."""
    dead = [
        path for path in folder.glob(f"{_PREFIX}{run_id}-*") if path.is_dir() and _is_dead(path)
    ]
    for path in dead:
        versions = sorted(path.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
        for old in [*versions[:-1], *path.glob("*.partial")]:
            old.unlink(missing_ok=True)
    return dead


def sweep(folder: Path, keep: Sequence[Path] = ()) -> list[Path]:
    """Removes Offbeat's folders under `folder` whose owner on this host is dead, but those to
    `keep`; returns them."""
    swept = []
    for path in folder.glob(f"{_PREFIX}*"):
        if path.is_dir() and path not in keep and _is_dead(path):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


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
