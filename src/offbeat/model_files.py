"""Whether a model directory's files are there and whole, seen without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from offbeat.errors import UserError

MEND = "copy the model there again, or save it with save_pretrained"


def check_weights(model: Path, key: str) -> None:
    """Refuses a model directory without weights, or with safetensors files that were cut short."""
    files = sorted(model.glob("*.safetensors"))
    if not files and not list(model.glob("pytorch_model*.bin")):
        raise UserError(f"{key}: {model} has no weights (model.safetensors); {MEND}")
    for file in files:
        wrong = _wrong(file)
        if wrong is not None:
            raise UserError(f"{key}: {file} {wrong}; {MEND}")


def architectures(model: Path, key: str) -> list[str]:
    """The classes that a directory's config.json names, `[]` if none; it must be a JSON object."""
    file = model / "config.json"
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{key}: {file} cannot be read ({error}); {MEND}") from None
    except ValueError as error:
        raise UserError(f"{key}: {file} is not valid JSON ({error}); {MEND}") from None
    if not isinstance(described, dict):
        raise UserError(f"{key}: {file} is not a JSON object; {MEND}")
    names = described.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def model_positions(path: Path) -> int | None:
    """Positions that the model in a directory was made for; None if its config.json says none."""
    try:
        described = json.loads((path / "config.json").read_text(encoding="utf-8"))
        positions = described.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return positions if isinstance(positions, int) and positions > 0 else None


def read_tokenizer(path: Path, key: str) -> Any:
    """The tokenizer in a directory; `UserError` naming the setting `key` if there is none.

    Where a vocabulary is missing, transformers makes an empty one for some models, to which every
    text is the same unknown token.
    """
    from transformers import AutoTokenizer

    reason = "it has no vocabulary; is tokenizer.json missing?"
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        if len(tokenizer) > len(tokenizer.all_special_tokens):
            return tokenizer
    except (OSError, ValueError, KeyError, ImportError) as error:
        if any(path.glob("token*")) or any(path.glob("*.model")):
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    raise UserError(f"{key}: {path} holds no tokenizer that loads ({reason}); save one there")


def _wrong(file: Path) -> str | None:
    """What is wrong with a safetensors file's size or header, if anything is."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if 8 + length > size:
                return "is no safetensors file or was cut short"
            header = json.loads(opened.read(length))
        ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
    except OSError as error:
        return f"cannot be read ({error})"
    except (ValueError, LookupError, TypeError, AttributeError):
        return "has no safetensors header"
    wanted = 8 + length + max(ends, default=0)
    if wanted != size:
        return f"should have {wanted:,} bytes and has {size:,}"
    return None
