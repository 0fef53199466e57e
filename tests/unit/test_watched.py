"""`Sampling.watch`: log-probs of named tokens at the first position, as a plain pass has them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine_models import KINDS, load_oracle, make_model, read_version, teacher_forced

from offbeat.errors import RequestRefused
from offbeat.records import Completion, GenerateRequest, Payload, Sampling, Structure
from offbeat.rollout.refusals import MOST_WATCHED
from offbeat.rollout.transformers_engine import TransformersEngine
from offbeat.rollout.vllm_sample import samples_of

WATCH = (5, 0, 256, 33, 7)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, kind) for kind in KINDS}


def run_engine(path: Path, body: Callable[[TransformersEngine], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        engine = TransformersEngine(str(path), max_context=96, seats=8, load_manifest=read_version)
        await engine.start()
        try:
            return await asyncio.wait_for(body(engine), 60)
        finally:
            await engine.stop()

    return asyncio.run(main())


async def collect(engine: TransformersEngine, request: GenerateRequest) -> list[Completion]:
    found = [item async for item in engine.generate(request)]
    return [item for item in found if isinstance(item, Completion)]


@pytest.mark.parametrize("kind", KINDS)
def test_watched_tokens_are_those_of_a_plain_pass_at_temperature_one(
    models: dict[str, Path], kind: str
) -> None:
    """Beside others, at every temperature, with more samples than seats."""
    random = np.random.default_rng(1)
    head = random.integers(1, 257, 12)
    prompts = [np.append(head, random.integers(1, 257, 1 + 4 * (i % 3))) for i in range(9)]
    heat = [0.0, 1.0, 0.6]

    async def body(engine: TransformersEngine) -> list[list[Completion]]:
        async def one(i: int) -> list[Completion]:
            await asyncio.sleep(0.003 * (i % 4))
            watch = WATCH[: i % 4 + 1] if i % 4 else ()
            sampling = Sampling(1 + 3 * (i % 3), heat[i % 3], watch=watch)
            request = GenerateRequest(
                str(i), prompts[i].astype(np.int32), 1 + 5 * (i % 3), sampling
            )
            return await collect(engine, request)

        return await asyncio.gather(*(one(i) for i in range(len(prompts))))

    oracle = load_oracle(models[kind])
    for i, found in enumerate(run_engine(models[kind], body)):
        likely = teacher_forced(oracle, prompts[i], np.array([1]), 1.0)[0]
        watch = WATCH[: i % 4 + 1] if i % 4 else ()
        assert len(found) == 1 + 5 * (i % 3)
        for completion in found:
            assert len(completion.watched) == len(watch)
            np.testing.assert_allclose(completion.watched, likely[list(watch)], atol=1e-4)


def test_a_resumed_sample_begins_anew(models: dict[str, Path]) -> None:
    """What is watched belongs to the first token, which a sample that goes on does not draw."""
    prompt = np.array([7, 30, 41], np.int32)
    old = Payload(np.array([9, 9], np.int32), np.zeros(2, np.float32), np.full(2, 0, np.int32))

    async def body(engine: TransformersEngine) -> tuple[list[Completion], list[Completion]]:
        sampling = Sampling(5, 0.0, watch=WATCH)
        whole = GenerateRequest("a", prompt, 1, sampling, snapshot_every=2)
        again = GenerateRequest("b", prompt, 1, sampling, resume=((0, old),))
        return await collect(engine, whole), await collect(engine, again)

    (whole,), (again,) = run_engine(models["llama"], body)
    assert whole.ref.token_ids.tolist() == again.ref.token_ids.tolist() != [9, 9]
    np.testing.assert_allclose(whole.watched, again.watched, atol=1e-6)
    assert len(whole.watched) == len(WATCH)
    for sampling in (Sampling(5, watch=WATCH), Sampling(5, structure=Structure(regex="a"))):
        request = GenerateRequest("c", prompt, 1, sampling, resume=((0, old),))
        (sample,) = samples_of(request, None, lambda ids: "", None)  # type: ignore[arg-type]
        assert sample.ids == []


def test_what_cannot_be_watched_is_refused(models: dict[str, Path]) -> None:
    prompt = np.array([7], np.int32)

    async def body(engine: TransformersEngine) -> None:
        for watch, said in (
            (tuple(range(MOST_WATCHED + 1)), f"129 tokens to watch are more than {MOST_WATCHED}"),
            ((3, 10_000), "tokens to watch 3..10000 are not all in the vocabulary"),
            ((-1, 3), "tokens to watch -1..3 are not all in the vocabulary"),
        ):
            with pytest.raises(RequestRefused, match=said):
                await collect(engine, GenerateRequest("r", prompt, 1, Sampling(1, watch=watch)))
        (found,) = await collect(
            engine, GenerateRequest("r", prompt, 1, Sampling(1, watch=tuple(range(MOST_WATCHED))))
        )
        assert len(found.watched) == MOST_WATCHED

    run_engine(models["llama"], body)
