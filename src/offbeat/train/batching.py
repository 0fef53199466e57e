"""A step's samples become micro-batches: which tokens are computed, and where each is predicted.

The invariant: over the micro-batches of a plan every completion token of every sample is
predicted exactly once (`MicroBatch.source` is a partition of the step's tokens), from exactly
its own prefix. Two layouts hold it:

- padded rows: one row a sample, padded on the right. Attention is causal, so padding is never
  seen by a token, and what is trained follows from lengths, never from ids (pad may equal eos);
- prefix sharing: all samples of a micro-batch are merged into one token trie. A prefix that
  samples have in common - across groups, a group's prompt, equal beginnings of answers - is
  computed once, and its gradient is the sum of theirs: the same, but for rounding.

A sample's last token is predicted but predicts nothing: it is no input. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]

PASS_TOKENS = 32
"""What one more micro-batch costs (reading all weights, launching), in tokens of matrix work."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Token ids of one sample: its prompt (at least one) and its completion (at least one)."""

    prompt: NDArray[np.int32]
    completion: NDArray[np.int32]

    @property
    def inputs(self) -> NDArray[np.int32]:
        """All tokens but the last: what the model reads to predict the completion."""
        return np.concatenate([self.prompt, self.completion[:-1]])


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: B rows of W tokens (B = 1 with prefix sharing) that predict T tokens.

    `input_ids`, `position_ids` (B, W). `ends` (W,), only with prefix sharing: nodes stand in
    preorder, and node j is an ancestor of node i (or i itself) if and only if j <= i < ends[j].
    `rows` (R,): places of the flattened (B * W) that predict something. For each trained token,
    ascending in `token_rows`: `token_rows` (T,) which of `rows` predicts it, `targets` (T,) its
    id, `source` (T,) its place in the concatenation of all the step's completions.
    `computed`: tokens of input with content (padding not counted).
    """

    input_ids: Index
    position_ids: Index
    ends: Index | None
    rows: Index
    token_rows: Index
    targets: Index
    source: Index
    computed: int


def plan(
    samples: Sequence[Trajectory],
    *,
    tokens_per_micro_batch: int,
    prefix_sharing: bool,
    hidden_size: int | None = None,
) -> list[MicroBatch]:
    """Cuts a step's samples into micro-batches of at most so many input tokens.

    The budget counts rows x width with padding, or unique trie nodes. A sample that is longer
    than the budget makes a micro-batch of its own. The order is fixed by the samples alone.

    Attention over a trie is dense: every node meets every other, which for long answers costs
    more than sharing short prompts saves. So with the model's `hidden_size` (elements) given,
    `prefix_sharing` takes the cheapest of tries cut at the budget and at 1/2, 1/4 and 1/8 of it,
    and padded rows.
    """
    for number, sample in enumerate(samples):
        if not len(sample.prompt) or not len(sample.completion):
            raise ValueError(f"sample {number} has an empty prompt or an empty completion")
    lengths = np.array([len(sample.completion) for sample in samples], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    inputs = [sample.inputs for sample in samples]
    cuts, share = _cut_rows(inputs, tokens_per_micro_batch), False
    if prefix_sharing:
        budgets = [tokens_per_micro_batch // part for part in (1, 2, 4, 8)]
        tries = [_cut_trie(inputs, max(1, budget)) for budget in budgets]
        if hidden_size is None:
            cuts, share = tries[0], True
        else:
            costs = [_cost(inputs, cut, True, hidden_size) for cut in tries]
            best = costs.index(min(costs))
            if costs[best] <= _cost(inputs, cuts, False, hidden_size):
                cuts, share = tries[best], True
    lay_out = _trie if share else _rows
    return [lay_out(chosen, samples, inputs, starts) for chosen in cuts]


def ancestor_mask(ends: Index) -> NDArray[np.bool_]:
    """(W, W): True where the column is the row's ancestor in the trie, or the row itself."""
    place = np.arange(len(ends))
    below = place[None, :] <= place[:, None]
    inside = place[:, None] < ends[None, :]
    return np.logical_and(below, inside)


def _cut_rows(inputs: list[NDArray[np.int32]], budget: int) -> list[list[int]]:
    """Longest first, so that rows of a micro-batch are of like length and memory peaks at once."""
    order = sorted(range(len(inputs)), key=lambda i: -len(inputs[i]))
    cuts: list[list[int]] = []
    width = 0
    for i in order:
        if cuts and (len(cuts[-1]) + 1) * width <= budget:
            cuts[-1].append(i)
        else:
            cuts.append([i])
            width = len(inputs[i])
    return cuts


def _cut_trie(inputs: list[NDArray[np.int32]], budget: int) -> list[list[int]]:
    """In lexicographic order, a sample's new nodes follow from its predecessor alone."""
    order = sorted(range(len(inputs)), key=lambda i: inputs[i].astype(">u4").tobytes())
    cuts: list[list[int]] = []
    nodes = 0
    for i in order:
        new = len(inputs[i])
        if cuts:
            new -= _common(inputs[cuts[-1][-1]], inputs[i])
        if cuts and nodes + new <= budget:
            cuts[-1].append(i)
            nodes += new
        else:
            cuts.append([i])
            nodes = len(inputs[i])
    return cuts


def _cost(
    inputs: list[NDArray[np.int32]], cuts: list[list[int]], share: bool, hidden: int
) -> float:
    """Multiplications of a plan, in units of 4 x hidden a layer: a token's share of the matrices
    is about 24 x hidden^2, and 4 x hidden for every other token that attention meets."""
    total = 0.0
    for chosen in cuts:
        if share:
            tokens = met = _nodes(inputs, chosen)
        else:
            width = max(len(inputs[i]) for i in chosen)
            tokens, met = len(chosen) * width, width // 2  # a causal kernel leaves out half
        total += (tokens + PASS_TOKENS) * 6 * hidden + tokens * met
    return total


def _nodes(inputs: list[NDArray[np.int32]], chosen: list[int]) -> int:
    shared = sum(_common(inputs[a], inputs[b]) for a, b in pairwise(chosen))
    return sum(len(inputs[i]) for i in chosen) - shared


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the common prefix."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _rows(
    chosen: list[int],
    samples: Sequence[Trajectory],
    inputs: list[NDArray[np.int32]],
    starts: Index,
) -> MicroBatch:
    """One row a sample, padded on the right with id 0 (any id serves: nothing sees it)."""
    width = max(len(inputs[i]) for i in chosen)
    ids = np.zeros((len(chosen), width), dtype=np.int64)
    rows, source = [], []
    for row, i in enumerate(chosen):
        ids[row, : len(inputs[i])] = inputs[i]
        first = row * width + len(samples[i].prompt) - 1
        rows.append(first + np.arange(starts[i + 1] - starts[i]))
        source.append(np.arange(starts[i], starts[i + 1]))
    flat = np.concatenate(rows)
    return MicroBatch(
        input_ids=ids,
        position_ids=np.broadcast_to(np.arange(width), ids.shape),
        ends=None,
        rows=flat,
        token_rows=np.arange(len(flat)),
        targets=np.concatenate([samples[i].completion for i in chosen]).astype(np.int64),
        source=np.concatenate(source),
        computed=sum(len(inputs[i]) for i in chosen),
    )


def _trie(
    chosen: list[int],
    samples: Sequence[Trajectory],
    inputs: list[NDArray[np.int32]],
    starts: Index,
) -> MicroBatch:
    """One trie of the samples, which are in lexicographic order: nodes come out in preorder."""
    ids, depths, places, source = [], [], [], []
    ends = np.zeros(sum(len(inputs[i]) for i in chosen), dtype=np.int64)
    path, before, nodes = np.zeros(0, np.int64), np.zeros(0, np.int32), 0
    for i in chosen:
        common = _common(before, inputs[i])
        ends[path[common:]] = nodes  # what the new sample does not share is closed
        new = len(inputs[i]) - common
        path = np.concatenate([path[:common], np.arange(nodes, nodes + new)])
        ids.append(inputs[i][common:])
        depths.append(np.arange(common, common + new))
        places.append(path[len(samples[i].prompt) - 1 :])
        source.append(np.arange(starts[i], starts[i + 1]))
        before, nodes = inputs[i], nodes + new
    ends[path] = nodes
    rows, token_rows = np.unique(np.concatenate(places), return_inverse=True)
    order = np.argsort(token_rows, kind="stable")
    targets = np.concatenate([samples[i].completion for i in chosen]).astype(np.int64)
    return MicroBatch(
        input_ids=np.concatenate(ids).astype(np.int64)[None],
        position_ids=np.concatenate(depths)[None],
        ends=ends[:nodes],
        rows=rows,
        token_rows=token_rows[order],
        targets=targets[order],
        source=np.concatenate(source)[order],
        computed=nodes,
    )
