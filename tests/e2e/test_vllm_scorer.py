"""Scorers on vLLM's pooling runner against transformers: the same raw logits, or a refusal."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    DebertaV2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from offbeat.cluster.build import make_scorer
from offbeat.cluster.specs import ScorerSpec
from offbeat.config import RewardSourceSection
from offbeat.errors import RunFailed, UserError
from offbeat.records import Prompt, ScoreItem
from offbeat.reward.disrm import DisRM, TransformersScorer
from offbeat.reward.vllm_scorer import VllmScorer
from offbeat.testing.tiny import make_tiny_model, make_tiny_scorer

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
TEXTS = [
    "5",
    "the largest is 7",
    "",
    "x" * 60,
    "a much longer answer, with reasons: 3 < 4 and 4 < 5",
    "the largest is 9",
]


def make_decoder(path: Path, family: type[LlamaConfig] | type[Qwen3Config], side: str) -> Path:
    """A random decoder with one logit, whose padding is the end of sequence."""
    make_tiny_model(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, padding_side=side)
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, CHAT
    tokenizer.save_pretrained(path)
    torch.manual_seed(1)
    config = family(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=256,
        initializer_range=0.2, num_labels=1, pad_token_id=tokenizer.eos_token_id,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, dtype="float32",
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return path


def make_encoder(path: Path, side: str) -> Path:
    make_tiny_scorer(path, hidden=64)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, padding_side=side)
    tokenizer.save_pretrained(path)
    return path


def section(path: Path, **settings: Any) -> RewardSourceSection:
    base = {"kind": "disrm", "model": str(path), "engine": "vllm", "seats": 16}
    return RewardSourceSection.model_validate(base | settings)


def vllm_scorer(config: RewardSourceSection) -> VllmScorer:
    scorer = make_scorer(ScorerSpec("scorer", 0, config, "cpu"))
    assert isinstance(scorer, VllmScorer)
    return scorer


def item(answer: str) -> ScoreItem:
    return ScoreItem(Prompt(0, np.zeros(1, np.int32), "p", "max of 3, 4, 5?"), answer)


@dataclass
class Case:
    path: Path
    config: RewardSourceSection
    scorer: VllmScorer
    runner: asyncio.Runner

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)


def started(path: Path, **settings: Any) -> Iterator[Case]:
    config = section(path, **settings)
    with asyncio.Runner() as runner:
        scorer = vllm_scorer(config)
        try:
            runner.run(scorer.start())
            yield Case(path, config, scorer, runner)
        finally:
            runner.run(scorer.stop())


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    path = make_decoder(tmp_path_factory.mktemp("decoder") / "m", LlamaConfig, "left")
    yield from started(path, chat=True)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    path = make_decoder(tmp_path_factory.mktemp("qwen") / "m", Qwen3Config, "right")
    yield from started(path)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    path = make_encoder(tmp_path_factory.mktemp("encoder") / "m", "left")
    yield from started(path, over_length="cut_front")


async def by_transformers(
    config: RewardSourceSection, items: Sequence[ScoreItem]
) -> list[float | None]:
    scorer = TransformersScorer("scorer", config)
    await scorer.start()
    try:
        return await scorer.logits(items)
    finally:
        await scorer.stop()


def agree(case: Case, items: Sequence[ScoreItem]) -> list[float]:
    found = case.run(case.scorer.logits(items))
    wanted = case.run(by_transformers(case.config, items))
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert np.std(wanted) > 0.01
    return found


def test_a_decoder_gives_transformers_logits(decoder: Case) -> None:
    """In chat rows end in the pad id, which is the end of sequence: transformers reads before."""
    items = [item(text) for text in TEXTS]
    agree(decoder, items)
    # Plain transformers, a row at a time.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(decoder.path)
    model = AutoModelForSequenceClassification.from_pretrained(decoder.path).eval()
    rows = [tokenizer(f"user: max of 3, 4, 5?<eos>assistant: {t}<eos>")["input_ids"] for t in TEXTS]
    with torch.inference_mode():
        wanted = [model(input_ids=torch.tensor([row])).logits[0, 0].item() for row in rows]
    found = decoder.run(decoder.scorer.logits(items))
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert rows[0][-1] == model.config.pad_token_id


def test_a_batch_equals_rows_alone_and_the_spans_count(decoder: Case) -> None:
    decoder.run(decoder.scorer.drain_spans())
    items = [item(f"{text} {i}") for i in range(8) for text in TEXTS]
    together = decoder.run(decoder.scorer.logits(items))
    alone = [decoder.run(decoder.scorer.logits([one]))[0] for one in items[:8]]
    assert together[:8] == pytest.approx(alone, rel=1e-4, abs=1e-5)
    spans = decoder.run(decoder.scorer.drain_spans())
    assert len(spans) == 9
    assert {(s.role, s.replica, s.kind) for s in spans} == {("reward/scorer", 0, "score")}
    assert 0 < spans[0].cpu <= (spans[0].end - spans[0].start) * os.cpu_count() + 0.1
    assert spans[0].tokens > sum(span.tokens for span in spans[1:]) > 0
    assert decoder.run(decoder.scorer.drain_spans()) == []


def test_rows_that_are_too_long_fail_and_the_rest_is_scored(decoder: Case) -> None:
    items = [item("y" * 400), item("x"), item("z" * 5000), item("w")]
    found = decoder.run(decoder.scorer.logits(items))
    assert [logit is None for logit in found] == [True, False, True, False]
    assert decoder.run(decoder.scorer.logits([])) == []
    prompt = "user: max of 3, 4, 5?!assistant: !"
    fits = item("v" * (256 - len(prompt)))
    (exact,) = decoder.run(decoder.scorer.logits([fits]))
    assert exact == pytest.approx(decoder.run(by_transformers(decoder.config, [fits]))[0], rel=1e-3)


def test_through_the_source(decoder: Case) -> None:
    async def main() -> list[Any]:
        source = DisRM("scorer", decoder.config, [decoder.scorer])
        await source.start()
        rewards = await source.score([item(text) for text in ("a", "b" * 999, "c")])
        await source.stop()
        return rewards

    first, long, last = decoder.run(main())
    assert (first.status, last.status) == ("scored", "scored")
    assert (long.status, long.cause, long.value) == ("failed", "too_long", None)


def test_a_dead_core_raises_and_is_no_number(decoder: Case) -> None:
    """The last test of this fixture: it kills vLLM's worker."""
    pids = list(decoder.scorer._clock.processes)
    assert len(pids) >= 2
    decoder.run(decoder.scorer.health())
    os.kill(pids[-1], signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RunFailed):
        decoder.run(asyncio.wait_for(endless(decoder.scorer), 60))
    assert time.monotonic() - begun < 60
    with pytest.raises(RunFailed, match="died"):
        decoder.run(decoder.scorer.health())
    with pytest.raises(RunFailed, match="died"):
        decoder.run(decoder.scorer.logits([item("x")]))
    decoder.run(decoder.scorer.stop())
    assert ended(pids)


async def endless(scorer: VllmScorer) -> None:
    while True:
        await scorer.logits([item(text) for text in TEXTS])


def ended(pids: Sequence[int]) -> bool:
    def runs(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z"

    deadline = time.monotonic() + 20
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(runs, pids))


def test_another_decoder_gives_transformers_logits(qwen: Case) -> None:
    agree(qwen, [item(text) for text in TEXTS])


def test_an_encoder_gives_transformers_logits(encoder: Case) -> None:
    """Rows at and over the model's 128 positions among them, cut to begin and end as they must."""
    agree(encoder, [item(text) for text in [*TEXTS, "long " * 100, "[PAD] and [MASK]"]])


def test_stopping_leaves_no_process(encoder: Case) -> None:
    """The last test of this fixture: it ends the scorer while it works."""
    pids = list(encoder.scorer._clock.processes)

    async def main() -> None:
        working = asyncio.create_task(endless(encoder.scorer))
        await asyncio.sleep(0.2)
        await encoder.scorer.stop()
        with pytest.raises(RunFailed):
            await asyncio.wait_for(working, 10)

    encoder.run(main())
    assert ended(pids)


def test_logits_that_differ_are_refused_at_start(tmp_path: Path) -> None:
    path = make_decoder(tmp_path / "m", LlamaConfig, "right")
    scorer = vllm_scorer(section(path, engine_args={"hf_overrides": {"rms_norm_eps": 0.5}}))
    with pytest.raises(UserError, match=r"reward.scorer.model: vLLM's logits of .* differ from tr"):
        asyncio.run(scorer.start())
    assert ended(scorer._clock.processes)


def test_what_no_start_is_needed_for(tmp_path: Path) -> None:
    """Refused before vLLM starts: two labels, no head, wrong arguments, families without vLLM."""
    two = make_decoder(tmp_path / "two", LlamaConfig, "right")
    config = LlamaConfig.from_pretrained(two, num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(two)
    bare = make_tiny_model(tmp_path / "bare")
    LlamaConfig.from_pretrained(bare, num_labels=1).save_pretrained(bare)
    fine = make_decoder(tmp_path / "fine", LlamaConfig, "right")
    narrow = make_tiny_scorer(tmp_path / "narrow", hidden=32)
    foreign = make_tiny_scorer(tmp_path / "foreign")
    kind = DebertaV2Config(
        vocab_size=512, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, num_labels=1, dtype="float32",
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(kind).save_pretrained(foreign)
    for path, settings, words in (
        (two, {}, r"two has 2 labels"),
        (bare, {}, r"bare has no trained weights for score"),
        (tmp_path / "absent", {}, r"absent"),
        (fine, {"engine_args": {"max_num_seqz": 3}}, r"reward\.scorer\.engine_args\.max_num_seqz"),
        (narrow, {}, r"heads of .*narrow are 16 wide"),
        (foreign, {}, r"vLLM refuses .*foreign as a scorer .*DebertaV2ForSeq.* not supported"),
        (fine, {"engine_args": {"dtype": "half"}}, r"set reward\.scorer\.dtype instead"),
    ):
        with pytest.raises(UserError, match=words):
            asyncio.run(vllm_scorer(section(path, **settings)).start())
