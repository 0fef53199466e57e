"""The model of a discriminative reward model in transformers: loading it, and its logits of rows.

Two kinds of heads, told apart by config.json's `architectures`: one for sequences, read where the
model itself reads it, and one for tokens (`...ForTokenClassification`), read at a row's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.reward.logits import Reading, reading_of

if TYPE_CHECKING:
    import torch

TOKEN_LEVEL = "ForTokenClassification"

_loading = Lock()
"""transformers does not load two models at once in one process."""


def read_config(name: str, section: RewardSourceSection) -> tuple[Any, Reading]:
    """The configuration of source `name`'s model, and how its logits are read.

    Raises `UserError` where there is none, or `label` and `label_values` do not fit it.
    """
    from transformers import AutoConfig

    path, setting = str(section.model), f"reward.{name}.model"
    try:
        config = AutoConfig.from_pretrained(path)
        labels = [str(config.id2label[place]) for place in range(config.num_labels)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unloadable(path, setting, error) from error
    if not labels:
        raise UserError(f"{setting}: the model in {path} has no labels; a scorer has one or more")
    return config, reading_of(section, labels, name, path)


def token_level(config: Any) -> bool:
    """Whether the model classifies each token, by the classes that its config.json names."""
    return any(str(kind).endswith(TOKEN_LEVEL) for kind in config.architectures or ())


def auto_class(config: Any) -> Any:
    """The class of transformers that loads such a model."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    if token_level(config):
        return AutoModelForTokenClassification
    return AutoModelForSequenceClassification


def load_model(path: str, setting: str, dtype: torch.dtype) -> Any:
    """The classification model in a directory; `UserError` unless its head is trained."""
    from safetensors import SafetensorError
    from transformers import AutoConfig

    with _loading:
        try:
            kind = auto_class(AutoConfig.from_pretrained(path))
            model, loading = kind.from_pretrained(path, dtype=dtype, output_loading_info=True)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise _unloadable(path, setting, error) from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise untrained(path, setting, missing[0])
    return model


def forward(model: Any, batch: Sequence[list[int]]) -> list[list[float]]:
    """All logits of right-padded rows in one pass of a loaded model, on the model's device."""
    import torch

    config = model.config.get_text_config()
    saved = config.pad_token_id
    pad = saved if saved is not None else _unused(batch)
    width = max(map(len, batch))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in batch])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch])
    config.pad_token_id = pad
    try:
        with torch.inference_mode():
            output = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device))
    finally:
        config.pad_token_id = saved
    found = output.logits
    if token_level(model.config):
        found = found[torch.arange(len(batch)), [len(row) - 1 for row in batch]]
    logits: list[list[float]] = found.float().cpu().tolist()
    return logits


def plain(model: Any, row: list[int]) -> list[float]:
    """All logits of one row as transformers gives them by itself: no padding, no mask."""
    import torch

    with torch.inference_mode():
        found = model(input_ids=torch.tensor([row], device=model.device)).logits[0]
    if token_level(model.config):
        found = found[-1]
    logits: list[float] = found.float().cpu().tolist()
    return logits


def compute_dtype(section: RewardSourceSection, device: str) -> torch.dtype:
    """The dtype that a scorer computes in on a device, "cpu" or "cuda"."""
    import torch

    if section.dtype == "auto":
        native = device != "cpu" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    return torch.bfloat16 if section.dtype == "bfloat16" else torch.float32


def weight_files(path: str) -> list[Path]:
    """The files of a model directory that hold its weights."""
    return sorted(Path(path).glob("*.safetensors")) or sorted(Path(path).glob("*.bin"))


def untrained(path: str, setting: str, name: str) -> UserError:
    """The error for a model without weights for its head."""
    return UserError(
        f"{setting}: the model in {path} has no trained weights for {name}; "
        "give a model that was trained to classify sequences or tokens"
    )


def _unloadable(path: str, setting: str, error: Exception) -> UserError:
    short = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return UserError(f"{setting}: no scorer can be loaded from {path} ({short})")


def _unused(batch: Sequence[list[int]]) -> int:
    """The smallest id that no row contains: padding never looks like text."""
    present = {token for row in batch for token in row}
    return next(i for i in range(len(present) + 1) if i not in present)
