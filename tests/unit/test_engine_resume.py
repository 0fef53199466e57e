"""Samples that go on from their tokens in another engine: as if nothing had happened."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine_models import (
    EOS,
    load_oracle,
    make_model,
    read_version,
    teacher_forced,
    write_version,
)

from offbeat.errors import RequestRefused
from offbeat.records import Completion, GenerateRequest, Payload, Progress, Sampling
from offbeat.rollout.transformers_engine import TransformersEngine

PROMPT = np.array([7, 30, 41, 8, 99], np.int32)
KINDS = ("llama", "qwen3-tied")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that never end a sample of their own accord."""
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, kind) for kind in KINDS}


def run_engine(
    path: Path, body: Callable[[TransformersEngine], Awaitable[Any]], **settings: Any
) -> Any:
    settings = {"max_context": 96, "seats": 8, "load_manifest": read_version} | settings

    async def main() -> Any:
        engine = TransformersEngine(str(path), **settings)
        await engine.start()
        never_end(engine)
        try:
            return await asyncio.wait_for(body(engine), 60)
        finally:
            await engine.stop()

    return asyncio.run(main())


def never_end(engine: TransformersEngine) -> None:
    """Without the tokenizer's end of sequence samples have the length that a test wants."""
    engine._stepper.model.tokenizer.eos_token = None  # type: ignore[union-attr]


async def items(engine: TransformersEngine, request: GenerateRequest) -> list[Any]:
    return [item async for item in engine.generate(request)]


def completions(found: list[Any]) -> dict[int, Completion]:
    ended = {item.index: item for item in found if isinstance(item, Completion)}
    assert len(ended) == sum(isinstance(item, Completion) for item in found)
    return ended


def snapshots(found: list[Any], index: int) -> list[Progress]:
    return [item for item in found if isinstance(item, Progress) and item.index == index]


def begins_with(whole: Payload, start: Payload) -> None:
    """The tokens of `start`, their log-probs and versions, unchanged to the last bit."""
    size = len(start.token_ids)
    assert len(whole.token_ids) >= size > 0
    for name in ("token_ids", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(whole, name)[:size], getattr(start, name))


def check_logprobs(oracles: list[Any], payload: Payload, temperature: float) -> None:
    """Each token's log-prob is teacher forcing's under its version, on the whole prefix."""
    ids = torch.from_numpy(payload.token_ids.astype(np.int64))[:, None]
    for step in sorted(set(payload.versions.tolist())):
        likely = teacher_forced(oracles[step], PROMPT, payload.token_ids, temperature)
        made = payload.versions == step
        expected = likely.gather(1, ids)[:, 0].numpy()
        np.testing.assert_allclose(payload.logprobs[made], expected[made], atol=1e-4, rtol=0)


def test_snapshots_come_about_every_so_many_tokens_and_are_copies(
    models: dict[str, Path],
) -> None:
    async def body(engine: TransformersEngine) -> tuple[list[Any], list[Any]]:
        request = GenerateRequest("r", PROMPT, 3, Sampling(40), snapshot_every=9)
        found = []
        async for item in engine.generate(request):
            found.append(item)
            if isinstance(item, Progress):
                kept = Payload(item.ref.token_ids.copy(), item.ref.logprobs, item.ref.versions)
                found[-1] = Progress(item.request_id, item.index, item.tokens, kept)
                item.ref.token_ids[:] = 0  # the sample must not notice
        return found, await items(engine, GenerateRequest("r", PROMPT, 2, Sampling(20)))

    found, quiet = run_engine(models["llama"], body)
    for index, completion in completions(found).items():
        told = snapshots(found, index)
        assert [item.tokens for item in told] == [9, 18, 27, 36]
        assert all(item.request_id == "r" for item in told)
        for item in told:
            assert item.tokens == len(item.ref.token_ids)
            begins_with(completion.ref, item.ref)
    assert len(quiet) == 2, "none without asking"


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_a_sample_that_was_not_interrupted(
    models: dict[str, Path], kind: str
) -> None:
    sampling = Sampling(40, 0.0)

    async def first(engine: TransformersEngine) -> list[Any]:
        return await items(engine, GenerateRequest("a", PROMPT, 1, sampling, snapshot_every=7))

    whole = run_engine(models[kind], first)
    (free,) = completions(whole).values()
    for part in snapshots(whole, 0):

        async def rest(engine: TransformersEngine, ref: Payload = part.ref) -> list[Any]:
            request = GenerateRequest("b", PROMPT, 1, sampling, resume=((0, ref),))
            return await items(engine, request)

        (again,) = completions(run_engine(models[kind], rest)).values()
        begins_with(again.ref, part.ref)
        assert again.ref.token_ids.tolist() == free.ref.token_ids.tolist()
        assert (again.text, again.tokens, again.finish_reason) == (free.text, 40, "length")
        np.testing.assert_allclose(again.ref.logprobs, free.ref.logprobs, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_old_tokens_keep_their_versions_and_new_ones_follow_the_present_weights(
    models: dict[str, Path], tmp_path: Path, kind: str, temperature: float
) -> None:
    """Done, resumed and new samples in one request, more than seats, across updates."""
    path = models[kind]
    manifests = [write_version(path, tmp_path / f"{i}.safetensors", i, seed=i) for i in (1, 2, 3)]
    sampling = Sampling(60, temperature)

    async def first(engine: TransformersEngine) -> list[Any]:
        found = []
        request = GenerateRequest("a", PROMPT, 5, sampling, snapshot_every=8)
        async for item in engine.generate(request):
            found.append(item)
            if len(found) == 1:
                await engine.load(manifests[0])
        return found

    before = run_engine(path, first)
    kept = {1: snapshots(before, 1)[0].ref, 2: snapshots(before, 2)[3].ref,
            4: snapshots(before, 4)[6].ref}  # fmt: skip

    async def rest(engine: TransformersEngine) -> list[Any]:
        await engine.load(manifests[1])
        request = GenerateRequest("b", PROMPT, 7, sampling, done=frozenset({0, 3}),
                                  resume=tuple(kept.items()), snapshot_every=10)  # fmt: skip
        found = []
        async for item in engine.generate(request):
            found.append(item)
            if len(found) == 1:
                await engine.load(manifests[2])
        return found

    found = run_engine(path, rest, seats=3, replica=1, max_context=128)
    ended = completions(found)
    assert set(ended) == {1, 2, 4, 5, 6}
    oracles = [load_oracle(path), *(load_oracle(path, m) for m in manifests)]
    for index, completion in ended.items():
        payload = completion.ref
        assert completion.tokens == len(payload.token_ids) == 60
        assert (np.diff(payload.versions) >= 0).all()
        assert completion.version_min == (0 if index in kept else payload.versions[0])
        check_logprobs(oracles, payload, temperature)
        for item in snapshots(found, index):
            begins_with(payload, item.ref)
        if index in kept:
            begins_with(payload, kept[index])
            assert (payload.versions[len(kept[index].token_ids) :] > 1).all()
    steps = {step for c in ended.values() for step in c.ref.versions.tolist()}
    assert steps == {0, 1, 2, 3}, "the updates fell into the samples"


def test_resumed_siblings_have_their_prompt_computed_once(models: dict[str, Path]) -> None:
    async def body(engine: TransformersEngine) -> tuple[list[Any], list[int]]:
        prompt = np.arange(1, 31, dtype=np.int32)
        before = await items(engine, GenerateRequest("a", prompt, 4, Sampling(9), snapshot_every=8))
        sizes: list[int] = []
        cache = engine._stepper.model.cache  # type: ignore[union-attr]
        plan = cache.plan

        def count(*args: Any) -> Any:
            found = plan(*args)
            sizes.append(found.tokens)
            return found

        cache.plan = count  # type: ignore[method-assign]
        resume = tuple((i, snapshots(before, i)[0].ref) for i in range(4))
        await items(engine, GenerateRequest("b", prompt, 4, Sampling(9), resume=resume))
        return before, sizes

    _, sizes = run_engine(models["llama"], body)
    assert sizes == [30 + 4 * 8]


HELLO = ["</s>", "he", "llo", "hello", " ", *"helo"]


def hello_model(path: Path) -> Path:
    """A model whose tokenizer knows `he`, `llo` and `hello`."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    make_model(path)
    words = {word: i for i, word in enumerate(HELLO)}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    core = Tokenizer(kinds.BPE(vocab=words | {"ll": len(words)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    core.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(path)
    return path


def tokens_of(*ids: int) -> Payload:
    size = len(ids)
    return Payload(
        np.array(ids, np.int32), np.full(size, -1.0, np.float32), np.zeros(size, np.int32)
    )


def run_writing(path: Path, draws: list[int], request: GenerateRequest) -> list[Any]:
    """Runs a request on an engine that draws these ids, one after another."""

    async def main() -> list[Any]:
        engine = TransformersEngine(
            str(path), max_context=96, seats=4, load_manifest=read_version
        )  # fmt: skip
        await engine.start()
        coming = iter(draws)

        def draw(logits: Any, heat: list[float], counts: list[int]) -> Any:
            token = next(coming)
            return [token], [torch.log_softmax(logits[0].float(), -1)[token].item()]

        engine._stepper.model.draw = draw  # type: ignore[union-attr,method-assign]
        try:
            return await asyncio.wait_for(items(engine, request), 60)
        finally:
            await engine.stop()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("draws", "sampling", "wanted", "reason"),
    [
        ([2, 4], Sampling(9, stop=("hello",)), [4, 1, 2], "stop"),  # across the seam
        ([4, 0], Sampling(9, stop=("hello",)), [4, 1, 4, 0], "stop"),  # EOS as ever
        ([4, 5], Sampling(9, stop_token_ids=(5,)), [4, 1, 4, 5], "stop"),
        ([4, 4, 4, 4], Sampling(4), [4, 1, 4, 4], "length"),  # all tokens count
    ],
)
def test_a_resumed_sample_ends_where_it_would_have_ended(
    tmp_path: Path, draws: list[int], sampling: Sampling, wanted: list[int], reason: str
) -> None:
    path = hello_model(tmp_path / "m")
    request = GenerateRequest("r", np.array([5, 6]), 1, sampling, resume=((0, tokens_of(4, 1)),))
    (ended,) = run_writing(path, draws, request)
    assert ended.ref.token_ids.tolist() == wanted
    assert ended.finish_reason == reason
    assert ended.tokens == len(wanted)
    assert ended.ref.logprobs[:2].tolist() == [-1.0, -1.0]


def test_what_cannot_be_resumed_is_refused_alone_and_says_why(tmp_path: Path) -> None:
    path = hello_model(tmp_path / "m")
    good = tokens_of(4, 1)
    short = Payload(good.token_ids, good.logprobs[:1], good.versions)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"resume": ((0, tokens_of(1, EOS)),)}, r"sample 0 cannot be resumed.*2 tokens \(stop\)"),
        ({"resume": ((1, tokens_of(1, 2)),)}, r"sample 1 cannot be resumed.*\(stop\)"),
        ({"resume": ((1, tokens_of(4, 4, 4, 4, 4)),)}, r"5 tokens \(length\)"),
        ({"resume": ((0, tokens_of(4, 9999)),)}, "4..9999 are not all in the vocabulary"),
        ({"resume": ((0, short),)}, "2 tokens, 1 log-probs and 2 versions"),
        ({"resume": ((2, good),)}, r"to be resumed \[2\] must be different ones of 0..1"),
        ({"resume": ((0, good), (0, good))}, "must be different"),
        ({"resume": ((0, good),), "done": frozenset({0})}, r"done \[0\].*must be different"),
        ({"done": frozenset({-1})}, r"done \[-1\].*must be different"),
    ]

    async def body(engine: TransformersEngine) -> list[Any]:
        def request(more: dict[str, Any]) -> GenerateRequest:
            return GenerateRequest("r", PROMPT % 8, 2, Sampling(5, stop=("hello",)), **more)

        return await asyncio.gather(
            items(engine, request({"resume": ((0, good), (1, tokens_of()))})),
            items(engine, request({"done": frozenset({0, 1})})),
            *(items(engine, request(more)) for more, _ in cases),
            return_exceptions=True,
        )

    async def main() -> list[Any]:
        engine = TransformersEngine(str(path), max_context=96, seats=4, load_manifest=read_version)
        await engine.start()
        try:
            return await asyncio.wait_for(body(engine), 60)
        finally:
            await engine.stop()

    both, nothing, *refused = asyncio.run(main())
    assert set(completions(both)) == {0, 1}, "no tokens yet is a sample that begins"
    begins_with(completions(both)[0].ref, good)
    assert nothing == []
    for (_, said), error in zip(cases, refused, strict=True):
        assert isinstance(error, RequestRefused), error
        with pytest.raises(RequestRefused, match=said):
            raise error


def test_what_stop_gives_up_can_be_resumed_seated_or_not(models: dict[str, Path]) -> None:
    """The tokens of running samples, and those that a waiting sample came with."""
    path = models["llama"]
    begun = {i: tokens_of(*range(10 + i, 15 + i)) for i in range(4)}

    async def main() -> list[Any]:
        engine = TransformersEngine(str(path), max_context=128, seats=2, load_manifest=read_version)
        await engine.start()
        never_end(engine)
        stepper = engine._stepper
        assert stepper is not None
        real = stepper.step

        def step() -> None:
            time.sleep(0.005)
            real()

        stepper.step = step  # type: ignore[method-assign]
        request = GenerateRequest("r", PROMPT, 5, Sampling(120), resume=tuple(begun.items()))
        task = asyncio.ensure_future(items(engine, request))
        for _ in range(4000):
            if stepper.rows and len(stepper.rows[0].ids) >= 12:
                break
            await asyncio.sleep(0.005)
        await engine.stop()
        return await task

    ended = completions(asyncio.run(main()))
    assert {c.finish_reason for c in ended.values()} == {"aborted"}
    assert sorted(ended) == [0, 1, 2, 3, 4]
    for index, payload in begun.items():
        begins_with(ended[index].ref, payload)
        assert ended[index].tokens == len(ended[index].ref.token_ids)
    assert ended[0].tokens >= 12
    assert (ended[2].tokens, ended[3].tokens, ended[4].tokens) == (5, 5, 0)

    async def rest(engine: TransformersEngine) -> list[Any]:
        resume = tuple((i, ended[i].ref) for i in range(5))
        return await items(engine, GenerateRequest("r", PROMPT, 5, Sampling(60), resume=resume))

    again = completions(run_engine(path, rest))
    assert {c.tokens for c in again.values()} == {60}
    for index in range(4):
        begins_with(again[index].ref, ended[index].ref)


def test_closing_the_iterator_frees_the_seats_of_resumed_samples(models: dict[str, Path]) -> None:
    async def body(engine: TransformersEngine) -> Any:
        resume = tuple((i, tokens_of(1, 2, 3)) for i in range(12))
        request = GenerateRequest("r", PROMPT, 20, Sampling(90), resume=resume)
        stream = engine.generate(request)
        waiter = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.02)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        await stream.aclose()
        for _ in range(200):
            health = await engine.health()
            if health.running == health.waiting == 0:
                break
            await asyncio.sleep(0.01)
        return health.running, health.waiting

    assert run_engine(models["llama"], body) == (0, 0)
