"""vLLM behind the engine protocol, against a plain forward pass and the engine on transformers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine_models import check_completion, load_oracle, read_version, teacher_forced
from vllm_models import Held, collect, everything, hold, make_vllm_model, publish

from offbeat.errors import RequestRefused, RunFailed
from offbeat.records import (
    Completion,
    GenerateRequest,
    Payload,
    PolicyVersion,
    Progress,
    Sampling,
    Structure,
)
from offbeat.rollout.transformers_engine import TransformersEngine
from offbeat.rollout.vllm_engine import VllmEngine

pytestmark = pytest.mark.vllm
SETTINGS: dict[str, Any] = {"seats": 8, "max_context": 128, "seed": 3}
FIRST: list[list[int]] = []  # what the first engine drew first


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("vllm") / "model", "qwen3-tied")


@pytest.fixture(scope="module")
def held(model: Path) -> Iterator[Held]:
    with hold(VllmEngine(str(model), **SETTINGS)) as (found,):
        first = found.run(collect(found.engine, "first", [5, 6, 7], 1, Sampling(30)))
        FIRST.append(first[0].ref.token_ids.tolist())
        yield found


@pytest.fixture(scope="module")
def oracle(model: Path) -> Any:
    return load_oracle(model)


def prompts() -> list[np.ndarray]:
    """Mixed lengths; some share a head of several KV blocks."""
    random = np.random.default_rng(1)
    head = random.integers(1, 257, 70)
    return [
        np.concatenate([head[: 70 * (i % 2)], random.integers(1, 257, 1 + 3 * i)]) for i in range(6)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_tokens_and_logprobs_equal_a_plain_pass(
    held: Held, oracle: Any, temperature: float
) -> None:
    """n > seats, requests that join and leave, and greedy ones in the same batches."""
    heat = [temperature if i % 3 else 0.0 for i in range(6)]

    async def main() -> list[list[Completion]]:
        async def one(i: int, prompt: np.ndarray) -> list[Completion]:
            await asyncio.sleep(0.01 * (i % 3))
            sampling = Sampling(6 + 5 * i, heat[i])
            return await collect(held.engine, str(i), prompt, 1 + 2 * (i % 6), sampling)

        return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts())))

    results = held.run(main())
    for i, (prompt, found) in enumerate(zip(prompts(), results, strict=True)):
        assert [c.index for c in found] == list(range(1 + 2 * (i % 6)))
        for completion in found:
            check_completion(oracle, prompt, completion, heat[i])
            ended = completion.ref.token_ids[-1] == 0
            assert completion.finish_reason == ("stop" if ended else "length")
            assert ended or completion.tokens == 6 + 5 * i
            assert (completion.version_min, completion.version_max) == (0, 0)
    # The generation_config's top_k = 3 would leave no token below rank 3.
    ranks = [
        int((likely > likely[token]).sum())
        for prompt, found in zip(prompts(), results, strict=True)
        for completion in found
        for likely, token in zip(
            teacher_forced(oracle, prompt, completion.ref.token_ids),
            completion.ref.token_ids,
            strict=True,
        )
    ]
    assert max(ranks) > 3 or temperature == 0


def test_greedy_equals_the_engine_on_transformers(held: Held, model: Path) -> None:
    """Tokens, text, log-probs, ends; with stop strings, which both find at the same token."""

    async def ask(engine: Any, stop: tuple[str, ...]) -> list[Completion]:
        found = []
        for i, prompt in enumerate(prompts()):
            found += await collect(engine, str(i), prompt, 1, Sampling(24, 0.0, stop))
        return found

    async def main() -> tuple[Any, Any, Any, Any]:
        other = TransformersEngine(str(model), load_manifest=read_version, **SETTINGS)
        await other.start()
        plain, theirs = await ask(held.engine, ()), await ask(other, ())
        stops = tuple(c.text[5:7] for c in plain if "\ufffd" not in c.text[5:7] and c.text[5:7])
        assert stops
        found = plain, theirs, await ask(held.engine, stops), await ask(other, stops)
        await other.stop()
        return found

    plain, theirs, stopped, stopped_theirs = held.run(main())
    for ours, other in zip([*plain, *stopped], [*theirs, *stopped_theirs], strict=True):
        assert ours.ref.token_ids.tolist() == other.ref.token_ids.tolist()
        np.testing.assert_allclose(ours.ref.logprobs, other.ref.logprobs, atol=1e-4)
        assert (ours.text, ours.finish_reason) == (other.text, other.finish_reason)
    assert sum(a.tokens < b.tokens for a, b in zip(stopped, plain, strict=True)) >= 2


def test_a_groups_prompt_is_computed_once_and_samples_come_as_they_end(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = np.arange(1, 71)
    computed: list[int] = []
    meter = held.engine._meter
    step = meter.step

    def count(generated: int, prefilled: int) -> None:
        computed.append(prefilled)
        step(generated, prefilled)

    monkeypatch.setattr(meter, "step", count)

    async def main() -> tuple[int, int]:
        running = []
        request = GenerateRequest("g", prompt.astype(np.int32), 16, Sampling(50))
        async for _ in held.engine.generate(request):
            health = await held.engine.health()
            running.append(health.running + health.waiting)
        return running[0], running[-1]

    first, last = held.run(main())
    assert first > last == 0, "all samples came together"
    # Two blocks of 32 are shared; each sample computes the 6 tokens after them.
    assert 70 <= sum(computed) <= 70 + 15 * 6


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        (range(1, 120), Sampling(20), "119 prompt tokens . 20 max_tokens = 139 exceed .* of 128"),
        ([1, 2, 9999], Sampling(4), "not all in the vocabulary of 260"),
        ([1], Sampling(4, float("nan")), "temperature"),
        ([1], Sampling(4, stop=("",)), "stop string is empty"),
        ([1], Sampling(0), "0 max_tokens"),
        ([1], Sampling(4, structure=Structure(regex="(")), "r"),
    ],
)
def test_a_refusal_touches_only_its_request(
    held: Held, oracle: Any, prompt: Any, sampling: Sampling, says: str
) -> None:
    async def main() -> list[Completion]:
        good = asyncio.ensure_future(collect(held.engine, "good", [1, 2, 3], 2, Sampling(40)))
        await asyncio.sleep(0.02)
        with pytest.raises(RequestRefused, match=says):
            await collect(held.engine, "bad", prompt, 2, sampling)
        return await good

    for completion in held.run(main()):
        check_completion(oracle, [1, 2, 3], completion, 1.0)


def test_closing_the_iterator_cancels_what_runs(held: Held) -> None:
    async def main() -> None:
        request = GenerateRequest("c", np.arange(1, 5, dtype=np.int32), 12, Sampling(110))
        items = held.engine.generate(request)
        await anext(items)
        assert (await held.engine.health()).running > 0
        await items.aclose()
        health = await held.engine.health()
        assert (health.running, health.waiting) == (0, 0)
        llm = held.engine._started.llm  # type: ignore[union-attr]
        assert llm.output_processor.get_num_unfinished_requests() == 0
        await collect(held.engine, "next", [1, 2], 1, Sampling(4))

    held.run(main())


@pytest.mark.parametrize(
    ("structure", "allowed"),
    [
        (Structure(choices=("yes", "no")), {"yes", "no"}),
        (Structure(regex="[3-5]x[12]"), {f"{a}x{b}" for a in "345" for b in "12"}),
        (Structure(json_schema='{"enum": [7, 8]}'), {"7", "8"}),
    ],
)
def test_structures_are_enforced(held: Held, structure: Structure, allowed: set[str]) -> None:
    sampling = Sampling(12, 1.0, structure=structure)
    for completion in held.run(collect(held.engine, "s", [9, 8], 6, sampling)):
        assert completion.text in allowed
        assert completion.finish_reason == "stop"


def test_a_sample_goes_on_from_its_tokens(held: Held, oracle: Any) -> None:
    """Resumed with what it had, whole at the end; done ones are not made again."""
    prompt = [11, 12, 13]

    async def main() -> tuple[list[Completion], list[Completion]]:
        whole = await collect(held.engine, "w", prompt, 1, Sampling(30, 0.0))
        old = whole[0].ref
        part = Payload(old.token_ids[:10], old.logprobs[:10], np.full(10, -7, np.int32))
        ended = Payload(old.token_ids[:3], old.logprobs[:3], old.versions[:3])
        with pytest.raises(RequestRefused, match="has ended"):
            await collect(held.engine, "e", prompt, 1, Sampling(3, 0.0), resume=((0, ended),))
        again = await collect(
            held.engine,
            "r",
            prompt,
            4,
            Sampling(30, 0.0),
            done=frozenset({1}),
            resume=((0, part), (2, part)),
        )
        return whole, again

    (whole,), group = held.run(main())
    assert [c.index for c in group] == [0, 2, 3]
    for completion in group:
        check_completion(oracle, prompt, completion, 0.0)
        assert completion.ref.token_ids.tolist() == whole.ref.token_ids.tolist()
        assert completion.text == whole.text
    for completion in group[:2]:
        assert completion.ref.versions.tolist() == [-7] * 10 + [0] * (whole.tokens - 10)
        assert completion.ref.logprobs[:10].tolist() == whole.ref.logprobs[:10].tolist()


def test_a_stop_string_across_the_seam_is_found(held: Held) -> None:
    """It begins in a resumed sample's old tokens and ends in its first new one."""

    async def main() -> None:
        for start in range(20, 60):
            (whole,) = await collect(held.engine, "w", [start], 1, Sampling(20, 0.0))
            ids = whole.ref.token_ids
            decode = held.engine._started.decode  # type: ignore[union-attr]
            for cut in range(3, len(ids)):
                stop = decode(ids[cut - 1 : cut + 1])
                first = whole.text.find(stop)
                if "\ufffd" in stop or first < 0 or first != len(decode(ids[: cut - 1])):
                    continue
                part = Payload(*(values[:cut] for values in _arrays(whole.ref)))
                sampling = Sampling(20, 0.0, (stop,))
                (straight,) = await collect(held.engine, "s", [start], 1, sampling)
                (resumed,) = await collect(
                    held.engine, "r", [start], 1, sampling, resume=((0, part),)
                )
                assert straight.finish_reason == resumed.finish_reason == "stop"
                assert straight.text == resumed.text
                assert resumed.text.endswith(stop)
                assert resumed.tokens == straight.tokens == cut + 1
                return
        raise AssertionError("no greedy sample had a string across two tokens")

    held.run(main())


def test_progress_is_a_true_prefix_also_across_an_update(
    held: Held, model: Path, tmp_path: Path
) -> None:
    """Tied weights swapped under load: versions of progress and of the end agree, and every
    log-prob is its version's."""
    oracles = [load_oracle(model)]
    manifests = [publish(model, tmp_path, step) for step in (1, 2, 3)]
    oracles += [load_oracle(model, manifest) for manifest in manifests]
    back = publish_back(model, tmp_path)

    async def main() -> list[list[Any]]:
        groups = [
            asyncio.ensure_future(
                everything(
                    held.engine, str(i), prompt[-20:], 4, Sampling(100, heat), snapshot_every=7
                )
            )
            for i, (prompt, heat) in enumerate(zip(prompts(), (1.0, 0.7, 0.0) * 2, strict=True))
        ]
        for manifest in manifests:
            await asyncio.sleep(0.15)
            assert await held.engine.load(manifest) == manifest.version
            assert (await held.engine.health()).version == manifest.version
        found = await asyncio.gather(*groups)
        await held.engine.load(back)
        return found

    mixed = tellings = 0
    for i, found in enumerate(held.run(main())):
        prompt, heat = prompts()[i][-20:], (1.0, 0.7, 0.0)[i % 3]
        whole = {c.index: c for c in found if isinstance(c, Completion)}
        assert sorted(whole) == [0, 1, 2, 3]
        for completion in whole.values():
            check_versions(oracles, prompt, completion, heat)
            mixed += completion.version_min < completion.version_max
        told = [p for p in found if isinstance(p, Progress)]
        tellings += len(told)
        for progress in told:
            assert progress.tokens == len(progress.ref.token_ids) >= 7
            ends = _arrays(whole[progress.index].ref)
            for part, end in zip(_arrays(progress.ref), ends, strict=True):
                assert part.tolist() == end[: progress.tokens].tolist()
    assert tellings > 40
    assert mixed > 5, "no update fell into a running sample: the test shows nothing"


def test_a_version_that_cannot_be_read_leaves_the_engine_as_it_was(
    held: Held, model: Path, oracle: Any, tmp_path: Path
) -> None:
    good = publish(model, tmp_path, 50)
    name = next(iter(good.tensors))
    entry = good.tensors[name]
    corrupt = replace(good, tensors=good.tensors | {name: replace(entry, checksum=1)})
    shape = replace(good, tensors=good.tensors | {name: replace(entry, shape=(1, 2))})
    lacks = replace(good, tensors={k: v for k, v in good.tensors.items() if k != name})

    async def main() -> list[Completion]:
        before = (await held.engine.health()).version
        for manifest, says in ((corrupt, "corrupt"), (shape, "shape"), (lacks, "lacks")):
            with pytest.raises(RunFailed, match=says):
                await held.engine.load(manifest)
        assert (await held.engine.health()).version == before
        return await collect(held.engine, "a", [3, 4], 2, Sampling(10))

    for completion in held.run(main()):
        check_completion(oracle, [3, 4], completion, 1.0)


def test_a_killed_core_is_told_at_once_and_its_samples_go_on_elsewhere(
    held: Held, model: Path, oracle: Any
) -> None:
    """The last of the module: it ends the engine. The next one of the same seed repeats it."""
    prompt = np.arange(1, 9)

    async def kill() -> tuple[list[Progress], float]:
        told: list[Progress] = []
        llm = held.engine._started.llm  # type: ignore[union-attr]
        (core,) = llm.engine_core.resources.engine_manager.processes
        killed = 0.0
        request = GenerateRequest("k", prompt.astype(np.int32), 3, Sampling(110), snapshot_every=5)

        async def watch() -> None:
            nonlocal killed
            async for item in held.engine.generate(request):
                if isinstance(item, Progress):
                    told.append(item)
                if len(told) == 6 and not killed:
                    os.kill(core.pid, signal.SIGKILL)
                    killed = time.monotonic()

        with pytest.raises(RunFailed, match="died"):
            await watch()
        took = time.monotonic() - killed
        with pytest.raises(RunFailed, match="died"):
            await held.engine.health()
        with pytest.raises(RunFailed, match="died"):
            await collect(held.engine, "n", prompt, 1, Sampling(2))
        with pytest.raises(RunFailed, match="died"):
            await held.engine.load(publish(model, model.parent, 60))
        return told, took

    told, took = held.run(kill())
    assert took < 5
    latest = {p.index: p.ref for p in told}
    with hold(VllmEngine(str(model), **SETTINGS, version=PolicyVersion(0, 9))) as (after,):
        (first,) = after.run(collect(after.engine, "first", [5, 6, 7], 1, Sampling(30)))
        assert first.ref.token_ids.tolist() == FIRST[0]
        found = after.run(
            collect(after.engine, "k", prompt, 3, Sampling(110), resume=tuple(latest.items()))
        )
    for completion in found:
        old = latest[completion.index]
        size = len(old.token_ids)
        check_completion(oracle, prompt, completion, 1.0)
        assert completion.ref.token_ids[:size].tolist() == old.token_ids.tolist()
        versions = [*old.versions.tolist(), *[9] * (completion.tokens - size)]
        assert completion.ref.versions.tolist() == versions


def publish_back(model: Path, root: Path) -> Any:
    """The model's own weights as version 4: later tests compare with them again."""
    from safetensors.torch import load_file, save_file

    manifest = publish(model, root, 4)
    noisy = load_file(manifest.path)
    plain = {name: value for name, value in load_oracle(model).named_parameters()}
    save_file({name: plain[name].detach().clone() for name in noisy}, manifest.path)
    import zlib

    entries = {
        name: replace(entry, checksum=zlib.crc32(plain[name].detach().numpy().tobytes()))
        for name, entry in manifest.tensors.items()
    }
    return replace(manifest, tensors=entries)


def check_versions(
    oracles: list[Any], prompt: Any, completion: Completion, temperature: float
) -> None:
    """Each token's log-prob is the one that the weights of its version give it."""
    payload = completion.ref
    assert (np.diff(payload.versions) >= 0).all()
    ids = torch.from_numpy(payload.token_ids.astype(np.int64))[:, None]
    for step in set(payload.versions.tolist()):
        likely = teacher_forced(oracles[step], prompt, payload.token_ids, temperature)
        made = payload.versions == step
        expected = likely.gather(1, ids)[:, 0].numpy()
        np.testing.assert_allclose(payload.logprobs[made], expected[made], atol=1e-4)


def _arrays(payload: Payload) -> tuple[Any, Any, Any]:
    return payload.token_ids, payload.logprobs, payload.versions
