"""Versions handed over in the memory of a GPU that trainer and engines share: nothing is copied.

For `cluster.single_device` only, where all roles alternate on one GPU. The trainer copies a version
into one of two snapshots on the device, whose memory handles (CUDA IPC) travel in the manifest; an
engine maps that memory. The snapshots are made once and written in turns, so a mapping is good
until the publication after the next one, and their handles never change.

This transport was not run on a GPU: its tests cover the refusal and the form of the manifest.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import OffbeatError, UserError
from offbeat.records import Manifest, PolicyVersion
from offbeat.weights.packed import check_bucket, layout, take_snapshot, unpack

SNAPSHOTS = 2
Handle = tuple[Any, ...]
"""What `UntypedStorage._share_cuda_` gives: integers, truth values and bytes."""

_mapped: dict[str, tuple[Tensor, ...]] = {}
"""Buckets by manifest path: this process's own, which it cannot open, and those that it opened once
(opening again would upset torch's count of who uses them)."""


class IpcTransport:
    """The trainer's side. Raises `UserError` on a CPU, which has no such memory."""

    def __init__(
        self, device: torch.device, share: Callable[[Tensor], Handle] | None = None
    ) -> None:
        if device.type != "cuda":
            raise UserError(
                'weights.transport = "ipc" hands weights over in the memory of a GPU, and the '
                f'trainer is on the {device.type}; set it to "folder"'
            )
        self._device = device
        self._share = share or _share
        self._pool: list[tuple[tuple[Tensor, ...], str]] = []

    def publish(
        self, tensors: Mapping[str, Tensor], tied: Mapping[str, str], version: PolicyVersion
    ) -> Manifest:
        """Copies a version into the older snapshot; that one's earlier manifest is void."""
        older = self._pool.pop(0) if len(self._pool) == SNAPSHOTS else None
        snapshot = take_snapshot(
            tensors, tied, version, device=self._device, into=older[0] if older else None
        )
        path = older[1] if older else self._address(snapshot.buckets)
        self._pool.append((snapshot.buckets, path))
        _mapped[path] = snapshot.buckets
        return snapshot.manifest("ipc", path)

    def kept(self) -> list[PolicyVersion]:
        """None: with one device every token is made by the current version."""
        return []

    def recall(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """Raises: none is kept."""
        raise OffbeatError(f"version {version} is not kept")

    def close(self) -> None:
        """Lets go of the snapshots; engines that still map them are broken off."""
        for _, path in self._pool:
            _mapped.pop(path, None)
        self._pool.clear()

    def _address(self, buckets: tuple[Tensor, ...]) -> str:
        handles = [[_plain(part) for part in self._share(bucket)] for bucket in buckets]
        return json.dumps({"pid": os.getpid(), "handles": handles}, separators=(",", ":"))


def load_ipc(manifest: Manifest, verify: bool = True) -> dict[str, Tensor]:
    """Name -> tensor in the trainer's snapshot; copy what is to outlive the next publication."""
    if manifest.path not in _mapped:
        handles = json.loads(manifest.path)["handles"]
        _mapped[manifest.path] = tuple(_open(tuple(map(_unplain, handle))) for handle in handles)
    buckets = _mapped[manifest.path]
    places = layout(manifest.tensors)
    if verify:
        for bucket, slots in zip(buckets, places, strict=True):
            check_bucket(bucket, slots, manifest.version, "the trainer's device memory")
    found = unpack(buckets, places)
    return found | {name: found[stored] for name, stored in manifest.tied.items()}


def _share(bucket: Tensor) -> Handle:
    storage: Any = bucket.untyped_storage()
    handle: Handle = storage._share_cuda_()
    return handle


def _open(handle: Handle) -> Tensor:
    found = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", handle[0]))
    untyped: Any = torch.UntypedStorage
    return found.set_(untyped._new_shared_cuda(*handle))


def _plain(part: Any) -> Any:
    return {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _unplain(part: Any) -> Any:
    return base64.b64decode(part["bytes"]) if isinstance(part, dict) else part
