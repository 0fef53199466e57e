"""Whether another engine's logits are those of transformers, on a handful of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offbeat.config import RewardSourceSection
from offbeat.reward.rows import RowEncoder, counts_from_pad
from offbeat.reward.scorer import forward, load_model, untrained
from offbeat.reward.template import encode

REFERENCE_BYTES = 2 * 1024**3
"""Weights of more bytes are not loaded a second time: up to here (half a billion parameters in
float32) a second copy and its pass are seconds of one core; a 7B's would be 28 GB of host memory
and minutes. Such a model is checked against itself only, rows alone against rows together."""

LONGEST_ROW = 256
RELATIVE = {"float32": 1e-3, "cuda float32": 1e-2, "bfloat16": 0.1}
"""Of how far the rows' logits lie apart. On a GPU kernels multiply float32 as TF32; bfloat16 keeps
8 bits, and layers add up their rounding. A wrong pooling or mask differs by about 1."""

_TEXTS = (
    "a",
    "No.",
    "What is 6 times 7?\nThe answer is 42, because 6 + 6 + 6 + 6 + 6 + 6 + 6 = 42.",
    "What is 6 times 7?\nThe answer is 41.",
    "the quick brown fox jumps over the lazy dog and 12345 others, " * 4,
)


def check_rows(encoder: RowEncoder, config: Any) -> list[list[int]]:
    """Rows of mixed length, two with a beginning in common, one that ends in pads."""
    pad = None if counts_from_pad(config) else config.get_text_config().pad_token_id
    longest = min(encoder.limit, LONGEST_ROW)
    rows = [encode(encoder.tokenizer, text)[:longest] for text in _TEXTS]
    rows = [row for row in rows if row]
    if pad is not None and len(rows[0]) + 2 <= longest:
        rows.append([*rows[0], pad, pad])
    return rows


def reference_logits(path: str, setting: str, rows: Sequence[list[int]]) -> list[float] | None:
    """What transformers says to each row alone, in float32 on the CPU; None for a large model.

    Raises `UserError` for a model that has no trained head, a large one's too.
    """
    import torch

    if sum(file.stat().st_size for file in weight_files(path)) > REFERENCE_BYTES:
        _check_head(path, setting)
        return None
    model = load_model(path, setting, torch.float32).eval()
    return [forward(model, [row])[0] for row in rows]


def weight_files(path: str) -> list[Path]:
    """The files of a model directory that hold its weights."""
    return sorted(Path(path).glob("*.safetensors")) or sorted(Path(path).glob("*.bin"))


def tolerance(section: RewardSourceSection, device: str) -> float:
    """How far logits may differ, as a share of how far they lie apart."""
    exact = section.dtype == "float32" or (section.dtype == "auto" and device == "cpu")
    if not exact:
        return RELATIVE["bfloat16"]
    return RELATIVE["float32" if device == "cpu" else "cuda float32"]


def where_they_differ(
    rows: Sequence[list[int]], found: Sequence[float], wanted: Sequence[float], relative: float
) -> str | None:
    """The row where two lists of logits differ by most, in words; None if nowhere too much.

    `relative` is a share of the wanted logits' spread, or of a tenth of their size where all rows
    get about the same.
    """
    spread = max(wanted) - min(wanted)
    allowed = relative * max(spread, 0.1 * max(map(abs, wanted)))
    # A logit that is no number is never near another.
    gaps = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
    gaps = [gap if gap >= 0 else float("inf") for gap in gaps]
    worst = max(range(len(rows)), key=lambda i: gaps[i])
    if gaps[worst] <= allowed:
        return None
    return (
        f"{found[worst]:.6g} instead of {wanted[worst]:.6g} for a row of {len(rows[worst])} "
        f"tokens, {allowed:.2g} is allowed"
    )


def _check_head(path: str, setting: str) -> None:
    """Refuses a model whose files lack its head, without reading the weights."""
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with torch.device("meta"):
        model: Any = AutoModelForSequenceClassification.from_config(
            AutoConfig.from_pretrained(path)
        )
    stored: set[str] = set()
    for file in weight_files(path):
        if file.suffix == ".bin":
            return  # vLLM itself refuses what lacks weights
        with safe_open(file, "pt") as opened:
            stored |= set(opened.keys())
    head = [n for n in model.state_dict() if not n.startswith(f"{model.base_model_prefix}.")]
    missing = sorted(set(head) - stored)
    if missing:
        raise untrained(path, setting, missing[0])
