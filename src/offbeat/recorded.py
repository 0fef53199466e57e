"""A group as bytes: what the trainer needs to train it again, without data, engine or judge.

Two parts, as they come to be: the *tokens* of all samples once they are generated, and the
*rewards* once they are scored. Numbers come back bit for bit. Pure.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.records import Completion, Group, Payload, Prompt, Reward, Sample

FORMAT = 1
_HEADER = struct.Struct("<III")  # format, checksum of all that follows, bytes of its JSON
_JSON = json.JSONEncoder(separators=(",", ":"))


class RecordError(ValueError):
    """Bytes that are no group of this version."""


@dataclass(frozen=True, slots=True)
class Generated:
    """A group's samples without rewards; each completion's `ref` is its `Payload`."""

    prompt_ids: np.ndarray[Any, np.dtype[np.int32]]
    completions: tuple[Completion, ...]


def pack_tokens(prompt: Prompt, completions: Sequence[Completion], payloads: Sequence[Payload]) -> (
    bytes
):  # fmt: skip
    """The tokens of a group: completions in any order, `payloads` aligned with them."""
    notes = [_note(completion) for completion in completions]
    head = {"prompt": len(prompt.token_ids), "lengths": [len(p.token_ids) for p in payloads]}
    arrays = [np.ascontiguousarray(prompt.token_ids, np.int32)]
    for payload in payloads:
        arrays.append(np.ascontiguousarray(payload.token_ids, np.int32))
        arrays.append(np.ascontiguousarray(payload.logprobs, np.float32))
        arrays.append(np.ascontiguousarray(payload.versions, np.int32))
    return _pack(head | {"completions": notes}, arrays)


def unpack_tokens(data: bytes) -> Generated:
    """The inverse; raises `RecordError`."""
    head, body = _unpack(data)
    flat = np.frombuffer(body, np.int32)
    prompt_ids, at = flat[: head["prompt"]], head["prompt"]
    completions = []
    for note, length in zip(head["completions"], head["lengths"], strict=True):
        ids, logprobs, versions = (flat[at + i * length : at + (i + 1) * length] for i in range(3))
        at += 3 * length
        ref = Payload(ids, logprobs.view(np.float32), versions)
        watched = tuple(note.pop("watched"))
        completions.append(Completion(**note, ref=ref, watched=watched))
    return Generated(prompt_ids, tuple(completions))


def pack_rewards(samples: Sequence[Sample]) -> bytes:
    """The rewards of a group's samples; judges' calls are kept elsewhere, as transcripts."""
    rows = [
        {
            "index": sample.completion.index,
            "total": sample.total,
            "parts": dict(sample.parts),
            "vetoed": sample.vetoed,
            "rewards": {name: _told(reward) for name, reward in sample.rewards.items()},
        }
        for sample in samples
    ]
    return _pack({"samples": rows}, [])


def unpack_group(
    prompt: Prompt, attempt: int, deadline: int, tokens: bytes, rewards: bytes
) -> Group:
    """The scored group, its samples in the order in which they were scored."""
    generated = unpack_tokens(tokens)
    by_index = {completion.index: completion for completion in generated.completions}
    head, _ = _unpack(rewards)
    samples = tuple(
        Sample(
            by_index[row["index"]],
            {name: Reward(**values) for name, values in row["rewards"].items()},
            row["total"],
            row["parts"],
            row["vetoed"],
        )
        for row in head["samples"]
    )
    return Group(prompt, attempt, deadline, samples)


def _note(completion: Completion) -> dict[str, Any]:
    """A completion without its `ref`."""
    return {
        "request_id": completion.request_id,
        "index": completion.index,
        "text": completion.text,
        "tokens": completion.tokens,
        "version_min": completion.version_min,
        "version_max": completion.version_max,
        "finish_reason": completion.finish_reason,
        "watched": list(completion.watched),
    }


def _told(reward: Reward) -> dict[str, Any]:
    """A reward without its transcripts, and without what is as it is by default."""
    values = {
        "source": reward.source,
        "status": reward.status,
        "value": reward.value,
        "cause": reward.cause,
        "reason": reward.reason or None,
        "raw": reward.raw or None,
        "retries": reward.retries or None,
        "token_index": reward.token_index,
        "spread": reward.spread,
    }
    return {key: value for key, value in values.items() if value is not None}


def _pack(head: Mapping[str, Any], arrays: Sequence[np.ndarray[Any, Any]]) -> bytes:
    text = _JSON.encode(head).encode("ascii")
    text += b" " * (-(len(text) + _HEADER.size) % 8)
    body = b"".join([text, *(array.tobytes() for array in arrays)])
    return _HEADER.pack(FORMAT, zlib.crc32(body, len(text)), len(text)) + body


def _unpack(data: bytes) -> tuple[dict[str, Any], memoryview]:
    if len(data) < _HEADER.size:
        raise RecordError(f"a recorded group is damaged: it has {len(data)} bytes")
    version, checksum, size = _HEADER.unpack_from(data)
    if version != FORMAT:
        raise RecordError(f"a recorded group has format {version}, not {FORMAT}")
    body = memoryview(data)[_HEADER.size :]
    if zlib.crc32(body, size) != checksum:
        raise RecordError("a recorded group is damaged: its checksum differs")
    head: dict[str, Any] = json.loads(bytes(body[:size]))
    return head, body[size:]
