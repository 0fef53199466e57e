"""Scorers: a logit that does not depend on its batch, typed failures, routing (D1 to D5)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from offbeat.config import RewardSourceSection
from offbeat.errors import RequestRefused, UserError
from offbeat.records import Prompt, Reward, ScoreItem, Span
from offbeat.reward.build import build_source
from offbeat.reward.disrm import DisRM, TransformersScorer
from offbeat.reward.loop import RewardLoop
from offbeat.reward.parity import RowCheck
from offbeat.reward.source import Logit

KINDS = ("bert", "llama", "llama-pad-is-eos", "llama-no-pad")
CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}"
TEMPLATE = "{{ question }} {{ answer }}{% if reference %}</s>{% endif %}"


def make_scorer(
    path: Path, kind: str, side: str, labels: int = 1, *, token_level: bool = False
) -> Path:
    """A random classification model and a letter tokenizer of its own."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocabulary = {w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "?", *letters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    ends = "<s> $A </s>" if kind == "bert" else "<s> $A"
    core.post_processor = processors.TemplateProcessing(
        ends, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    pad = {"llama-pad-is-eos": "</s>", "llama-no-pad": None}.get(kind, "<pad>")
    PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token=pad,
        padding_side=side, chat_template=CHAT,
    ).save_pretrained(path)  # fmt: skip
    sizes = dict(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, num_labels=labels,
    )  # fmt: skip
    pad_id = {"llama-pad-is-eos": 2, "llama-no-pad": None}.get(kind, 0)
    config = (BertConfig if kind == "bert" else LlamaConfig)(**sizes, pad_token_id=pad_id)
    torch.manual_seed(0)
    auto = AutoModelForTokenClassification if token_level else AutoModelForSequenceClassification
    model = auto.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 0.3)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def scorers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("scorers")
    (root / "template.jinja").write_text(TEMPLATE)
    return {
        (kind, side): make_scorer(root / f"{kind}-{side}", kind, side)
        for kind in KINDS
        for side in ("left", "right")
    }


def section(path: Path | str, **settings: Any) -> RewardSourceSection:
    return RewardSourceSection.model_validate({"kind": "disrm", "model": str(path)} | settings)


def item(answer: str, reference: str | None = None) -> ScoreItem:
    return ScoreItem(Prompt(0, np.zeros(1, np.int32), "p", "ab", None, reference), answer)


def said(config: RewardSourceSection, items: Sequence[ScoreItem]) -> tuple[list[Logit], list[Span]]:
    async def main() -> tuple[list[Logit], list[Span]]:
        scorer = TransformersScorer("scorer", config)
        await scorer.start()
        try:
            return await scorer.logits(items), await scorer.drain_spans()
        finally:
            await scorer.stop()

    return asyncio.run(main())


def logits(
    config: RewardSourceSection, items: Sequence[ScoreItem]
) -> tuple[list[float | None], list[Span]]:
    found, spans = said(config, items)
    return [logit.value for logit in found], spans


def reference_logits(path: Path, rows: list[list[int]]) -> list[float]:
    """What transformers itself says to each row alone."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([row])).logits[0, 0].item() for row in rows]


def by_label(path: Path, rows: list[list[int]], *, tokens: bool) -> torch.Tensor:
    """All logits that transformers gives each row alone, of tokens those of the last: (R, L)."""
    auto = AutoModelForTokenClassification if tokens else AutoModelForSequenceClassification
    model = auto.from_pretrained(path).eval()
    with torch.inference_mode():
        found = [model(input_ids=torch.tensor([row])).logits[0] for row in rows]
    return torch.stack([logits[-1] if tokens else logits for logits in found])


TEXTS = ["x", "a long answer of many letters", "mid length", "", "zz", "an answer that is longer"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_d1_a_batch_equals_batches_of_one(
    scorers: dict[tuple[str, str], Path], kind: str, side: str
) -> None:
    path = scorers[kind, side]
    config = section(path, template=path.parent / "template.jinja")
    # Every second text ends in the eos token, which one of the models pads with.
    items = [item(text, "yes" if i % 2 else None) for i, text in enumerate(TEXTS)]
    found, spans = logits(config, items)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    rows = [
        tokenizer(f"ab {text}" + ("</s>" if i % 2 else ""))["input_ids"]
        for i, text in enumerate(TEXTS)
    ]
    expected = reference_logits(path, rows)
    assert found == pytest.approx(expected, abs=1e-4)
    assert np.std(expected) > 0.01
    (span,) = spans
    assert (span.role, span.kind, span.tokens) == ("reward/scorer", "score", sum(map(len, rows)))
    assert 0 < span.cpu <= span.end - span.start + 0.05


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [False, True])
def test_d1_of_several_labels_and_of_tokens(
    tmp_path: Path, kind: str, side: str, tokens: bool
) -> None:
    """One label's logit and the expected value, in a batch, are those of rows alone."""
    path = make_scorer(tmp_path / "m", kind, side, labels=3, token_level=tokens)
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    items = [item(text, "yes" if i % 2 else None) for i, text in enumerate(TEXTS)]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    rows = [
        tokenizer(f"ab {text}" + ("</s>" if i % 2 else ""))["input_ids"]
        for i, text in enumerate(TEXTS)
    ]
    wanted = by_label(path, rows, tokens=tokens)
    base = {"template": tmp_path / "t.jinja"}
    found, _ = said(section(path, label="LABEL_1", **base), items)
    assert [one.value for one in found] == pytest.approx(wanted[:, 1].tolist(), abs=1e-4)
    names, raw = zip(*(part.split() for part in found[0].raw.split(", ")), strict=True)
    assert names == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert list(map(float, raw)) == pytest.approx(wanted[0].tolist(), abs=1e-4)
    values = {"0": -1.0, "LABEL_1": 0.5, "LABEL_2": 2.0}
    expected, _ = logits(section(path, label_values=values, **base), items)
    weighed = torch.softmax(wanted, 1) @ torch.tensor([-1.0, 0.5, 2.0])
    assert expected == pytest.approx(weighed.tolist(), abs=1e-4)
    assert float(wanted[:, 1].std()) > 0.01
    assert float(weighed.std()) > 0.01


def test_one_logit_of_tokens_needs_no_label(tmp_path: Path) -> None:
    """Read at the last token, also where that is the pad id: there `</s>` is, in a chat."""
    path = make_scorer(tmp_path / "m", "llama-pad-is-eos", "left", token_level=True)
    found, _ = logits(section(path, chat=True), [item("xyz"), item("q")])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    rows = [
        [1, *tokenizer(f"user ab</s>assistant {a}</s>", add_special_tokens=False)["input_ids"]]
        for a in ("xyz", "q")
    ]
    assert found == pytest.approx(by_label(path, rows, tokens=True)[:, 0].tolist(), abs=1e-4)


def test_d1_chat_has_one_bos(scorers: dict[tuple[str, str], Path]) -> None:
    path = scorers["llama", "right"]
    found, _ = logits(section(path, chat=True), [item("xyz"), item("q")])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    rows = [
        [1, *tokenizer(f"user ab</s>assistant {a}</s>", add_special_tokens=False)["input_ids"]]
        for a in ("xyz", "q")
    ]
    assert found == pytest.approx(reference_logits(path, rows), abs=1e-4)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_d3_over_length(
    scorers: dict[tuple[str, str], Path], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = scorers[kind, "right"]
    items = [item("c" * 500), item("x"), item("d" * 100 + "end")]
    found, _ = logits(section(path), items)
    assert [logit is None for logit in found] == [True, False, True]
    cut, _ = logits(section(path, over_length="cut_front"), items)
    assert all(logit is not None for logit in cut)
    assert "cut from the front" in caplog.text
    close = [2] if kind == "bert" else []
    tail = PreTrainedTokenizerFast.from_pretrained(path)(
        "d" * 100 + "end", add_special_tokens=False
    )["input_ids"]
    row = [1, *tail[len(tail) - (63 - len(close)) :], *close]
    assert len(row) == 64
    assert cut[2] == pytest.approx(reference_logits(path, [row])[0], abs=1e-4)
    short, _ = logits(section(path, max_context=8), [item("x"), item("xxxxxxxx")])
    assert [logit is None for logit in short] == [False, True]


def test_d3_a_chat_is_cut_behind_its_bos(scorers: dict[tuple[str, str], Path]) -> None:
    path = scorers["llama", "right"]
    text = "d" * 100 + "end"
    cut, _ = logits(section(path, chat=True, over_length="cut_front"), [item(text), item("x")])
    tail = PreTrainedTokenizerFast.from_pretrained(path)(
        f"{text}</s>", add_special_tokens=False
    )["input_ids"][-63:]  # fmt: skip
    assert cut[0] == pytest.approx(reference_logits(path, [[1, *tail]])[0], abs=1e-4)


class FakeScorer:
    """Scores by length; can be slow, broken, or say odd things."""

    def __init__(self, delay: float = 0.0, error: Exception | None = None) -> None:
        self.delay, self.error = delay, error
        self.batches: list[int] = []
        self.odd: dict[str, float | None] = {"nan": math.nan, "inf": -math.inf, "long": None}

    async def start(self) -> None: ...

    async def logits(self, items: Sequence[ScoreItem]) -> list[Logit]:
        self.batches.append(len(items))
        await asyncio.sleep(self.delay)
        if self.error:
            raise self.error
        sizes = [len(item.completion) for item in items]
        return [
            Logit(self.odd.get(item.completion, float(size)), repr(size), size, size)
            for item, size in zip(items, sizes, strict=True)
        ]

    async def check_rows(self, items: Sequence[ScoreItem], *, reference: bool) -> RowCheck:
        return RowCheck()

    async def health(self) -> None: ...

    async def drain_spans(self) -> list[Span]:
        return [Span("reward/scorer", 0, "score", 0.0, 1.0, 0.5)]

    async def stop(self) -> None: ...


class Choosy(FakeScorer):
    """Refuses a batch that has an odd text."""

    def __init__(self, refusal: Exception) -> None:
        super().__init__()
        self.refusal = refusal

    async def logits(self, items: Sequence[ScoreItem]) -> list[Logit]:
        if any(one.completion == "odd" for one in items):
            raise self.refusal
        return await super().logits(items)


def scored(fakes: list[FakeScorer], items: list[ScoreItem], **settings: Any) -> list[Reward]:
    async def main() -> list[Reward]:
        source = DisRM("scorer", section("m", **settings), fakes)
        await source.start()
        try:
            parts = await asyncio.wait_for(asyncio.gather(*(source.score([i]) for i in items)), 30)
            return [reward for (reward,) in parts]
        finally:
            await source.stop()

    return asyncio.run(main())


def test_d4_non_finite_and_too_long() -> None:
    rewards = scored([FakeScorer()], [item(t) for t in ("abc", "nan", "inf", "long", "z")])
    assert [(r.status, r.value, r.cause) for r in rewards] == [
        ("scored", 3.0, None),
        ("failed", None, "non_finite"),
        ("failed", None, "non_finite"),
        ("failed", None, "too_long"),
        ("scored", 1.0, None),
    ]


def test_waiting_items_share_batches_among_free_scorers() -> None:
    fakes = [FakeScorer(0.01), FakeScorer(0.01)]
    rewards = scored(fakes, [item("x" * i) for i in range(50)], seats=10)
    assert [reward.value for reward in rewards] == [float(i) for i in range(50)]
    assert sum(fakes[0].batches + fakes[1].batches) == 50
    assert max(fakes[0].batches + fakes[1].batches) <= 10
    assert all(fake.batches for fake in fakes)
    quick, slow = FakeScorer(0.0), FakeScorer(0.5)
    scored([slow, quick], [item("x")] * 30, seats=2)
    assert len(quick.batches) > len(slow.batches)


def test_a_broken_scorer_steps_back() -> None:
    dead, alive = FakeScorer(error=RuntimeError("actor died")), FakeScorer(0.001)
    rewards = scored([dead, alive], [item("x")] * 40, seats=2)
    assert len(dead.batches) == 1
    assert all(reward.status == "scored" for reward in rewards), "each was asked of the other one"
    rewards = scored([FakeScorer(60)], [item("x")], deadline_seconds=0.1)
    assert rewards[0].cause == "timeout"


@pytest.mark.parametrize("error", [RuntimeError("odd token"), RequestRefused("odd token")])
def test_a_text_that_a_scorer_cannot_take_fails_alone(error: Exception) -> None:
    found = scored(
        [Choosy(error)], [item(text) for text in ("a", "bb", "odd", "cccc", "ddddd", "f")]
    )
    assert [r.value for r in found] == [1.0, 2.0, None, 4.0, 5.0, 1.0]
    assert found[2].status == "failed"
    assert "odd token" in found[2].reason


def test_a_scorer_that_fails_at_everything_is_not_asked_for_each() -> None:
    broken = FakeScorer(error=RuntimeError("out of memory"))
    found = scored([broken], [item("a") for _ in range(20)], retries=0)
    assert [r.cause for r in found] == ["unavailable"] * 3 + ["untried"] * 17
    assert "out of memory" in found[-1].reason
    assert broken.batches == [20, 1, 1, 1]


@pytest.mark.parametrize("error", [RuntimeError("odd token"), RequestRefused("odd token")])
def test_texts_that_a_scorer_cannot_take_take_no_other_along(error: Exception) -> None:
    async def main() -> list[float | None]:
        config = section("m", retries=0)
        source = DisRM("scorer", config, [Choosy(error)])
        loop = await RewardLoop.create({"scorer": source}, {"scorer": config})
        try:
            found = await loop.score_group([item(text) for text in [*["odd"] * 5, "a", "bb"]])
        finally:
            await loop.stop()
        return [one.total for one in found]

    assert asyncio.run(main()) == [None] * 5 + [1.0, 2.0]


def test_whatever_breaks_one_batch_the_next_one_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who served the line and is gone would leave all later samples waiting for ever."""

    async def main() -> list[Reward]:
        source = DisRM("scorer", section("m"), [FakeScorer()])
        await source.start()
        reads = source._reward
        monkeypatch.setattr(source, "_reward", None)
        (broken,) = await source.score([item("a")])
        monkeypatch.setattr(source, "_reward", reads)
        async with asyncio.timeout(10):
            (well,) = await source.score([item("a")])
        await source.stop()
        return [broken, well]

    broken, well = asyncio.run(main())
    assert (broken.cause, well.value) == ("unavailable", 1.0)
    assert "not callable" in broken.reason


def test_what_was_cut_is_told_and_counted() -> None:
    class Cutter(FakeScorer):
        async def logits(self, items: Sequence[ScoreItem]) -> list[Logit]:
            sizes = [len(one.completion) for one in items]
            return [
                Logit(1.0, "1", size, 5) if size < 50 else Logit(None, tokens=size)
                for size in sizes
            ]

    async def main() -> tuple[list[Reward], dict[str, float], dict[str, float]]:
        source = DisRM("scorer", section("m", over_length="cut_front"), [Cutter()])
        other = DisRM("other", section("m"), [FakeScorer(), FakeScorer()])
        await source.start()
        rewards = await source.score([item("x" * size) for size in (5, 9, 7, 60)])
        facts = dict(source.facts())
        assert source.down_since is None
        await source.stop()
        return rewards, facts, dict(other.facts())

    rewards, facts, others = asyncio.run(main())
    assert [(r.status, r.reason) for r in rewards] == [
        ("scored", ""),
        ("scored", "cut from the front, from 9 to 5 tokens"),
        ("scored", "cut from the front, from 7 to 5 tokens"),
        ("failed", "the text has 60 tokens, more than the scorer takes"),
    ]
    assert facts == {"replicas": 1.0, "waiting": 0.0, "cut": 2.0}
    assert others == {"replicas": 2.0, "waiting": 0.0}


def test_d4_logits_that_are_no_numbers_in_every_reading(tmp_path: Path) -> None:
    """The weights of one label of a real model are rotten: what hangs on them fails by cause."""
    path = make_scorer(tmp_path / "m", "bert", "right", labels=3)

    def causes(**settings: Any) -> list[str | None]:
        config = section(path, **settings)

        async def main() -> list[Reward]:
            scorer = TransformersScorer("scorer", config)
            await scorer.start()
            source = DisRM("scorer", config, [scorer])
            await source.start()
            with torch.no_grad():
                scorer._model.classifier.bias[2] = math.inf
            rewards = await source.score([item("abc"), item("z")])
            await source.stop()
            await scorer.stop()
            return rewards

        return [reward.cause for reward in asyncio.run(main())]

    assert causes(label=2) == ["non_finite"] * 2
    assert causes(label_values={"0": 0, "1": 1, "2": 2}) == ["non_finite"] * 2
    assert causes(label=1) == [None] * 2


def test_d5_scores_flow_through_the_loop(scorers: dict[tuple[str, str], Path]) -> None:
    """Nothing but a text is needed: no extra information of the reward travels."""
    path = scorers["bert", "left"]
    config = section(path)

    async def main() -> None:
        scorer = TransformersScorer("scorer", config)
        await scorer.start()
        source = build_source("scorer", config, scorers=[scorer])
        loop = await RewardLoop.create({"scorer": source}, {"scorer": config})
        results = await asyncio.gather(*(loop.score(item(text)) for text in TEXTS[:4]))
        assert all(r.verdict == "keep" and r.total is not None for r in results)
        expected = [one.value for one in await scorer.logits([item(t) for t in TEXTS[:4]])]
        assert [r.total for r in results] == pytest.approx(expected, abs=1e-4)
        assert loop.stats()["scorer"].scored == 4
        assert {span.role for span in await loop.drain_spans()} == {"reward/scorer"}
        await loop.stop()
        await scorer.stop()

    asyncio.run(main())


def test_a_text_that_cannot_be_rendered_fails_alone(
    scorers: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ answer }}{{ reference.upper() }}")
    config = section(scorers["llama", "right"], template=template)

    async def main() -> list[Reward]:
        scorer = TransformersScorer("scorer", config)
        await scorer.start()
        source = DisRM("scorer", config, [scorer])
        await source.start()
        rewards = await source.score([item("a", "r"), item("b"), item("c", "r")])
        await source.stop()
        await scorer.stop()
        return rewards

    first, broken, last = asyncio.run(main())
    assert (first.status, last.status) == ("scored", "scored")
    assert broken.cause == "template_error"
    assert "upper" in broken.reason


def test_directories_that_are_no_scorers(tmp_path: Path) -> None:
    two = make_scorer(tmp_path / "two", "bert", "right", labels=2)
    with pytest.raises(UserError, match=r"two has 2 labels \(LABEL_0, LABEL_1\); set label to"):
        logits(section(two), [])
    with pytest.raises(UserError, match=r"reward\.scorer\.label: 'best' is no label"):
        logits(section(two, label="best"), [])
    tokens = make_scorer(tmp_path / "tokens", "llama", "right", labels=2, token_level=True)
    with pytest.raises(UserError, match=r"tokens has 2 labels"):
        logits(section(tokens), [])
    one = make_scorer(tmp_path / "one", "bert", "right")
    with pytest.raises(UserError, match=r"one has one logit, which is the reward; leave it out"):
        logits(section(one, label=0), [])
    config = BertConfig.from_pretrained(one, num_labels=4)
    config.save_pretrained(one)
    with pytest.raises(UserError, match=r"no scorer can be loaded from .*one"):
        logits(section(one, label=0), [])
    headless = make_scorer(tmp_path / "headless", "llama", "right")
    sizes = dict(vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_labels=1)
    LlamaForCausalLM(config).save_pretrained(headless)
    with pytest.raises(UserError, match=r"headless has no trained weights for score"):
        logits(section(headless), [])
    with pytest.raises(UserError, match=r"absent"):
        logits(section(tmp_path / "absent"), [])
    with pytest.raises(UserError, match="at least one scorer"):
        DisRM("scorer", section("m"), [])
