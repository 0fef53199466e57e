"""Which judge a verdict is of, and which numbers its draws follow from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

READ_WHOLE = (
    "config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "chat_template*", "*.jinja", "*.model", "*.index.json",
)  # fmt: skip
"""Files of a model directory that decide on what a judge reads and says, besides its weights."""
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
WINDOW = 1024
WINDOWS = 256
"""Bytes, and how many stretches of them, that stand for a file of weights."""
LARGEST_HEADER = 64_000_000


def model_fingerprint(folders: Sequence[Path]) -> str:
    """A hash of what is in model directories, whenever it was written; "" where none is there.

    Small files are read whole; of weights their size, and a stretch out of every tensor.
    """
    digest = hashlib.sha256()
    known = False
    for folder in dict.fromkeys(path.resolve() for path in folders):
        for file in _files(folder, READ_WHOLE):
            known = True
            digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
        for file in _files(folder, WEIGHTS):
            known = True
            digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
            for part in _stretches(file):
                digest.update(part)
    return digest.hexdigest()[:32] if known else ""


def server_fingerprint(said: Mapping[str, Any]) -> str:
    """What a server says of a model, in one line, without what changes from answer to answer."""
    lasting = {
        key: value for key, value in said.items() if key not in {"created", "permission", "object"}
    }
    return json.dumps(lasting, sort_keys=True, default=str)


def source_seed(seed: int, name: str) -> int:
    """A source's own seed, 31 bits: two judges of one run do not repeat one another."""
    return _number(f"{seed}/{name}".encode())


def call_seed(seed: int, vote: int, text: str) -> int:
    """The seed of one draw, 31 bits: equal votes on different texts differ, and runs repeat."""
    return _number(f"{seed + vote}/".encode() + text.encode("utf-8", "replace"))


def _number(words: bytes) -> int:
    return int.from_bytes(hashlib.sha256(words).digest()[:4], "big") >> 1


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return sorted(found)


def _stretches(file: Path) -> Iterator[bytes]:
    """The header of a safetensors file and the middle of each tensor; of another file a stretch
    every so often."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        header = _header(opened.read(8), size)
        if header and file.suffix == ".safetensors":
            text = opened.read(header)
            yield text
            begin = 8 + header
            places = [begin + place for place in _middles(text)]
        else:
            places = []
        for place in places or range(0, size, max(WINDOW, size // WINDOWS)):
            opened.seek(min(place, max(0, size - WINDOW)))
            yield opened.read(WINDOW)


def _header(start: bytes, size: int) -> int:
    length = int.from_bytes(start, "little")
    return length if len(start) == 8 and 8 + length <= size and length < LARGEST_HEADER else 0


def _middles(header: bytes) -> list[int]:
    """Where the middle of each tensor lies, in order; none for what is no header."""
    try:
        tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
        ends = [tensor["data_offsets"] for tensor in tensors]
        return sorted((int(begin) + int(end) - WINDOW) // 2 for begin, end in ends)
    except (ValueError, TypeError, LookupError, AttributeError):
        return []
