"""The rows of the check that a scorer passes before it may train, and transformers' word on them.

Replicas put what they find into a `RowCheck`; `parity.difference` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from offbeat.config import RewardSourceSection
from offbeat.records import Prompt, ScoreItem
from offbeat.reward.classifier import (
    auto_class,
    forward,
    load_model,
    plain,
    untrained,
    weight_files,
)
from offbeat.reward.parity import CheckRow
from offbeat.reward.rows import RowEncoder, counts_from_pad
from offbeat.reward.template import TemplateFailed, encode

REFERENCE_BYTES = 2 * 1024**3
"""Weights of more bytes are not loaded a second time: up to here (half a billion parameters in
float32) a second copy and its pass are seconds of one core; a 7B's would be 28 GB of host memory
and minutes. Such a model is compared with itself only: rows alone and together, and the replicas
with one another."""

LONGEST_ROW = 256
LONGEST_EXAMPLE = 128
EXAMPLES = 3
RELATIVE = {"float32": 1e-3, "cuda float32": 1e-2, "bfloat16": 0.1}
"""Of how far the rows' scores lie apart. On a GPU kernels multiply float32 as TF32; bfloat16 keeps
8 bits, and layers add up their rounding. A wrong pooling or mask differs by about 1."""

_TEXTS = ("a", "No.")
_TURNS = (
    ("What is 6 times 7?", "The answer is 42, because 6 + 6 + 6 + 6 + 6 + 6 + 6 = 42."),
    ("What is 6 times 7?", "The answer is 41."),
    ("", "the quick brown fox jumps over the lazy dog and 12345 others, " * 4),
)


def check_rows(
    encoder: RowEncoder, config: Any, examples: Sequence[ScoreItem]
) -> tuple[CheckRow, ...]:
    """Rows of mixed length, two with a beginning in common, one that ends in pads; behind them a
    few examples. Texts go through the source's template where that takes them."""
    pad = config.get_text_config().pad_token_id
    longest = min(encoder.limit, LONGEST_ROW)
    rows = [_plain_row(encoder, text, longest) for text in _TEXTS]
    rows += [_row_of(encoder, _turn(*turn), longest) for turn in _TURNS]
    rows = [row for row in rows if row.ids]
    if pad is not None and rows and len(rows[0].ids) + 2 <= longest:
        rows.append(CheckRow(rows[0].text + " and padding", (*rows[0].ids, pad, pad)))
    longest = min(longest, LONGEST_EXAMPLE)
    rows += [_row_of(encoder, item, longest) for item in examples[:EXAMPLES]]
    if counts_from_pad(config):  # other positions behind a pad, which not every backend gives them
        rows = [row for row in rows if pad not in row.ids]
    return tuple(rows)


def _turn(question: str, answer: str) -> ScoreItem:
    ids = np.zeros(0, np.int32)
    return ScoreItem(Prompt(0, ids, question, question, reference="42"), answer)


def _plain_row(encoder: RowEncoder, text: str, longest: int) -> CheckRow:
    return CheckRow(text, tuple(encode(encoder.tokenizer, text)[:longest]))


def _row_of(encoder: RowEncoder, item: ScoreItem, longest: int) -> CheckRow:
    """As the source would encode it; a template that wants more than it has gets the plain text."""
    try:
        text = encoder.text(item)
        ids = encoder.encode(item, text)
    except TemplateFailed:
        ids = []
    if not ids:
        text = f"{item.prompt.question}\n{item.completion}"
        return _plain_row(encoder, text, longest)
    return CheckRow(text, tuple(ids[:longest]))


def in_transformers(
    section: RewardSourceSection,
    setting: str,
    rows: Sequence[list[int]],
    value: Callable[[Sequence[float]], float],
    *,
    loaded: Any = None,
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """The scores that transformers gives the rows alone, and in padded batches of `seats` rows.

    Of the loaded model, or in float32 on the CPU of a second copy; None for a large model. Raises
    `UserError` for a model that has no trained head.
    """
    import torch

    path = str(section.model)
    if loaded is None and is_large(path):
        return None, None
    model = load_model(path, setting, torch.float32).eval() if loaded is None else loaded
    padded: list[list[float]] = []
    for start in range(0, len(rows), section.seats):
        padded += forward(model, rows[start : start + section.seats])
    alone = tuple(value(plain(model, row)) for row in rows)
    return alone, tuple(map(value, padded))


def is_large(path: str) -> bool:
    """Whether a model is too large to be loaded a second time."""
    return sum(file.stat().st_size for file in weight_files(path)) > REFERENCE_BYTES


def tolerance(section: RewardSourceSection, device: str) -> float:
    """How far scores may differ, as a share of how far they lie apart (`parity.allowed`)."""
    exact = section.dtype == "float32" or (section.dtype == "auto" and device == "cpu")
    if not exact:
        return RELATIVE["bfloat16"]
    return RELATIVE["float32" if device == "cpu" else "cuda float32"]


def check_head(path: str, setting: str, config: Any) -> None:
    """Refuses a model whose files lack its head, without reading the weights where it is there."""
    import torch
    from safetensors import safe_open

    stored: set[str] = set()
    for file in weight_files(path):
        if file.suffix == ".bin":
            return  # whoever loads it refuses what lacks weights
        with safe_open(file, "pt") as opened:
            stored |= set(opened.keys())
    with torch.device("meta"):
        model: Any = auto_class(config).from_config(config)
    head = [n for n in model.state_dict() if not n.startswith(f"{model.base_model_prefix}.")]
    missing = sorted(set(head) - stored)
    if not missing:
        return
    if is_large(path):
        raise untrained(path, setting, missing[0])
    load_model(path, setting, torch.float32)  # the files may name it otherwise
