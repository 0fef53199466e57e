"""How likely verdicts are by a judge on vLLM: as plain transformers and the other engine say."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine_models import read_version
from judge_models import Oracle, make_judge
from vllm_models import Held, collect, hold

from offbeat.config import RewardSourceSection
from offbeat.records import Completion, Prompt, Sampling, ScoreItem, Structure
from offbeat.reward.build import build_source
from offbeat.reward.judge import Weighed
from offbeat.reward.judge_engines import EngineBackend
from offbeat.rollout.transformers_engine import TransformersEngine
from offbeat.rollout.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
SETTINGS: dict[str, Any] = {"seats": 16, "max_context": 256, "role": "reward/judge"}
GRADES = tuple(str(grade) for grade in range(1, 11))
SETS = (("1", "10"), GRADES, ("yes", "no"), ("correct", "partly correct", "incorrect"), ("A", "B"))
TEXTS = ("Q: 3 + 4?\nAnswer: 7\nGrade:", "Q: 5 + 4?\nAnswer: 0\n" * 6 + "Grade:")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judge(tmp_path_factory.mktemp("judge") / "model", "bytes")


@pytest.fixture(scope="module")
def held(model: Path) -> Iterator[Held]:
    with hold(VllmEngine(str(model), **SETTINGS)) as (found,):
        yield found


def section(model: Path, **more: Any) -> RewardSourceSection:
    base = {"kind": "genrm", "engine": "vllm", "model": str(model), "max_context": 256}
    return RewardSourceSection.model_validate(base | more)


def test_watched_tokens_are_the_same_on_both_engines(held: Held, model: Path) -> None:
    """At every temperature, also where what is drawn is bent by a structure; with others beside."""
    heat = [0.0, 1.0, 0.6, 1.4]
    tokenizer = Oracle(model).tokenizer
    random = np.random.default_rng(0)
    watch = [tuple(map(int, random.integers(0, len(tokenizer), n))) for n in (0, 1, 7, 128)]

    async def ask(engine: Any, structures: bool) -> list[list[Completion]]:
        async def one(i: int) -> list[Completion]:
            await asyncio.sleep(0.01 * (i % 3))
            ids = tokenizer(TEXTS[i % 2] + " 1" * (i % 5))["input_ids"]
            shape = Structure(choices=("yes", "no")) if structures and i % 3 == 0 else None
            stop = ("zz",) if i % 4 == 0 else ()
            sampling = Sampling(6, heat[i % 4], stop, structure=shape, watch=watch[i // 4 % 4])
            return await collect(engine, f"w{i}", np.array(ids), 1 + i % 3, sampling)

        return await asyncio.gather(*(one(i) for i in range(24)))

    async def both() -> tuple[Any, Any]:
        other = TransformersEngine(str(model), load_manifest=read_version, **SETTINGS)
        await other.start()
        try:
            return await ask(held.engine, True), await ask(other, False)
        finally:
            await other.stop()

    ours, theirs = held.run(both())
    for i, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert len(found) == len(expected) == 1 + i % 3
        for one, other in zip(found, expected, strict=True):
            assert len(one.watched) == len(watch[i // 4 % 4])
            np.testing.assert_allclose(one.watched, other.watched, atol=1e-4)
    shaped = [one.text for i, found in enumerate(ours) if i % 3 == 0 for one in found]
    assert {text.replace("<eos>", "") for text in shaped} <= {"yes", "no"}


def test_probabilities_are_those_of_plain_passes(held: Held, model: Path) -> None:
    cases = list(itertools.product(TEXTS, SETS))

    async def main() -> list[Weighed]:
        judge = EngineBackend([held.engine], model, section(model), name="judge")
        await judge.start()
        try:
            asked = [judge.weigh(text, verdicts) for text, verdicts in cases]
            return list(await asyncio.wait_for(asyncio.gather(*asked), 120))
        finally:
            await judge.stop()

    oracle = Oracle(model)
    for (text, verdicts), weighed in zip(cases, held.run(main()), strict=True):
        expected = oracle.weigh(text, verdicts)
        np.testing.assert_allclose(weighed.probabilities, expected, atol=1e-4, rtol=1e-3)
        assert max(expected) > 0.01
        assert weighed.verdict.completion_tokens <= 40
        assert weighed.verdict.prompt_tokens > 0


def test_an_expected_grade_of_a_source(held: Held, model: Path, tmp_path: Path) -> None:
    """From the template to the reward: the value weighted by what the judge would say."""
    template = tmp_path / "judge.jinja"
    template.write_text("Q: {{ question }}?\nAnswer: {{ answer }}\nGrade:")
    choices = {"yes": 1.0, "no": 0.0, "10": 0.7, "9": 0.6, "1": 0.1, "correct": 1.0, "A": 0.5}
    choices |= {"B": 0.2, "8": 0.8}
    config = section(model, parser="expected", choices=choices, template=template)
    prompt = Prompt(0, np.zeros(1, np.int32), "p", "3 + 4")

    async def main() -> Any:
        source = build_source("judge", config, engines=[held.engine])
        await source.start()
        try:
            return await asyncio.wait_for(source.score([ScoreItem(prompt, "7")]), 60)
        finally:
            await source.stop()

    (reward,) = held.run(main())
    shares = Oracle(model).weigh(reward.transcripts[0].prompt, tuple(choices))
    assert sum(shares) > 0.5
    expected = np.dot(shares, list(choices.values())) / sum(shares)
    assert reward.status == "scored", reward
    assert reward.value == pytest.approx(expected, abs=1e-3)
    assert reward.transcripts[0].completion_tokens >= 1
