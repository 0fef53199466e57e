"""A judge on vLLM: every verdict has the form that it must have, even a random model's."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "max_of_three"))
from make_judge import make_model, make_tokenizer  # type: ignore[import-not-found]

from offbeat.config import RewardSourceSection
from offbeat.records import Prompt, Reward, ScoreItem
from offbeat.reward.build import build_source
from offbeat.rollout.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@dataclass
class Judge:
    """A random model on vLLM that no prompt could move to write JSON."""

    path: Path
    engine: VllmEngine
    runner: asyncio.Runner

    def verdicts(self, count: int = 24, **settings: Any) -> list[Reward]:
        base = {"kind": "genrm", "model": str(self.path), "engine": "vllm", "temperature": 1.0}
        config = RewardSourceSection.model_validate(base | {"max_tokens": 40} | settings)
        items = [
            ScoreItem(Prompt(i, np.zeros(1, np.int32), "p", f"{i} + 1?"), f"{i + 1}")
            for i in range(count)
        ]

        async def main() -> list[Reward]:
            source = build_source("judge", config, engines=[self.engine])
            await source.start()
            try:
                return await asyncio.wait_for(source.score(items), 120)
            finally:
                await source.stop()

        return self.runner.run(main())


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    path = tmp_path_factory.mktemp("judge") / "model"
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    engine = VllmEngine(str(path), role="reward/judge", seats=16, max_context=768)
    with asyncio.Runner() as runner:
        try:
            runner.run(engine.start())
            yield Judge(path, engine, runner)
        finally:
            runner.run(engine.stop())


@pytest.mark.parametrize("scale", [(1.0, 10.0), (-1.0, 1.0)])
def test_json_is_enforced(judge: Judge, scale: tuple[float, float]) -> None:
    rewards = judge.verdicts(parser="json", scale=scale)
    for reward in rewards:
        assert reward.status == "scored", reward
        written = json.loads(reward.raw)
        assert list(written) == ["score"]
        assert scale[0] <= written["score"] <= scale[1]
    assert len({reward.value for reward in rewards}) > 3


def test_without_the_form_nothing_is_readable(judge: Judge) -> None:
    rewards = judge.verdicts(parser="json", structured="off")
    assert {(reward.status, reward.cause) for reward in rewards} == {("failed", "unparseable")}
    assert not any(reward.raw.lstrip().startswith('{"score"') for reward in rewards)


def test_yes_or_no_is_enforced(judge: Judge) -> None:
    rewards = judge.verdicts(parser="yes_no")
    assert {reward.raw for reward in rewards} == {"yes", "no"}
    assert {reward.value for reward in rewards} == {0.0, 1.0}


def test_a_number_is_enforced_when_it_is_asked_for(judge: Judge) -> None:
    rewards = judge.verdicts(parser="number", structured="on", scale=(0, 99.99))
    assert [reward.value for reward in rewards] == [float(r.raw) / 99.99 for r in rewards]
    narrow = judge.verdicts(parser="number", structured="on", scale=(1, 10))
    for reward in narrow:
        assert (reward.cause is None) == (1 <= float(reward.raw) <= 10)
        assert reward.status == "scored" or reward.cause == "out_of_range"
    free = judge.verdicts(parser="number")
    assert not all(reward.raw.replace(".", "").isdigit() for reward in free)


def test_a_verdict_that_is_cut_is_a_failure_by_cause(judge: Judge) -> None:
    rewards = judge.verdicts(parser="json", max_tokens=5)
    assert {(reward.status, reward.cause) for reward in rewards} == {("failed", "unparseable")}
