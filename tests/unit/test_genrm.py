"""A judge on engines: templates, sharing, routing, typed failures; then a real tiny engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine_models import make_model, read_version

from offbeat.config import RewardSourceSection
from offbeat.errors import RequestRefused, UserError
from offbeat.records import Completion, GenerateRequest, Prompt, Reward, ScoreItem, Span
from offbeat.reward.build import build_source
from offbeat.reward.genrm import GenRM
from offbeat.reward.judge_engines import EngineBackend
from offbeat.reward.template import encode, encode_chat
from offbeat.rollout.transformers_engine import TransformersEngine


class FakeEngine:
    """Answers with `reply`, an exception, or never."""

    def __init__(self, reply: str | Exception | None = "8", reason: str = "stop") -> None:
        self.reply, self.reason = reply, reason
        self.requests: list[GenerateRequest] = []
        self.running = self.most = 0
        self.delay = 0.01
        self.asked = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        self.requests.append(request)
        self.asked.set()
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(60 if self.reply is None else self.delay)
            if isinstance(self.reply, Exception):
                raise self.reply
            yield Completion(
                request.request_id, 0, str(self.reply), 1, 0, 0, self.reason, None  # type: ignore[arg-type]
            )  # fmt: skip
        finally:
            self.running -= 1

    async def drain_spans(self) -> list[Span]:
        return [Span("engine", 7, "decode", 0.0, 1.0, 0.5)]


class Letters:
    """A tokenizer of one token a character."""

    bos_token_id = eos_token_id = None
    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def section(**settings: Any) -> RewardSourceSection:
    return RewardSourceSection.model_validate({"kind": "genrm", "model": "m"} | settings)


def item(answer: str = "4", reference: str | None = "four", **columns: Any) -> ScoreItem:
    return ScoreItem(
        Prompt(0, np.zeros(1, np.int32), "p", "2+2?", None, reference, columns), answer
    )


def judged(engines: list[FakeEngine], items: list[ScoreItem], **settings: Any) -> list[Reward]:
    async def main() -> list[Reward]:
        config = section(**settings)
        source = GenRM("judge", config, EngineBackend(engines, Letters(), config))
        await source.start()
        try:
            return await asyncio.wait_for(source.score(items), 30)
        finally:
            await source.stop()

    return asyncio.run(main())


def asked(engine: FakeEngine, place: int = 0) -> str:
    return "".join(map(chr, engine.requests[place].prompt_ids))


def test_a_grade_by_the_built_in_template() -> None:
    engine = FakeEngine()
    with_reference, without = judged([engine], [item(), item(reference=None)])
    assert replace(with_reference, transcripts=()) == Reward.scored("judge", 7 / 9, raw="8")
    assert without.value == with_reference.value
    assert "Reference answer:\nfour" in asked(engine)
    assert "Reference" not in asked(engine, 1)
    assert all("from 1 (wrong) to 10" in asked(engine, i) for i in (0, 1))
    request = engine.requests[0]
    assert (request.n, request.sampling.temperature, request.sampling.max_tokens) == (1, 0.0, 16)


def test_templates_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "judge.jinja"
    path.write_text("{{ question }}|{{ answer }}|{{ reference }}|{{ columns.level }}")
    engine = FakeEngine()
    fine, broken = judged([engine], [item(level=3), item()], template=path)
    assert asked(engine) == "2+2?|4|four|3"
    assert fine.status == "scored"
    assert (broken.status, broken.cause) == ("failed", "template_error")
    assert "level" in broken.reason
    path.write_text("{% if %}")
    with pytest.raises(UserError, match=r"reward.judge.template: .*judge.jinja, line 1"):
        judged([engine], [], template=path)
    with pytest.raises(UserError, match=r"cannot read .*absent"):
        judged([engine], [], template=tmp_path / "absent")


def test_identical_texts_in_flight_are_judged_once() -> None:
    engine = FakeEngine()
    rewards = judged([engine], [item("4")] * 5 + [item("5")])
    assert len(engine.requests) == 2
    assert len(rewards) == 6
    engine = FakeEngine()
    judged([engine], [item("4")] * 5, temperature=1.0)
    assert len(engine.requests) == 5


def test_the_shared_judgement_outlives_one_reader() -> None:
    async def main() -> None:
        engine, config = FakeEngine(), section()
        source = GenRM("judge", config, EngineBackend([engine], Letters(), config))
        first = asyncio.create_task(source.score([item()]))
        second = asyncio.create_task(source.score([item()]))
        await asyncio.sleep(0.005)
        first.cancel()
        (reward,) = await second
        assert reward.status == "scored"
        engine.reply = None
        engine.asked.clear()
        alone = asyncio.create_task(source.score([item()]))
        await engine.asked.wait()
        engine.asked.clear()
        alone.cancel()
        await asyncio.sleep(0.05)
        assert engine.running == 0  # nobody reads it any more: cancelled
        waiting = asyncio.create_task(source.score([item()]))
        await engine.asked.wait()
        engine.asked.clear()
        await source.stop()
        (reward,) = await asyncio.wait_for(waiting, 5)
        assert (reward.status, reward.cause) == ("failed", "unavailable")

    asyncio.run(main())


def test_the_least_busy_engine_is_asked_within_the_limit() -> None:
    engines = [FakeEngine(), FakeEngine()]
    judged(engines, [item(str(i)) for i in range(20)], concurrency=4)
    assert [len(engine.requests) for engine in engines] == [10, 10]
    assert max(engine.most for engine in engines) == 2


def test_a_failing_engine_is_avoided() -> None:
    dead, alive = FakeEngine(RuntimeError("actor died")), FakeEngine()
    rewards = judged([dead, alive], [item(str(i)) for i in range(20)], concurrency=1)
    assert [reward.cause for reward in rewards].count("unavailable") == 1
    assert "actor died" in next(r.reason for r in rewards if r.status == "failed")
    assert len(dead.requests) == 1


@pytest.mark.parametrize(
    ("engine", "cause"),
    [
        (FakeEngine(None), "timeout"),
        (FakeEngine(RequestRefused("too long for me")), "too_long"),
        (FakeEngine("8", "aborted"), "unavailable"),
        (FakeEngine("1", "length"), "unparseable"),
        (FakeEngine("11"), "out_of_range"),
        (FakeEngine("I cannot judge this"), "unparseable"),
    ],
)
def test_failures_by_cause(engine: FakeEngine, cause: str) -> None:
    (reward,) = judged([engine], [item()], deadline_seconds=1)
    assert (reward.status, reward.cause) == ("failed", cause)
    assert engine.running == 0


def test_truncated_but_readable() -> None:
    (reward,) = judged([FakeEngine("8 because", "length")], [item()])
    assert reward.status == "scored"


def test_too_long_is_never_sent() -> None:
    engine = FakeEngine()
    (reward,) = judged([engine], [item("x" * 900)])
    assert (reward.cause, engine.requests) == ("too_long", [])


def test_spans_carry_the_sources_name() -> None:
    async def main() -> list[Span]:
        config = section()
        backend = EngineBackend([FakeEngine(), FakeEngine()], Letters(), config)
        return await GenRM("judge", config, backend).drain_spans()

    assert [(s.role, s.replica) for s in asyncio.run(main())] == [
        ("reward/judge", 0), ("reward/judge", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["8", "Score: 8/10", "**8**", "8.0", '{"score": 8}'])
def test_j1_verdicts_of_a_judge_are_an_eight(text: str) -> None:
    (reward,) = judged([FakeEngine(text)], [item()])
    assert replace(reward, transcripts=()) == Reward.scored("judge", 7 / 9, raw=text)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "unparseable"),
        ("I cannot judge this", "unparseable"),
        ("eight-ish", "unparseable"),
        ("11", "out_of_range"),
        ("-3", "out_of_range"),
        ("NaN", "unparseable"),
        ("8 or 9", "unparseable"),
        ("8 " * 5_000_000, "unparseable"),
    ],
    ids=lambda value: value[:12],
)
def test_j2_verdicts_of_a_judge_are_failures_not_numbers(text: str, cause: str) -> None:
    (reward,) = judged([FakeEngine(text)], [item()])
    assert (reward.status, reward.cause, reward.value) == ("failed", cause, None)
    assert len(reward.raw) <= 4000


def test_j3_eyes_of_a_judge_are_no_yes() -> None:
    (reward,) = judged([FakeEngine("I saw it with my own eyes")], [item()], parser="yes_no")
    assert (reward.cause, reward.value) == ("unparseable", None)


def bos_tokenizer(adds: bool, template: str) -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(["<s>", "</s>", "user", "hi", "a", "?"])}
    core = Tokenizer(models.WordLevel(words, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds:
        core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("adds", "template", "ids"),
    [
        (True, "<s>user {{ messages[0].content }}", [0, 2, 3]),
        (False, "<s>user {{ messages[0].content }}", [0, 2, 3]),
        (True, "user {{ messages[0].content }}", [0, 2, 3]),
        (False, "user {{ messages[0].content }}", [2, 3]),
        (True, "{{ bos_token }}{{ bos_token }}user {{ messages[0].content }}", [0, 2, 3]),
    ],
)
def test_t3_exactly_one_bos(adds: bool, template: str, ids: list[int]) -> None:
    tokenizer = bos_tokenizer(adds, template)
    assert encode_chat(tokenizer, [{"role": "user", "content": "hi"}], ask=True) == ids
    assert encode(tokenizer, "<s> hi") == [0, 3]
    assert encode(tokenizer, "hi") == ([0, 3] if adds else [3])


def test_t3_a_judge_goes_on_with_a_text_that_no_eos_ends() -> None:
    """A tokenizer that frames every text in <s> and </s>: a scorer gets both, a judge one BOS."""
    tokenizer = bos_tokenizer(True, "")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert encode(tokenizer, "<s> hi") == [0, 3, 1]
    assert encode(tokenizer, "<s> hi", ask=True) == [0, 3]
    engine, config = FakeEngine(), section(template=None)
    source = GenRM("judge", config, EngineBackend([engine], tokenizer, config))
    asyncio.run(source.score([item()]))
    ids = list(engine.requests[0].prompt_ids)
    assert (ids[0], ids.count(0), ids.count(1)) == (0, 1, 0)


def test_built_in_needs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs engines on a pool"):
        build_source("judge", section())
    with pytest.raises(UserError, match="at least one engine"):
        EngineBackend([], Letters(), section())
    source = build_source("judge", section(), engines=[FakeEngine()], tokenizer_path=tmp_path)
    with pytest.raises(UserError, match="holds no tokenizer that loads"):
        asyncio.run(source.start())


def test_a_real_engine(tmp_path: Path) -> None:
    path = make_model(tmp_path / "judge", max_position_embeddings=1024)

    async def main() -> tuple[list[Reward], list[Span]]:
        engine = TransformersEngine(
            str(path), role="reward/judge", max_context=1024, seats=4, load_manifest=read_version
        )
        await engine.start()
        source = build_source("judge", section(model=str(path), max_tokens=3), engines=[engine])
        await source.start()
        try:
            rewards = await asyncio.wait_for(source.score([item("4"), item("4"), item("5")]), 60)
            return rewards, await source.drain_spans()
        finally:
            await source.stop()
            await engine.stop()

    rewards, spans = asyncio.run(main())
    assert rewards[0].raw
    assert rewards[0].raw == rewards[1].raw
    for reward in rewards:
        assert reward.status == "scored" or reward.cause in {"unparseable", "out_of_range"}
    assert {span.role for span in spans} == {"reward/judge"}
