"""A version in memory: all tensors packed into a few flat buckets on the trainer's device.

The invariant: both sides derive the same layout from a manifest's tensors alone (their order, types
and shapes), so that buckets travel as they are. Every tensor begins at a multiple of 16 bytes, and
the bytes between tensors are 0, so that its checksum is of whole 8-byte words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.records import Manifest, ManifestKind, PolicyVersion, TensorEntry

BUCKET_BYTES = 64 << 20
ALIGNMENT = 16
_COLUMNS = 1024
_ROW_FACTOR = 0x1F123BB5  # odd; twice of it below, so that row and column weights add up odd


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor's place in its bucket: `begin` to `end` in bytes, the latter with padding."""

    name: str
    entry: TensorEntry
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A version's buckets (flat uint8 tensors), and what a manifest says of them."""

    version: PolicyVersion
    buckets: tuple[Tensor, ...]
    entries: Mapping[str, TensorEntry]
    tied: Mapping[str, str]

    def manifest(self, kind: ManifestKind, path: str) -> Manifest:
        """The manifest that leads an engine to this snapshot."""
        return Manifest(self.version, kind, path, self.entries, tied=dict(self.tied))

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, in the buckets' memory; without tied names."""
        return unpack(self.buckets, layout(self.entries))


def layout(entries: Mapping[str, TensorEntry]) -> list[list[Slot]]:
    """Where each tensor lies, bucket by bucket: whole tensors, up to 64 MB or one tensor each."""
    buckets: list[list[Slot]] = []
    for name, entry in entries.items():
        size = math.prod(entry.shape) * _dtype(entry.dtype).itemsize
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        begin = buckets[-1][-1].end if buckets else 0
        if not buckets or begin + padded > BUCKET_BYTES:
            buckets.append([])
            begin = 0
        buckets[-1].append(Slot(name, entry, begin, begin + padded))
    return buckets


def empty_buckets(places: Sequence[Sequence[Slot]], device: torch.device) -> tuple[Tensor, ...]:
    """Buckets of zeros for a layout."""
    return tuple(torch.zeros(b[-1].end, dtype=torch.uint8, device=device) for b in places)


@torch.no_grad()
def take_snapshot(
    tensors: Mapping[str, Tensor],
    tied: Mapping[str, str],
    version: PolicyVersion,
    *,
    device: torch.device,
    into: tuple[Tensor, ...] | None = None,
) -> Snapshot:
    """Copies tensors into buckets (`into`, if of the same layout, else new ones) and sums them.

    On return the copy is complete, also on a GPU: what trains on may change the tensors.
    """
    blank = {n: TensorEntry(dtype_name(t.dtype), tuple(t.shape), 0) for n, t in tensors.items()}
    places = layout(blank)
    buckets = into or empty_buckets(places, device)
    for name, target in unpack(buckets, places).items():
        target.copy_(tensors[name])
    sums = iter(checksums(buckets, places))
    entries = {n: TensorEntry(e.dtype, e.shape, next(sums)) for n, e in blank.items()}
    return Snapshot(version, buckets, entries, dict(tied))


def unpack(buckets: Iterable[Tensor], places: Sequence[Sequence[Slot]]) -> dict[str, Tensor]:
    """Name -> view of the bucket that holds it."""
    found: dict[str, Tensor] = {}
    for bucket, slots in zip(buckets, places, strict=True):
        for slot in slots:
            dtype, shape = _dtype(slot.entry.dtype), slot.entry.shape
            size = math.prod(shape) * dtype.itemsize
            data = bucket[slot.begin : slot.begin + size]
            found[slot.name] = data.view(dtype).view(shape)
    return found


def checksums(buckets: Iterable[Tensor], places: Sequence[Sequence[Slot]]) -> list[int]:
    """Each tensor's sum, in order; one wait for the device a bucket."""
    found: list[int] = []
    for bucket, slots in zip(buckets, places, strict=True):
        sums = [fingerprint(bucket[slot.begin : slot.end]) for slot in slots]
        found += torch.stack(sums).tolist()
    return found


def check_bucket(bucket: Tensor, slots: Sequence[Slot], version: PolicyVersion, path: str) -> None:
    """Raises `OffbeatError` naming the first tensor whose bytes are not the manifest's."""
    for slot, value in zip(slots, checksums([bucket], [slots]), strict=True):
        if value != slot.entry.checksum:
            raise OffbeatError(
                f"tensor {slot.name} of version {version} from {path} is corrupt: its checksum "
                f"differs from the manifest's"
            )


def fingerprint(data: Tensor) -> Tensor:
    """() int64: a sum of the 8-byte words of flat uint8 `data`, weighted by place, modulo 2^64.

    Computed where the data lies, by two plain sums (rows and columns of 1,024 words), so it costs
    a pass over memory on a GPU and on a CPU and is the same on both: integers in any order add up
    to the same. A word's weight is odd, so that any change of one word changes the sum.
    """
    words = data.view(torch.int64)
    rows = len(words) // _COLUMNS
    grid, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    odd = 2 * torch.arange(max(rows + 1, _COLUMNS), device=data.device) + 1
    by_row = (grid.sum(1) * odd[:rows]).sum() + rest.sum() * odd[rows]
    by_column = (grid.sum(0) * odd[:_COLUMNS]).sum() + (rest * odd[: len(rest)]).sum()
    return by_row * (2 * _ROW_FACTOR) + by_column


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise OffbeatError(f"a manifest names the type {name}, which torch does not know")
    return found
