"""A recorded group comes back bit for bit, and damaged bytes never pass for one."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbeat.recorded import (
    RecordError,
    pack_rewards,
    pack_tokens,
    unpack_group,
    unpack_tokens,
)
from offbeat.records import Completion, Payload, Prompt, Reward, Sample, Transcript

TEXTS = st.text(st.characters(codec=None), max_size=6)  # lone surrogates too
SMALL = st.integers(0, 2**31 - 1)
NUMBERS = st.floats(width=64)
SLOW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
INTS = st.integers(-(2**31), 2**31 - 1)


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    length = draw(st.integers(0, 4))
    parts = np.frombuffer(draw(st.binary(min_size=12 * length, max_size=12 * length)), np.int32)
    ids, logprobs, versions = (parts[i * length : (i + 1) * length] for i in range(3))
    return Payload(ids, logprobs.view(np.float32), versions)  # every float there is


@st.composite
def groups(draw: st.DrawFn) -> tuple[Prompt, list[Completion], list[Payload]]:
    ids = np.array(draw(st.lists(INTS, max_size=3)), np.int32)
    found = draw(st.lists(payloads(), max_size=2))
    order = draw(st.permutations(range(len(found))))
    completions = [
        Completion(
            draw(TEXTS), index, draw(TEXTS), len(payload.token_ids), draw(SMALL), draw(SMALL),
            draw(st.sampled_from(["stop", "length"])), payload,
            tuple(draw(st.lists(st.floats(allow_nan=False), max_size=2))),
        )
        for index, payload in zip(order, found, strict=True)
    ]  # fmt: skip
    return Prompt(3, ids, "p", "q"), completions, found


def rewards() -> st.SearchStrategy[Reward]:
    none: st.SearchStrategy[None] = st.none()
    return st.builds(
        Reward,
        source=TEXTS,
        status=st.sampled_from(["scored", "abstained", "failed"]),
        value=none | st.floats(allow_nan=False),
        cause=none | TEXTS.filter(bool),
        reason=TEXTS,
        raw=TEXTS,
        retries=st.integers(0, 9),
        token_index=none | st.integers(0, 9),
        spread=none | st.floats(allow_nan=False),
    )


def bits(value: float | None) -> bytes | None:
    return None if value is None else struct.pack("d", value)


def same(a: Payload, b: Payload) -> bool:
    return all(
        x.dtype == y.dtype and x.tobytes() == y.tobytes()
        for x, y in [
            (a.token_ids, b.token_ids),
            (a.logprobs, b.logprobs),
            (a.versions, b.versions),
        ]
    )


@SLOW
@given(groups())
def test_tokens_come_back_bit_for_bit(
    group: tuple[Prompt, list[Completion], list[Payload]],
) -> None:
    prompt, completions, found = group
    back = unpack_tokens(pack_tokens(prompt, completions, found))
    assert back.prompt_ids.tobytes() == prompt.token_ids.tobytes()
    assert len(back.completions) == len(completions)
    for one, was, payload in zip(back.completions, completions, found, strict=True):
        assert same(one.ref, payload)
        assert {name: value for name, value in fields(one) if name != "ref"} == {
            name: value for name, value in fields(was) if name != "ref"
        }


def fields(completion: Completion) -> list[tuple[str, Any]]:
    return [(name, getattr(completion, name)) for name in completion.__slots__]


@SLOW
@given(groups(), st.data())
def test_rewards_come_back_bit_for_bit(
    group: tuple[Prompt, list[Completion], list[Payload]], data: st.DataObject
) -> None:
    prompt, completions, found = group
    samples = [
        Sample(
            completion,
            data.draw(st.dictionaries(TEXTS, rewards(), max_size=2)),
            data.draw(st.none() | NUMBERS),
            data.draw(st.dictionaries(TEXTS, st.floats(allow_nan=False), max_size=2)),
            data.draw(st.booleans()),
        )
        for completion in completions
    ]
    back = unpack_group(
        prompt, 2, 7, pack_tokens(prompt, completions, found), pack_rewards(samples)
    )
    assert (back.prompt, back.attempt, back.deadline) == (prompt, 2, 7)
    for one, was in zip(back.samples, samples, strict=True):
        assert one.completion.index == was.completion.index
        assert same(one.completion.ref, was.completion.ref)
        assert one.rewards == was.rewards
        assert one.parts == was.parts
        assert one.vetoed == was.vetoed
        if was.total is not None and np.isnan(was.total):
            assert one.total is not None
            assert np.isnan(one.total)
        else:
            assert bits(one.total) == bits(was.total)


def test_judges_calls_are_kept_elsewhere() -> None:
    prompt, completions, found = plain()
    reward = Reward.scored("judge", 0.1, transcripts=(Transcript("secret", "yes"),))
    packed = pack_rewards([Sample(completions[0], {"judge": reward}, 0.1)])
    assert b"secret" not in packed
    back = unpack_group(prompt, 0, 1, pack_tokens(prompt, completions, found), packed)
    assert back.samples[0].rewards == {"judge": Reward.scored("judge", 0.1)}


@SLOW
@given(st.data())
def test_damaged_bytes_are_no_group(data: st.DataObject) -> None:
    prompt, completions, found = plain()
    tokens = pack_tokens(prompt, completions, found)
    packed_rewards = pack_rewards([Sample(completions[0], {"r": Reward.scored("r", 1.0)}, 1.0)])
    whole = data.draw(st.sampled_from([tokens, packed_rewards]))
    broken = bytearray(whole)
    match data.draw(st.sampled_from(["flip", "cut", "more"])):
        case "flip":
            place = data.draw(st.integers(0, len(whole) - 1))
            broken[place] ^= data.draw(st.integers(1, 255))
        case "cut":
            del broken[data.draw(st.integers(0, len(whole) - 1)) :]
        case _:
            broken += data.draw(st.binary(min_size=1, max_size=9))
    parts = [bytes(broken) if part is whole else part for part in (tokens, packed_rewards)]
    with pytest.raises(RecordError):
        unpack_group(prompt, 0, 1, *parts)


def test_another_format_is_refused_by_name() -> None:
    data = bytearray(pack_rewards([]))
    data[0] = 9
    with pytest.raises(RecordError, match="format 9, not 1"):
        unpack_group(plain()[0], 0, 1, pack_tokens(*plain()), bytes(data))


def plain() -> tuple[Prompt, list[Completion], list[Payload]]:
    payload = Payload(
        np.array([5, 6], np.int32),
        np.array([-0.5, np.nan], np.float32),
        np.array([1, -1], np.int32),
    )
    completion = Completion("3.0", 0, "x", 2, 1, 1, "stop", payload)
    return Prompt(3, np.array([1], np.int32), "p", "q"), [completion], [payload]
