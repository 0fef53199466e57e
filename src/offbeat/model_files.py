"""Whether a model directory's weights are there and whole, seen without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path

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
