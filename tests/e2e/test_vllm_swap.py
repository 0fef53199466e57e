"""vLLM's weights swapped under load, replica by replica: nothing is lost, every log-prob is its
version's, and one replica emits while the other loads."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine_models import check_completion, load_oracle, teacher_forced
from transformers import AutoModelForCausalLM
from vllm_models import Held, collect, hold, make_vllm_model, publish

from offbeat.records import Completion, Manifest, Sampling
from offbeat.rollout.vllm_engine import VllmEngine
from offbeat.weights.transport import FolderTransport

pytestmark = pytest.mark.vllm
TEMPERATURES = (1.0, 0.7, 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, with biases."""
    return make_vllm_model(tmp_path_factory.mktemp("swap") / "model", "qwen2", eos_token_id=None)


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[list[Held]]:
    engines = [VllmEngine(str(model), replica=i, seats=12, max_context=128) for i in range(2)]
    with hold(*engines) as found:
        yield found


def prompts() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    head = random.integers(1, 257, 35)
    return [
        np.concatenate([head[: 35 * (i % 2)], random.integers(1, 257, 2 + i % 9)])
        for i in range(20)
    ]


def published(model: Path, root: Path, steps: range) -> tuple[list[Manifest], list[Any]]:
    """Versions through the real transport, and the model with each of them."""
    transport = FolderTransport(root, "swap")
    manifests, oracles = [], []
    for step in steps:
        noisy = publish(model, root, step)
        oracle = load_oracle(model, noisy)
        tensors = {name: value.detach() for name, value in oracle.named_parameters()}
        manifests.append(transport.publish(tensors, noisy.tied, noisy.version))
        oracles.append(oracle)
    return manifests, oracles


def check_group(
    oracles: dict[int, Any], prompt: Any, found: list[Completion], n: int, temperature: float
) -> int:
    """How many samples have tokens of several versions; all are whole and true."""
    assert [c.index for c in found] == list(range(n))
    mixed = 0
    for completion in found:
        payload, versions = completion.ref, completion.ref.versions
        assert completion.tokens == len(versions) == len(payload.logprobs)
        assert completion.finish_reason in ("stop", "length")
        assert (np.diff(versions) >= 0).all()
        assert (completion.version_min, completion.version_max) == (versions[0], versions[-1])
        mixed += completion.version_min < completion.version_max
        ids = torch.from_numpy(payload.token_ids.astype(np.int64))[:, None]
        for step in set(versions.tolist()):
            likely = teacher_forced(oracles[step], prompt, payload.token_ids, temperature)
            made = versions == step
            expected = likely.gather(1, ids)[:, 0].numpy()
            np.testing.assert_allclose(payload.logprobs[made], expected[made], atol=1e-4)
    return mixed


def test_replicas_draw_differently(pair: list[Held]) -> None:
    """One configured seed, two replicas: what they drew first. (That the same replica repeats
    itself is in test_vllm_engine.py.)"""
    first = [
        held.run(collect(held.engine, "r", [1, 2, 3], 1, Sampling(30)))[0].ref.token_ids.tolist()
        for held in pair
    ]
    assert first[0] != first[1]


def test_a_rolling_update_loses_nothing_and_never_stops_all(
    pair: list[Held], model: Path, tmp_path: Path
) -> None:
    manifests, oracles = published(model, tmp_path, range(1, 4))
    engines = [held.engine for held in pair]

    async def main() -> tuple[list[list[Completion]], list[Any]]:
        for engine in engines:
            await engine.drain_spans()
        groups = [
            asyncio.ensure_future(
                collect(
                    engines[i % 2], str(i), prompt, 1 + i % 4, Sampling(80, TEMPERATURES[i % 3])
                )
            )
            for i, prompt in enumerate(prompts())
        ]
        for manifest in manifests:
            await asyncio.sleep(0.1)
            for engine in engines:
                assert await engine.load(manifest) == manifest.version
                assert (await engine.health()).version == manifest.version
        found = await asyncio.gather(*groups)
        return found, [await engine.drain_spans() for engine in engines]

    results, spans = pair[0].run(main())
    versions = dict(enumerate([load_oracle(model), *oracles]))
    mixed = sum(
        check_group(versions, prompt, found, 1 + i % 4, TEMPERATURES[i % 3])
        for i, (prompt, found) in enumerate(zip(prompts(), results, strict=True))
    )
    assert mixed > 5, "no update fell into a running sample: the test shows nothing"
    for mine, other in (spans, spans[::-1]):
        assert {span.kind for span in mine} == {"prefill", "decode", "load", "pause"}
        pauses = [span for span in mine if span.kind == "pause"]
        assert [span.version for span in pauses] == [1, 2, 3]
        emitting = [s for s in other if s.kind in ("decode", "prefill") and s.tokens]
        during = [
            any(s.start < pause.end and s.end > pause.start for s in emitting) for pause in pauses
        ]
        assert sum(during) >= 2, "the other replica stood still, too"
        assert all(span.end > span.start for span in mine)
        assert sum(span.cpu for span in mine if span.kind == "decode") > 0
    for replica, part in enumerate(spans):
        made = sum(c.tokens for found in results[replica::2] for c in found)
        assert sum(span.tokens for span in part) == made
    lengths = [s.end - s.start for part in spans for s in part if s.kind == "pause"]
    # What else runs on the machine lengthens pauses: the shortest, and the CPU time, say it.
    assert min(lengths) < 0.2
    work = [span.cpu for part in spans for span in part if span.kind == "load"]
    assert statistics.median(work) < 0.2


def test_a_repeated_prompt_is_computed_anew(pair: list[Held], model: Path, tmp_path: Path) -> None:
    """W6: a prompt of several full blocks, asked again after an update."""
    (manifest,), (new,) = published(model, tmp_path, range(5, 6))
    prompt = np.arange(1, 80)
    held = pair[0]

    async def main() -> list[Completion]:
        await collect(held.engine, "a", prompt, 2, Sampling(8, 0.0))
        await held.engine.load(manifest)
        return await collect(held.engine, "b", prompt, 2, Sampling(8, 0.0))

    for completion in held.run(main()):
        assert completion.version_min == 5
        check_completion(new, prompt, completion, 0.0)


@pytest.mark.long
def test_keep_kv_keeps_running_samples_blocks_and_no_others(tmp_path: Path) -> None:
    """Tied weights. Samples that began before the update go on with their old keys and values;
    those that still waited, and later ones of the same prompt, are computed by the new weights."""
    model = make_vllm_model(tmp_path / "model", "llama-tied", eos_token_id=None)
    (manifest,), (new,) = published(model, tmp_path, range(1, 2))
    old = AutoModelForCausalLM.from_pretrained(model)
    prompt = np.arange(1, 70)
    engine = VllmEngine(str(model), seats=4, max_context=128, on_update="keep_kv")

    async def main() -> tuple[list[Completion], list[Completion], list[Completion]]:
        before = await collect(engine, "a", prompt, 2, Sampling(8, 0.0))
        across = asyncio.ensure_future(collect(engine, "b", prompt, 12, Sampling(50)))
        await asyncio.sleep(0.1)
        await engine.load(manifest)
        after = await collect(engine, "c", prompt, 2, Sampling(8, 0.0))
        return before, await across, after

    with hold(engine) as (held,):
        before, across, after = held.run(main())
    for completion in before:
        check_completion(old, prompt, completion, 0.0)
    for completion in after:
        check_completion(new, prompt, completion, 0.0)
    assert [c.index for c in across] == list(range(12))
    assert all(c.tokens == 50 or c.ref.token_ids[-1] == 0 for c in across)
    late = [c for c in across if c.version_min == 1]
    kept = [c for c in across if c.version_min == 0]
    assert late, "no sample started after the update: the test shows nothing"
    assert any(c.version_max == 1 for c in kept), "none ran across it: the test shows nothing"
    for completion in late:
        check_completion(new, prompt, completion, 1.0)
