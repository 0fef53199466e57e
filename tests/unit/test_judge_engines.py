"""What a judge on engines says of itself, and what its verdicts cost."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine_models import read_version
from judge_models import make_judge, make_tokenizer

from offbeat.cluster.specs import RunSpec, judge_engine, policy_engine
from offbeat.config import RewardSourceSection
from offbeat.config_file import load_config
from offbeat.records import Completion, GenerateRequest, Prompt, Reward, ScoreItem
from offbeat.reward.build import build_source
from offbeat.reward.identity import call_seed, model_fingerprint, source_seed
from offbeat.reward.judge_engines import EngineBackend, special_tokens
from offbeat.rollout.transformers_engine import TransformersEngine
from offbeat.testing.judge_server import JudgeServer

TEXT = "Q: 3 + 4?\nAnswer: 7\nGrade:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judge(tmp_path_factory.mktemp("judge") / "model", "bytes", steps=30)


def section(model: Path, **more: Any) -> RewardSourceSection:
    return RewardSourceSection.model_validate({"kind": "genrm", "model": str(model)} | more)


def items(count: int = 1) -> list[ScoreItem]:
    return [ScoreItem(Prompt(i, np.zeros(1, np.int32), "p", f"{i} + 1"), "2") for i in range(count)]


def with_engine(
    model: Path, body: Callable[[TransformersEngine], Awaitable[Any]], **settings: Any
) -> Any:
    settings = {"max_context": 400, "seats": 16, "load_manifest": read_version} | settings

    async def main() -> Any:
        engine = TransformersEngine(str(model), **settings)
        await engine.start()
        try:
            return await asyncio.wait_for(body(engine), 60)
        finally:
            await engine.stop()

    return asyncio.run(main())


def test_tokens_and_seconds_of_a_verdict(model: Path) -> None:
    async def body(engine: TransformersEngine) -> Any:
        judge = EngineBackend([engine], model, section(model, max_tokens=3), name="judge")
        await judge.start()
        found = await judge.verdict(TEXT), judge.down_since, judge.facts()
        await judge.stop()
        return found

    verdict, down_since, facts = with_engine(model, body)
    assert verdict.prompt_tokens == len(make_tokenizer("bytes")(TEXT)["input_ids"])
    assert 1 <= verdict.completion_tokens <= 3
    assert 0 < verdict.seconds < 60
    assert (verdict.retries, verdict.cached) == (0, False)
    assert down_since is None
    assert facts == {"replicas": 1.0}


def test_draws_of_one_text_differ_and_equal_texts_of_temperature_0_are_judged_once(
    model: Path,
) -> None:
    async def body(engine: TransformersEngine) -> Any:
        asked: list[GenerateRequest] = []
        generate = engine.generate

        def counted(request: GenerateRequest) -> Any:
            asked.append(request)
            return generate(request)

        engine.generate = counted  # type: ignore[method-assign]
        found = []
        for temperature in (1.0, 0.0):
            config = section(model, max_tokens=4, temperature=temperature)
            judge = EngineBackend([engine], model, config, name="judge")
            await judge.start()
            votes = [judge.verdict(TEXT, vote=vote) for vote in range(24)]
            found.append(({v.text for v in await asyncio.gather(*votes)}, len(asked)))
            asked.clear()
            await judge.stop()
        return found

    (drawn, calls), (greedy, once) = with_engine(model, body)
    assert calls == 24
    assert len(drawn) > 3
    assert (len(greedy), once) == (1, 1)


def test_a_judge_whose_replicas_are_gone_says_since_when(model: Path) -> None:
    class Dead:
        async def generate(self, request: GenerateRequest) -> Any:
            raise ConnectionError("the actor died")
            yield Completion

        async def health(self) -> None:
            raise ConnectionError("the actor died")

        async def stop(self) -> None: ...

    async def main() -> None:
        back = asyncio.Event()

        async def again(index: int) -> Any:
            await back.wait()
            return Dead()

        config = section(model)
        judge = EngineBackend([Dead()], make_tokenizer("bytes"), config, replace_engine=again)  # type: ignore[list-item]
        await judge.start()
        assert judge.down_since is None
        before = asyncio.get_running_loop().time()
        with pytest.raises(Exception, match="replica_lost"):
            await judge.verdict(TEXT)
        assert judge.down_since is not None
        assert before <= judge.down_since <= asyncio.get_running_loop().time()
        back.set()
        async with asyncio.timeout(30):
            while judge.down_since is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await judge.stop()

    asyncio.run(main())


def test_special_tokens_are_all_that_the_tokenizer_reads_as_one() -> None:
    tokenizer = make_tokenizer("bytes")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>"]})
    tokenizer.add_tokens(["plainword"])
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken("<|quiet|>", special=True)])
    found = special_tokens(tokenizer)
    assert set(found) == {"<eos>", "<pad>", "<unk>", "<|turn|>", "<|quiet|>"}
    assert len(found) == 5


def test_the_fingerprint_is_of_what_lies_there_and_not_of_when(model: Path, tmp_path: Path) -> None:
    first = model_fingerprint([model])
    assert len(first) == 32
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    (copy / "README.md").write_text("nothing that a judge reads")
    assert model_fingerprint([copy]) == first
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    name = sorted(tensors)[len(tensors) // 2]
    changed = {k: v + 1e-3 if k == name else v for k, v in tensors.items()}
    save_file(changed, weights, metadata={"format": "pt"})
    other = model_fingerprint([copy])
    assert other != first, "one tensor of many"
    config = copy / "tokenizer_config.json"
    config.write_text(config.read_text() + " ")
    assert model_fingerprint([copy]) not in {first, other}
    assert model_fingerprint([model, copy]) != first
    assert model_fingerprint([tmp_path / "absent"]) == ""
    torch.save({"w": torch.arange(100_000.0)}, tmp_path / "pytorch_model.bin")
    one = model_fingerprint([tmp_path])
    torch.save({"w": torch.arange(100_000.0) + 1}, tmp_path / "pytorch_model.bin")
    assert one != model_fingerprint([tmp_path]) != ""


def test_the_identity_names_model_engine_and_type(model: Path) -> None:
    async def identity(**more: Any) -> str:
        judge = EngineBackend([None], str(model), section(model, **more), name="judge")  # type: ignore[list-item]
        await judge.start()
        return judge.identity

    found = asyncio.run(identity())
    assert str(model.resolve()) in found
    assert model_fingerprint([model]) in found
    assert asyncio.run(identity(temperature=1.0)) == found
    assert asyncio.run(identity(dtype="bfloat16")) != found


def test_seeds_are_a_sources_own(project: Callable[..., Path]) -> None:
    config = load_config(project(("rule", "judge"), cluster__slots=7))
    run = RunSpec("run-1", "cpu", Path())
    judge = config.active_rewards["judge"]
    seeds = {
        judge_engine(name, judge, config, run, replica).seed
        for name in ("judge", "other")
        for replica in (0, 1)
    }
    assert len(seeds) == 2, "by source; engines add their replica"
    assert policy_engine(config, run, 0).seed not in seeds
    fixed = judge.model_copy(update={"seed": 5})
    one = judge_engine("judge", fixed, config, run, 0).seed
    assert one == source_seed(5, "judge") not in seeds
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len({call_seed(one, vote, text) for vote in range(9) for text in "abc"}) == 27


def test_replicas_of_one_judge_draw_differently(model: Path) -> None:
    async def draw(engine: TransformersEngine) -> list[str]:
        config = section(model, max_tokens=4, temperature=1.0)
        judge = EngineBackend([engine], model, config, name="judge")
        await judge.start()
        return [(await judge.verdict(TEXT)).text for _ in range(8)]

    first = with_engine(model, draw, seed=7, replica=0)
    assert first == with_engine(model, draw, seed=7, replica=0)
    assert first != with_engine(model, draw, seed=7, replica=1)


def test_a_verdict_is_paid_for_once(tmp_path: Path) -> None:
    """Another source, and another start, that reads the same texts pays nothing."""
    cache = tmp_path / "runs" / "verdicts.sqlite"

    def score(server: JudgeServer, **more: Any) -> list[Reward]:
        base = {"kind": "genrm", "base_url": server.base_url, "model": "judge"}
        config = RewardSourceSection.model_validate(base | more)

        async def main() -> list[Reward]:
            source = build_source("judge", config, cache_path=cache)
            await source.start()
            try:
                return await asyncio.wait_for(source.score(items(5)), 60)
            finally:
                await source.stop()

        return asyncio.run(main())

    with JudgeServer("8") as server:
        first = score(server)
        assert len(server.calls) == 5
        again = score(server)
        assert len(server.calls) == 5
        assert [r.value for r in again] == [r.value for r in first]
        assert all(r.transcripts[0].prompt_tokens > 0 for r in first)
        for reward in again:
            (call,) = reward.transcripts
            assert (call.cached, call.prompt_tokens, call.completion_tokens) == (True, 0, 0)
        score(server, cache=False)
        score(server, max_tokens=17)
        score(server, temperature=0.5)
        assert len(server.calls) == 20
