"""Weights swapped under load: nothing is lost, and every log-prob is its version's."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine_models import (
    check_completion,
    load_oracle,
    make_model,
    read_version,
    teacher_forced,
    write_version,
)

from offbeat.records import Completion, GenerateRequest, Manifest, PolicyVersion, Sampling
from offbeat.rollout.transformers_engine import TransformersEngine

VERSIONS = 4
TEMPERATURES = (1.0, 0.7, 0.0)


async def _collect(
    engine: TransformersEngine, name: str, prompt: Any, n: int, sampling: Sampling
) -> list[Completion]:
    request = GenerateRequest(name, np.array(prompt, np.int32), n, sampling)
    return [completion async for completion in engine.generate(request)]


def _prompts() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    head = random.integers(1, 257, 15)
    return [
        np.concatenate([head[: 15 * (i % 2)], random.integers(1, 257, 2 + i % 9)])
        for i in range(28)
    ]


async def _swap_under_load(
    path: Path, manifests: list[Manifest], on_update: Any
) -> tuple[list[list[Completion]], list[PolicyVersion], list[Any]]:
    engines = [
        TransformersEngine(
            str(path),
            replica=i,
            seats=12,
            max_context=128,
            on_update=on_update,
            load_manifest=read_version,
        )
        for i in range(2)
    ]
    await asyncio.gather(*(engine.start() for engine in engines))
    requests = [
        asyncio.ensure_future(
            _collect(engines[i % 2], str(i), prompt, 1 + i % 4, Sampling(90, TEMPERATURES[i % 3]))
        )
        for i, prompt in enumerate(_prompts())
    ]
    versions = []
    for manifest in manifests:
        await asyncio.sleep(0.05)
        versions += await asyncio.gather(*(engine.load(manifest) for engine in engines))
        assert [(await engine.health()).version for engine in engines] == versions[-2:]
    found = await asyncio.wait_for(asyncio.gather(*requests), 120)
    spans = [span for engine in engines for span in await engine.drain_spans()]
    await asyncio.gather(*(engine.stop() for engine in engines))
    return found, versions, spans


def _publish(path: Path, root: Path) -> list[Manifest]:
    return [
        write_version(path, root / f"{step}.safetensors", step, seed=step)
        for step in range(1, VERSIONS)
    ]


def _nothing_lost(results: list[list[Completion]]) -> None:
    for i, found in enumerate(results):
        assert sorted(completion.index for completion in found) == list(range(1 + i % 4))
        for completion in found:
            versions = completion.ref.versions
            assert completion.tokens == len(versions) == len(completion.ref.logprobs)
            assert (np.diff(versions) >= 0).all()
            assert (completion.version_min, completion.version_max) == (versions[0], versions[-1])
            assert completion.finish_reason in ("stop", "length")
    mixed = [c for found in results for c in found if c.version_min < c.version_max]
    assert len(mixed) > 5, "no update fell into a running sample: the test shows nothing"


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_recompute_gives_each_token_its_versions_logprob(tmp_path: Path, kind: str) -> None:
    path = make_model(tmp_path / "model", kind, eos_token_id=None)
    manifests = _publish(path, tmp_path)
    results, versions, spans = asyncio.run(_swap_under_load(path, manifests, "recompute"))
    assert versions == [m.version for m in manifests for _ in range(2)]
    _nothing_lost(results)
    oracles = [load_oracle(path), *(load_oracle(path, m) for m in manifests)]
    for i, (prompt, found) in enumerate(zip(_prompts(), results, strict=True)):
        for completion in found:
            payload = completion.ref
            ids = torch.from_numpy(payload.token_ids.astype(np.int64))[:, None]
            for step in set(payload.versions.tolist()):
                likely = teacher_forced(
                    oracles[step], prompt, payload.token_ids, TEMPERATURES[i % 3]
                )
                made = payload.versions == step
                expected = likely.gather(1, ids)[:, 0].numpy()
                np.testing.assert_allclose(payload.logprobs[made], expected[made], atol=1e-4)
    assert {span.kind for span in spans} == {"prefill", "decode", "load", "pause"}


def test_keep_kv_loses_nothing_and_records_versions(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", "llama-tied")
    manifests = _publish(path, tmp_path)
    results, versions, _ = asyncio.run(_swap_under_load(path, manifests, "keep_kv"))
    assert versions == [m.version for m in manifests for _ in range(2)]
    _nothing_lost(results)


@pytest.mark.parametrize("on_update", ["recompute", "keep_kv"])
def test_a_repeated_prompt_is_computed_anew(tmp_path: Path, on_update: Any) -> None:
    """W6, with samples that still wait for a seat when the update comes, too."""
    path = make_model(tmp_path / "model", "llama")
    manifest = write_version(path, tmp_path / "1.safetensors", 1, seed=1)
    prompt = np.arange(1, 30)

    async def main() -> tuple[list[Completion], list[Completion], list[Completion]]:
        engine = TransformersEngine(
            str(path), seats=4, max_context=128, on_update=on_update, load_manifest=read_version
        )
        await engine.start()
        before = await _collect(engine, "a", prompt, 2, Sampling(8, 0.0))
        across = asyncio.ensure_future(_collect(engine, "b", prompt, 12, Sampling(90)))
        await asyncio.sleep(0.03)
        await engine.load(manifest)
        after = await _collect(engine, "c", prompt, 2, Sampling(8, 0.0))
        waited = await across
        await engine.stop()
        return before, waited, after

    before, waited, after = asyncio.run(main())
    old, new = load_oracle(path), load_oracle(path, manifest)
    for completion in before:
        check_completion(old, prompt, completion, 0.0)
    for completion in after:
        check_completion(new, prompt, completion, 0.0)
    late = [completion for completion in waited if completion.version_min == 1]
    assert late, "no sample started after the update: the test shows nothing"
    for completion in late:
        check_completion(new, prompt, completion, 1.0)
