"""How much the roles computed, and how much of it at the same time. Pure; exact interval sweeps.

Waiting for a core is not computing: a span's density is min(1, cpu / (end - start)), the density
of a role at a moment is min(1, sum over its open spans), and what counts is the integral of the
product of densities. On one core two roles in turns have a density of 1/2 each, not two of 1.

Training: role "train", kind "train". Decoding: role "rollout", kinds "prefill" and "decode".
Scoring: roles "reward/<source>". A span with end <= start counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from offbeat.records import Span

Floats = NDArray[np.float64]
DECODE_KINDS = frozenset({"prefill", "decode"})


def is_train(span: Span) -> bool:
    """A trainer's step."""
    return span.role == "train" and span.kind == "train"


def is_decode(span: Span) -> bool:
    """A rollout engine's forward passes."""
    return span.role == "rollout" and span.kind in DECODE_KINDS


def is_score(span: Span) -> bool:
    """A reward replica's work."""
    return span.role.startswith("reward/")


def density(span: Span) -> float:
    """CPU seconds a second of a span, at most 1."""
    wall = span.end - span.start
    return min(1.0, max(0.0, span.cpu) / wall) if wall > 0 else 0.0


def busy(
    spans: Sequence[Span], start: float, end: float, replicas: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Share of the window [start, end] (seconds) that each role computed, 0..1: mean of replicas.

    Spans that cross the window's edges count in proportion. `replicas` says how many a role has;
    a role that is not in it has as many as different ones occur in `spans`. A role whose spans
    all lie outside the window is in the result with 0.
    """
    seconds: dict[str, float] = {}
    seen: dict[str, set[int]] = {}
    for span in spans:
        inside = max(0.0, min(span.end, end) - max(span.start, start))
        seconds[span.role] = seconds.get(span.role, 0.0) + inside * density(span)
        seen.setdefault(span.role, set()).add(span.replica)
    wall = end - start
    if wall <= 0:
        return dict.fromkeys(seconds, 0.0)
    counts = {role: len(ids) for role, ids in seen.items()} | dict(replicas or {})
    return {role: min(1.0, used / (wall * counts[role])) for role, used in seconds.items()}


def overlap(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """How much of training's compute in the window [start, end] had company. Values are 0..1.

    - `train_and_rollout`: integral of train density x rollout density over that of train density
    - `train_and_reward`: the same with the reward roles together
    - `train_and_decode_or_score`: the same with rollout and reward together
    - `open_decode_or_score`: share of the time with an open train span in which any decode or
      score span is open, whatever it computes
    - `train_spans_with_tokens`: share of train spans that overlap a decode span with tokens
    - `n_train_spans`: train spans in the window; if it is 0 the other values are 0 for want of any
    """
    clipped = [(max(s.start, start), min(s.end, end), s) for s in spans]
    inside = [(left, right, s) for left, right, s in clipped if right > left]
    points = np.unique(np.array([edge for left, right, _ in inside for edge in (left, right)]))
    train_spans = [item for item in inside if is_train(item[2])]
    decode_spans = [item for item in inside if is_decode(item[2])]
    score_spans = [item for item in inside if is_score(item[2])]
    train, train_open = _steps(train_spans, points)
    decode, decode_open = _steps(decode_spans, points)
    score, score_open = _steps(score_spans, points)
    widths = np.diff(points)
    computed = float(np.dot(widths, np.minimum(train, 1.0)))
    open_time = float(np.dot(widths, train_open))

    def together(other: Floats) -> float:
        both = np.dot(widths, np.minimum(train, 1.0) * np.minimum(other, 1.0))
        return _share(float(both), computed)

    return {
        "train_and_rollout": together(decode),
        "train_and_reward": together(score),
        "train_and_decode_or_score": together(decode + score),
        "open_decode_or_score": _share(
            float(np.dot(widths, train_open & (decode_open | score_open))), open_time
        ),
        "train_spans_with_tokens": _share(
            _with_tokens(train_spans, decode_spans), len(train_spans)
        ),
        "n_train_spans": float(len(train_spans)),
    }


def steady_window(spans: Iterable[Span], skip: int = 1) -> tuple[float, float] | None:
    """(start, end) of the run without warm-up and drain, in seconds; None if it is too short.

    From the second train span's start to the last-but-one train span's end (`skip` spans are left
    out at either side), by the trainer's lowest rank. Needs 2 x skip + 1 train spans.
    """
    train = sorted((s for s in spans if is_train(s)), key=lambda span: (span.start, span.end))
    rank = min((span.replica for span in train), default=0)
    steps = [span for span in train if span.replica == rank]
    if len(steps) < 2 * skip + 1:
        return None
    return steps[skip].start, steps[-1 - skip].end


Clipped = tuple[float, float, Span]


def _steps(items: Sequence[Clipped], points: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Sum of densities, and whether any span is open, on each stretch between two points."""
    change = np.zeros(len(points))
    count = np.zeros(len(points), dtype=np.int64)
    if items:
        densities = np.array([density(span) for _, _, span in items])
        for edge, sign in ((0, 1), (1, -1)):
            where = np.searchsorted(points, np.array([item[edge] for item in items]))
            np.add.at(change, where, sign * densities)
            np.add.at(count, where, sign)
    is_open = np.cumsum(count)[:-1] > 0
    total = np.where(is_open, np.maximum(np.cumsum(change)[:-1], 0.0), 0.0)
    return total, is_open


def _with_tokens(train: Sequence[Clipped], decode: Sequence[Clipped]) -> int:
    """Number of train spans that a decode span with tokens overlaps."""
    starts = np.sort(np.array([left for left, _, span in decode if span.tokens > 0]))
    ends = np.sort(np.array([right for _, right, span in decode if span.tokens > 0]))
    found = 0
    for left, right, _ in train:
        begun = np.searchsorted(starts, right, side="left")
        over = np.searchsorted(ends, left, side="right")
        found += int(begun > over)
    return found


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0
