"""Answers by the trainer's own weights: right, and as if nobody had asked."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit import trainer_cases

from offbeat.errors import DeadlinePassed
from offbeat.records import Completion, GenerateRequest, PolicyVersion, Sampling
from offbeat.rollout import trainer_engine
from offbeat.rollout.kv import SeatCache
from offbeat.rollout.stepper import jobs_of
from offbeat.rollout.transformers_engine import TransformersEngine
from offbeat.testing import tiny
from offbeat.train.batching import Trajectory, plan
from offbeat.train.trainer import Trainer
from offbeat.train.twin import twin_of
from offbeat.weights.transport import load_manifest

STEPS = trainer_cases.record_steps(4)
Start = Callable[..., Trainer]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainer-engine") / "actor"
    return tiny.make_tiny_model(path, tied=request.param)


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    """Makes trainers that are set up, and closes them."""
    made: list[Trainer] = []

    def make(**settings: Any) -> Trainer:
        trainer = trainer_cases.make_trainer(model, **settings)
        made.append(trainer)
        trainer.setup()
        return trainer

    yield make
    for trainer in made:
        trainer.close()


def requests(n: int = 1, temperature: float = 0.0) -> list[GenerateRequest]:
    rng = np.random.default_rng(3)
    sampling = Sampling(max_tokens=8, temperature=temperature)
    return [
        GenerateRequest(f"v/{i}", rng.integers(3, 60, 3 + i % 5).astype(np.int32), n, sampling)
        for i in range(12)
    ]


def train(trainer: Trainer, step: int) -> None:
    trainer.step(*trainer_cases.to_batch(step, STEPS[step]))


def test_training_is_bit_identical_with_and_without_answers_between_steps(start: Start) -> None:
    alone, asked = start(), start()
    said = []
    for step in range(len(STEPS)):
        random = torch.get_rng_state()
        said.append(trainer_engine.answer(asked, requests(2, temperature=1.0)))
        assert torch.equal(torch.get_rng_state(), random)
        train(alone, step)
        train(asked, step)
    left, right = (trainer_cases.weights_of(trainer) for trainer in (alone, asked))
    for name in left:
        assert torch.equal(left[name], right[name]), name
    states = [trainer._optimizer_of().state_dict()["state"] for trainer in (alone, asked)]
    for key, state in states[0].items():
        assert all(torch.equal(state[name], states[1][key][name]) for name in state)
    assert [version for version, _ in said] == [PolicyVersion(0, step) for step in range(4)]
    assert {c.version_min for c in said[3][1]} == {c.version_max for c in said[3][1]} == {3}
    assert [c.text for c in said[0][1]] != [c.text for c in said[3][1]], "the weights have moved"


def test_the_modules_own_state_is_untouched_and_its_keys_and_values_are_freed(
    start: Start,
) -> None:
    trainer = start()
    module = trainer.model.module
    before = (
        module.training, module.config._attn_implementation,
        [parameter.requires_grad for parameter in module.parameters()],
        [parameter.data_ptr() for parameter in module.parameters()],
    )  # fmt: skip
    twin = twin_of(module)
    shared = zip(module.parameters(), twin.parameters(), strict=True)
    assert all(one.data_ptr() == other.data_ptr() for one, other in shared)
    del twin
    gc.collect()
    caches = sum(type(thing) is SeatCache for thing in gc.get_objects())
    trainer_engine.answer(trainer, requests())
    gc.collect()
    assert sum(type(thing) is SeatCache for thing in gc.get_objects()) == caches
    assert before == (
        module.training, module.config._attn_implementation,
        [parameter.requires_grad for parameter in module.parameters()],
        [parameter.data_ptr() for parameter in module.parameters()],
    )  # fmt: skip
    assert [span.kind for span in trainer.drain_spans()] == ["validate"]


def test_greedy_answers_are_those_of_an_engine_that_loaded_the_version(
    start: Start, model: Path
) -> None:
    trainer = start()
    for step in range(3):
        train(trainer, step)
    manifest = trainer.publish()

    async def by_engine() -> list[Completion]:
        engine = TransformersEngine(str(model), max_context=64, load_manifest=load_manifest)
        await engine.start()
        try:
            await engine.load(manifest)
            streams = [engine.generate(request) for request in requests()]
            found = [[item async for item in stream] for stream in streams]
            return [item for part in found for item in part if isinstance(item, Completion)]
        finally:
            await engine.stop()

    version, found = trainer_engine.answer(trainer, requests())
    expected = asyncio.run(by_engine())
    assert version == manifest.version == PolicyVersion(0, 3)
    told = [(c.request_id, c.text, c.tokens, c.finish_reason, c.version_min) for c in found]
    assert told == [
        (c.request_id, c.text, c.tokens, c.finish_reason, c.version_min) for c in expected
    ]


def test_under_autocast_its_log_probs_are_the_trainers(start: Start) -> None:
    """In bfloat16, as on a GPU; an engine in float32 is further away."""
    trainer = start(dtype="bfloat16")
    assert trainer.model.compute_dtype == torch.bfloat16
    asked = requests(1, temperature=1.0)
    with trainer.lent() as module, torch.inference_mode():
        stepper = trainer_engine._stepper(trainer, module, asked)
        assert stepper.model.cache.dtype == torch.bfloat16
        payloads: dict[str, Any] = {}

        def keep(item: Any) -> None:
            payloads[item.request_id] = item.ref

        for request in asked:
            stepper.submit(jobs_of(request, keep))
        while not stepper.idle:
            stepper.step()
    trajectories = [
        Trajectory(request.prompt_ids, payloads[request.request_id].token_ids) for request in asked
    ]
    off: dict[torch.dtype, list[float]] = {torch.bfloat16: [], torch.float32: []}
    for dtype, found in off.items():
        for micro in plan(trajectories, tokens_per_micro_batch=4096, prefix_sharing=False):
            with torch.no_grad():
                values = trainer.model.logprobs(micro, dtype).numpy()
            ours = np.concatenate([payloads[request.request_id].logprobs for request in asked])
            found.extend(np.abs(values - ours[micro.source]).tolist())
    assert np.mean(off[torch.bfloat16]) < 0.01
    assert np.mean(off[torch.float32]) > 0


def test_what_does_not_fit_has_no_answer_and_what_takes_too_long_is_said(start: Start) -> None:
    trainer = start()
    long = GenerateRequest("v/12", np.full(60, 5, np.int32), 1, Sampling(8, 0.0))
    _, found = trainer_engine.answer(trainer, [*requests(), long])
    assert [c.request_id for c in found] == [f"v/{i}" for i in range(12)]
    assert trainer_engine.answer(trainer, [])[1] == []
    section = trainer.config.validation.model_copy(update={"deadline_seconds": 1e-6})
    trainer.config = trainer.config.model_copy(update={"validation": section})
    with pytest.raises(DeadlinePassed, match=r"answered 0 of 12 .*validate\.deadline_seconds"):
        trainer_engine.answer(trainer, requests())


def test_seats_are_what_half_of_the_free_memory_holds() -> None:
    gigabyte = 1 << 30
    assert trainer_engine.seats_that_fit(64, gigabyte // 16, 80 * gigabyte) == 64
    assert trainer_engine.seats_that_fit(64, gigabyte, 80 * gigabyte) == 40
    assert trainer_engine.seats_that_fit(64, 90 * gigabyte, 80 * gigabyte) == 1
