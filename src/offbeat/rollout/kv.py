"""Keys and values of running samples: one seat a sample, and the attention that reads them.

A forward pass of the engine is *flat*: the new tokens of all samples lie behind one another in
one row of shape (1, N), so that no linear layer computes padding. `StepPlan` says for each token
its position, in which seats its keys and values are kept, and against which seat it attends.
Attention goes through transformers' attention interface: stock modules do the rest of the math.

Invariants: seats are compact (running samples hold seats 0..R-1), so that a decode step reads one
slice; a seat's columns are token positions; a column beyond a sample's length is never attended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from offbeat.errors import UserError

Tokens = NDArray[np.int64]

ATTENTION = "offbeat_seats"
"""Name under which the attention function is registered with transformers."""

# A shared prefix shorter than this costs more in bookkeeping than it saves in computing.
MIN_SHARED = 4
# Columns read are rounded up to this, so that CUDA kernels find aligned masks.
COLUMN_STEP = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive new tokens of one sequence, from column `start`.

    `seats` all receive the keys and values; the first is the one attended to. `item` is the index
    of the sequence whose next-token logits the last token gives, or -1.
    """

    tokens: Tokens
    start: int
    seats: tuple[int, ...]
    item: int = -1


def share_prefixes(items: Sequence[tuple[Tokens, tuple[int, ...]]]) -> list[Segment]:
    """Segments that compute every prefix that several sequences share exactly once.

    `items` are (tokens, seats). The last token of an item is always a segment's own last token,
    as its logits may be wanted. Parents come before children.
    """
    segments: list[Segment] = []
    work: list[tuple[list[int], int]] = [(list(range(len(items))), 0)]
    while work:
        group, depth = work.pop()
        by_head: dict[bytes, list[int]] = {}
        for i in group:
            by_head.setdefault(items[i][0][depth : depth + MIN_SHARED].tobytes(), []).append(i)
        for members in by_head.values():
            shared = _common(items, members, depth)
            if len(members) > 1 and shared - depth >= MIN_SHARED:
                seats = tuple(seat for i in members for seat in items[i][1])
                segments.append(Segment(items[members[0]][0][depth:shared], depth, seats))
                work.append((members, shared))
                continue
            for i in members:
                segments.append(Segment(items[i][0][depth:], depth, items[i][1], i))
    # Children follow parents: a child starts where its parent ends.
    return sorted(segments, key=lambda segment: segment.start)


def _common(items: Sequence[tuple[Tokens, tuple[int, ...]]], members: list[int], depth: int) -> int:
    """End of the prefix common to the members, leaving each at least its last token."""
    first = items[members[0]][0]
    end = min(len(items[i][0]) for i in members) - 1
    for i in members[1:]:
        if end <= depth:
            return depth
        differs = np.flatnonzero(first[depth:end] != items[i][0][depth:end])
        if len(differs):
            end = depth + int(differs[0])
    return max(end, depth)


def chunked(segments: Sequence[Segment], budget: int) -> Iterator[list[Segment]]:
    """Cuts segments into consecutive lists of at most `budget` tokens, long segments too."""
    chunk: list[Segment] = []
    left = budget
    for whole in segments:
        rest = whole
        while len(rest.tokens) > left:
            if left > 0:
                chunk.append(Segment(rest.tokens[:left], rest.start, rest.seats))
                rest = Segment(rest.tokens[left:], rest.start + left, rest.seats, rest.item)
            yield chunk
            chunk, left = [], budget
        chunk.append(rest)
        left -= len(rest.tokens)
    if chunk:
        yield chunk


@dataclass(frozen=True, slots=True)
class _Block:
    """Segments of similar size, attended to as one padded batch. `scatter` is None for a slice."""

    queries: torch.Tensor | slice
    seats: torch.Tensor | slice
    columns: int
    mask: torch.Tensor
    shape: tuple[int, int]
    scatter: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that one flat forward pass needs, on the device. Decode tokens come first."""

    inputs: torch.Tensor
    positions: torch.Tensor
    write_seats: torch.Tensor
    write_columns: torch.Tensor
    write_from: torch.Tensor | None
    decode: _Block | None
    blocks: tuple[_Block, ...]
    logits_at: torch.Tensor | None
    items: tuple[int, ...]
    tokens: int


class SeatCache:
    """Preallocated keys and values: (layers, 2, seats, kv heads, columns, head dim)."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        seats: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        columns = -(-columns // COLUMN_STEP) * COLUMN_STEP
        shape = (layers, 2, seats, kv_heads, columns, head_dim)
        self.kv = _zeros(shape, dtype, device)
        self.keys = [self.kv[layer, 0] for layer in range(layers)]
        self.values = [self.kv[layer, 1] for layer in range(layers)]
        self.columns = columns
        self.heads_kv = kv_heads
        self.device = device
        self.dtype = dtype
        self._manual = device.type == "cpu"
        self._column_ids = torch.arange(columns, device=device)

    def move(self, source: int, target: int, length: int) -> None:
        """Moves one sample to a freed seat."""
        self.kv[:, :, target, :, :length] = self.kv[:, :, source, :, :length]

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copies the first columns of a seat to others."""
        if length:
            seats = torch.tensor(targets, device=self.device)
            self.kv[:, :, seats, :, :length] = self.kv[:, :, source : source + 1, :, :length]

    def plan(
        self, pending: list[int], lengths: list[int], segments: Sequence[Segment], groups: int
    ) -> StepPlan:
        """Plans one pass: the pending token of seats 0..R-1, and the segments' tokens.

        `groups` is the number of query heads that share a key head.
        """
        running = len(pending)
        tokens = [np.array(pending, np.int64)]
        positions = [np.array(lengths, np.int64)]
        seats, sources = [np.arange(running)], [np.arange(running)]
        offsets: list[int] = []
        ends = running
        for segment in segments:
            size = len(segment.tokens)
            columns = np.arange(segment.start, segment.start + size)
            tokens.append(segment.tokens)
            positions.append(columns)
            seats.append(np.repeat(np.array(segment.seats), size))
            sources.append(np.tile(np.arange(ends, ends + size), len(segment.seats)))
            offsets.append(ends)
            ends += size
        place = np.concatenate(positions)
        source = np.concatenate(sources)
        pack = self._ship(np.stack([np.concatenate(tokens), place]))
        write = self._ship(np.stack([np.concatenate(seats), place[source], source]))
        wanted = [i for i, segment in enumerate(segments) if segment.item >= 0]
        last = [offsets[i] + len(segments[i].tokens) - 1 for i in wanted]
        logits_at = None
        if len(last) + running < ends:
            logits_at = self._ship(np.array([*range(running), *last], np.int64))
        return StepPlan(
            inputs=pack[0:1],
            positions=pack[1:2],
            write_seats=write[0],
            write_columns=write[1],
            write_from=None if len(source) == ends else write[2],
            decode=self._decode_block(running, lengths, pack[1, :running]) if running else None,
            blocks=tuple(self._blocks(segments, offsets, groups)),
            logits_at=logits_at,
            items=tuple(segments[i].item for i in wanted),
            tokens=ends,
        )

    def attend(self, plan: StepPlan, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of the flat queries (1, heads, N, dim); returns (1, N, heads, dim)."""
        keys, values = self.keys[layer], self.values[layer]
        flat = query[0].transpose(0, 1)
        if plan.decode is not None and not plan.blocks:
            return self._decode(plan.decode, keys, values, flat, scale).unsqueeze(0)
        out = flat.new_empty(flat.shape)
        if plan.decode is not None:
            running = plan.decode.shape[0]
            out[:running] = self._decode(plan.decode, keys, values, flat[:running], scale)
        for block in plan.blocks:
            self._attend_block(block, keys, values, flat, out, scale)
        return out.unsqueeze(0)

    def write(self, plan: StepPlan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keeps the flat keys and values (1, kv heads, N, dim) in their seats."""
        for cache, flat in ((self.keys[layer], key), (self.values[layer], value)):
            new = flat[0].transpose(0, 1)
            if plan.write_from is not None:
                new = new.index_select(0, plan.write_from)
            cache[plan.write_seats, :, plan.write_columns] = new

    def _decode(
        self,
        block: _Block,
        keys: torch.Tensor,
        values: torch.Tensor,
        flat: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """One query a seat. Heads that share a key head are rows of one matrix: nothing repeats."""
        running, columns = block.shape[0], block.columns
        heads, dim = flat.shape[1:]
        query = flat.reshape(running, self.heads_kv, heads // self.heads_kv, dim)
        keys, values = keys[:running, :, :columns], values[:running, :, :columns]
        if self._manual:
            # Measured on the CPU: two batched products are 5 times faster than SDPA's kernel,
            # which does a small product a head.
            scores = torch.matmul(query * scale, keys.transpose(2, 3)).float() + block.mask
            out = torch.matmul(torch.softmax(scores, -1).to(values.dtype), values)
        else:
            out = functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=block.mask, scale=scale
            )
        return out.reshape(running, heads, dim)

    def _attend_block(
        self,
        block: _Block,
        keys: torch.Tensor,
        values: torch.Tensor,
        flat: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """A padded batch of segments: queries (B, kv heads, shared heads x R, dim)."""
        batch, size = block.shape
        heads, dim = flat.shape[1:]
        grouped = (batch, size, self.heads_kv, heads // self.heads_kv, dim)
        query = flat[block.queries].view(grouped).permute(0, 2, 3, 1, 4)
        found = functional.scaled_dot_product_attention(
            query.reshape(batch, self.heads_kv, -1, dim),
            keys[block.seats, :, : block.columns],
            values[block.seats, :, : block.columns],
            attn_mask=block.mask,
            scale=scale,
        )
        found = found.view(batch, self.heads_kv, -1, size, dim).permute(0, 3, 1, 2, 4)
        found = found.reshape(batch * size, heads, dim)
        if block.scatter is None:
            out[block.queries] = found
        else:
            places, valid = block.scatter
            out.index_copy_(0, places, found.index_select(0, valid))

    def _decode_block(self, running: int, lengths: list[int], positions: torch.Tensor) -> _Block:
        columns = self._rounded(max(lengths) + 1)
        mask = self._mask(positions[:, None], columns).view(running, 1, 1, columns)
        return _Block(slice(0, running), slice(0, running), columns, mask, (running, 1), None)

    def _blocks(
        self, segments: Sequence[Segment], offsets: list[int], groups: int
    ) -> Iterator[_Block]:
        """Batches segments while padding at most doubles the attention's work."""
        order = sorted(range(len(segments)), key=lambda i: -len(segments[i].tokens))
        batch: list[int] = []
        longest = ends = useful = 0
        for i in order:
            size = len(segments[i].tokens)
            end = segments[i].start + size
            padded = (len(batch) + 1) * max(longest, size) * max(ends, end)
            if batch and padded > 2 * (useful + size * end) + 4096:
                yield self._block([segments[j] for j in batch], [offsets[j] for j in batch], groups)
                batch, longest, ends, useful = [], 0, 0, 0
            batch.append(i)
            longest, ends, useful = max(longest, size), max(ends, end), useful + size * end
        if batch:
            yield self._block([segments[j] for j in batch], [offsets[j] for j in batch], groups)

    def _block(self, segments: list[Segment], offsets: list[int], groups: int) -> _Block:
        sizes = np.array([len(segment.tokens) for segment in segments])
        batch, size = len(segments), int(sizes.max())
        starts = np.array([segment.start for segment in segments])
        columns = self._rounded(int((starts + sizes).max()))
        steps = np.arange(size)
        mask = self._mask(self._ship(starts[:, None] + steps)[:, :, None], columns)
        mask = mask.view(batch, 1, 1, size, columns).expand(-1, -1, groups, -1, -1)
        mask = mask.reshape(batch, 1, groups * size, columns)
        if batch == 1:
            part = slice(offsets[0], offsets[0] + size)
            seat = segments[0].seats[0]
            return _Block(part, slice(seat, seat + 1), columns, mask, (1, size), None)
        valid = steps < sizes[:, None]
        queries = np.where(valid, np.array(offsets)[:, None] + steps, 0).reshape(-1)
        kept = np.flatnonzero(valid)
        seats = np.array([segment.seats[0] for segment in segments])
        return _Block(
            queries=self._ship(queries),
            seats=self._ship(seats),
            columns=columns,
            mask=mask,
            shape=(batch, size),
            scatter=(self._ship(queries[kept]), self._ship(kept)),
        )

    def _mask(self, last: torch.Tensor, columns: int) -> torch.Tensor:
        """0 where a column is at or before `last`, the dtype's lowest number beyond it."""
        hidden = self._column_ids[:columns] > last
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, torch.finfo(self.dtype).min)

    def _rounded(self, columns: int) -> int:
        return min(-(-columns // COLUMN_STEP) * COLUMN_STEP, self.columns)

    def _ship(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array.astype(np.int64, copy=False))
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU pages that the system gives only when they are first written.

    Zeros, as a masked column still enters products: what lay in the memory could be NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


def seat_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    seat_cache: SeatCache,
    seat_plan: StepPlan,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function registered with transformers: write first, then attend.

    Everything that a token attends to within the same pass is thus already in its seat.
    """
    if softcap is not None or s_aux is not None:
        raise UserError("models whose attention has soft caps or sinks are not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast they come in different types; else these change nothing.
    query, key, value = (tensor.to(seat_cache.dtype) for tensor in (query, key, value))
    seat_cache.write(seat_plan, layer, key, value)
    return seat_cache.attend(seat_plan, layer, query, scale), None
