"""The check before a scorer may train: real models that fail in real ways are refused, by name."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from offbeat.config import RewardSourceSection
from offbeat.errors import DeadlinePassed, RunFailed, UserError
from offbeat.records import Prompt, Reward, ScoreItem
from offbeat.reward import replicas as replicas_module
from offbeat.reward.disrm import DisRM
from offbeat.reward.parity import CheckRow, RowCheck, difference
from offbeat.reward.scorer import TransformersScorer
from offbeat.testing.tiny import make_tiny_scorer

LABELS = ("bad", "ok", "good")
KINDS: dict[str, dict[str, Any]] = {
    "bert": {},
    "bert-labels": {"labels": LABELS},
    "bert-tokens": {"labels": LABELS, "token_level": True},
    "llama": {"decoder": True},
    "llama-labels": {"decoder": True, "labels": LABELS},
    "llama-tokens": {"decoder": True, "token_level": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    root = tmp_path_factory.mktemp("models")

    def model(kind: str, seed: int = 0) -> Path:
        path = root / f"{kind}-{seed}"
        return path if path.exists() else make_tiny_scorer(path, seed, **KINDS[kind])

    return model


def section(path: Path, kind: str = "bert", **settings: Any) -> RewardSourceSection:
    base: dict[str, Any] = {"kind": "disrm", "model": str(path)}
    if "labels" in KINDS[kind] and "label_values" not in settings:
        base["label"] = "good"
    return RewardSourceSection.model_validate(base | settings)


def item(answer: str, **columns: Any) -> ScoreItem:
    prompt = Prompt(0, np.zeros(0, np.int32), "p", "max of 3, 4?", columns=columns)
    return ScoreItem(prompt, answer)


def checked(
    *scorers: TransformersScorer,
    settings: RewardSourceSection,
    examples: Sequence[ScoreItem] = (),
    asked: Sequence[ScoreItem] = (),
) -> list[Reward]:
    """Starts the scorers and the source over them; scores `asked`."""

    async def main() -> list[Reward]:
        source = DisRM("scorer", settings, scorers, examples=examples)
        try:
            for scorer in scorers:
                await scorer.start()
            await source.start()
            return await source.score(asked)
        finally:
            await source.stop()
            for scorer in scorers:
                await scorer.stop()

    return asyncio.run(main())


# -- models that are well ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_models_that_are_well_start(
    models: Callable[..., Path], kind: str, side: str, tmp_path: Path
) -> None:
    path = models(kind)
    tokenizer = tmp_path / "tokenizer"
    PreTrainedTokenizerFast.from_pretrained(path, padding_side=side).save_pretrained(tokenizer)
    settings = section(path, kind, chat=kind.startswith("llama"))
    pool = [
        TransformersScorer("scorer", settings, replica=place, tokenizer=tokenizer)
        for place in range(2)
    ]
    rewards = checked(*pool, settings=settings, examples=[item("4")], asked=[item("4")])
    assert [reward.status for reward in rewards] == ["scored"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_ways_are_asked_and_agree(models: Callable[..., Path], dtype: str) -> None:
    path = models("bert-labels")
    values = {"bad": 0, "ok": 0.5, "good": 1}
    settings = section(path, "bert-labels", dtype=dtype, label_values=values)

    async def main() -> list[RowCheck]:
        scorer = TransformersScorer("scorer", settings)
        await scorer.start()
        examples = [item("3 < 4, so 4" * n) for n in (1, 30, 2, 3, 4)]
        checks = [await scorer.check_rows(examples, reference=told) for told in (True, False)]
        await scorer.stop()
        return checks

    check, short = asyncio.run(main())
    assert difference({"replica 0": check}) is None
    assert len(check.rows) == 9  # six of its own, three of five examples
    assert check.rows[6].text == "max of 3, 4?\n3 < 4, so 4"
    assert len({len(row.ids) for row in check.rows}) >= 7
    assert max(len(row.ids) for row in check.rows[6:]) == 128
    assert check.transformers is not None
    assert check.padded is not None
    for found in (check.alone, check.together, check.transformers, check.padded):
        assert len(found) == len(check.rows)
        assert np.std(found) > 0.01
    assert (short.transformers, short.padded) == (None, None)
    assert short.alone == check.alone
    # In bfloat16 the reference is another copy, in float32.
    assert (check.transformers == check.alone) == (dtype == "float32")


def test_rows_go_through_the_sources_template_where_it_takes_them(
    models: Callable[..., Path], tmp_path: Path
) -> None:
    template = tmp_path / "t.jinja"

    def texts(text: str) -> list[str]:
        template.write_text(text)

        async def main() -> list[str]:
            scorer = TransformersScorer("scorer", section(models("bert"), template=template))
            await scorer.start()
            check = await scorer.check_rows([item("4", task="m")], reference=False)
            await scorer.stop()
            return [row.text for row in check.rows]

        return asyncio.run(main())

    assert texts("{{ answer }} for {{ reference }}")[3] == "The answer is 41. for 42"
    found = texts("{{ columns.task }}: {{ answer }}")
    assert found[3] == "What is 6 times 7?\nThe answer is 41."  # there is no such column
    assert found[-1] == "m: 4"


# -- models and replicas that are not -------------------------------------------------------------


class NoMask(TransformersScorer):
    """Pads on the right and lets the model see it."""

    def _forward(self, rows: list[list[int]]) -> list[list[float]]:
        logits: list[list[float]] = [[] for _ in rows]
        for chunk in self._chunks(rows):
            for i, found in zip(chunk, self._batch([rows[i] for i in chunk]), strict=True):
                logits[i] = found
        return logits

    def _batch(self, rows: list[list[int]]) -> list[list[float]]:
        ids, _ = self._padded(rows, left=False)
        with torch.inference_mode():
            return self._read(self._model(input_ids=ids).logits)

    def _padded(self, rows: list[list[int]], *, left: bool) -> tuple[Any, Any]:
        def wide(row: list[int], filling: int) -> list[int]:
            more = [filling] * (max(map(len, rows)) - len(row))
            return more + row if left else row + more

        ids = [wide(row, self._model.config.pad_token_id) for row in rows]
        return torch.tensor(ids), torch.tensor([wide([1] * len(row), 0) for row in rows])

    def _read(self, logits: Any) -> list[list[float]]:
        found: list[list[float]] = logits.tolist()
        return found


class LeftPadded(NoMask):
    """Pads on the left of a model that counts positions from the row's begin."""

    def _batch(self, rows: list[list[int]]) -> list[list[float]]:
        ids, mask = self._padded(rows, left=True)
        with torch.inference_mode():
            return self._read(self._model(input_ids=ids, attention_mask=mask).logits)


class LastColumn(NoMask):
    """Reads the last column of a batch that is padded on the right."""

    def _batch(self, rows: list[list[int]]) -> list[list[float]]:
        ids, mask = self._padded(rows, left=False)
        with torch.inference_mode():
            return self._read(self._model(input_ids=ids, attention_mask=mask).logits[:, -1])


class PadIsText(NoMask):
    """Takes every pad id for padding, also the ends of turns in the text."""

    def _batch(self, rows: list[list[int]]) -> list[list[float]]:
        ids, _ = self._padded(rows, left=False)
        mask = (ids != self._model.config.pad_token_id).long()
        with torch.inference_mode():
            return self._read(self._model(input_ids=ids, attention_mask=mask).logits)


class FirstPad(NoMask):
    """Pools before the first pad id, as transformers did once (its issue 35352)."""

    def _batch(self, rows: list[list[int]]) -> list[list[float]]:
        ids, mask = self._padded(rows, left=False)
        ends = (ids == self._model.config.pad_token_id).int().argmax(-1) - 1
        with torch.inference_mode():
            hidden = self._model.model(input_ids=ids, attention_mask=mask).last_hidden_state
            return self._read(self._model.score(hidden)[torch.arange(len(rows)), ends])


@pytest.mark.parametrize(
    ("broken", "kind", "words"),
    [
        (NoMask, "bert", "replica 0, all rows together: .*; replica 0, the row alone: .*seats = 1"),
        (LeftPadded, "bert", "replica 0, all rows together: .*; replica 0, the row alone: "),
        (LastColumn, "bert-tokens", "replica 0, all rows together: .*the row alone: .*seats = 1"),
        (LastColumn, "llama-tokens", "replica 0, all rows together: .*; replica 0, the row alone"),
        (PadIsText, "llama", "replica 0, the row alone: .*; transformers, the row alone: "),
        (FirstPad, "llama", "replica 0, the row alone: .*; transformers, the row alone: "),
    ],
)
def test_a_model_that_is_pooled_or_masked_wrongly_is_refused(
    models: Callable[..., Path], broken: type[TransformersScorer], kind: str, words: str
) -> None:
    path = models(kind)
    settings = section(path, kind, chat=kind == "llama")
    with pytest.raises(UserError, match=words) as refused:
        checked(broken("scorer", settings), settings=settings)
    assert str(refused.value).startswith(
        f"reward.scorer.model: {path} does not give a row the same"
    )
    assert "\n" not in str(refused.value)


def test_the_mend_for_a_batch_works(models: Callable[..., Path]) -> None:
    settings = section(models("bert"), seats=1)
    rewards = checked(NoMask("scorer", settings), settings=settings, asked=[item("4")])
    assert rewards[0].status == "scored"


def test_a_replica_with_other_weights_is_named(models: Callable[..., Path]) -> None:
    settings = section(models("bert"))
    other = section(models("bert", 1))
    pool = [TransformersScorer("scorer", one) for one in (settings, settings, other)]
    with pytest.raises(UserError) as refused:
        checked(*pool, settings=settings)
    words = str(refused.value)
    assert "replica 2, the row alone: " in words
    assert "; replica 0, the row alone: " in words
    assert "the same files of the model" in words


def test_a_replica_with_another_tokenizer_is_named(models: Callable[..., Path]) -> None:
    settings = section(models("bert"))
    other = models("llama")
    pool = [TransformersScorer("scorer", settings, tokenizer=at) for at in (None, other)]
    with pytest.raises(
        UserError, match=r"replica 0 reads 6 rows, 'a', 3 tokens among them, where "
    ):
        checked(*pool, settings=settings)


def test_weights_that_are_no_numbers_are_refused(models: Callable[..., Path]) -> None:
    settings = section(models("bert"))

    class Rotten(TransformersScorer):
        def _load(self) -> None:
            super()._load()
            with torch.no_grad():
                self._model.classifier.bias.fill_(math.nan)

    with pytest.raises(UserError, match=r"transformers, the row alone: nan; give a model whose"):
        checked(Rotten("scorer", settings), settings=settings)


def test_a_replacement_with_other_weights_does_not_join(
    models: Callable[..., Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replacement has other weights; the second is as the dead one was, and serves."""
    monkeypatch.setattr(replicas_module, "RESTART_PAUSE_SECONDS", 0.01)
    caplog.set_level(logging.WARNING)
    settings = section(models("bert"))
    wrong = TransformersScorer("scorer", section(models("bert", 1)))
    right, dying = (TransformersScorer("scorer", settings) for _ in range(2))
    stock = [wrong, right]

    async def replace_scorer(index: int) -> TransformersScorer:
        fresh = stock.pop(0)
        await fresh.start()
        return fresh

    async def main() -> tuple[list[Reward], list[Reward]]:
        await dying.start()
        source = DisRM("scorer", settings, [dying], replace_scorer=replace_scorer)
        await source.start()
        before = await source.score([item("4")])
        await dying.stop()
        assert source.down_since is None
        lost = await source.score([item("4")])
        assert lost[0].cause == "replica_lost"
        assert source.down_since == pytest.approx(asyncio.get_running_loop().time(), abs=60)
        assert source.facts()["replicas"] == 0
        async with asyncio.timeout(60):
            after = await source.score([item("4")])
        assert source.facts()["replicas"] == 1
        assert source.down_since is None
        await source.stop()
        with pytest.raises(RunFailed, match="not running"):
            await wrong.health()
        await right.stop()
        return before, after

    before, after = asyncio.run(main())
    assert after[0].value == before[0].value
    assert "replica 0 after its restart, the row alone: " in caplog.text
    assert "the first replica at start, the row alone: " in caplog.text


def test_the_users_mistake_goes_before_other_failures_and_no_wait_is_endless(
    models: Callable[..., Path],
) -> None:
    class Failing(TransformersScorer):
        failure: Exception | None = None

        async def check_rows(self, items: Sequence[ScoreItem], *, reference: bool) -> RowCheck:
            if self.failure is None:
                await asyncio.sleep(3600)
            raise self.failure or RuntimeError

    settings = section(models("bert"))
    pool = [Failing("scorer", settings) for _ in range(2)]

    async def main() -> None:
        pool[0].failure, pool[1].failure = RunFailed("dead"), UserError("mend it")
        with pytest.raises(UserError, match="mend it"):
            await DisRM("scorer", settings, pool).start()
        with pytest.raises(RunFailed, match=r"reward\.scorer: replica 0 failed .* RunFailed: dead"):
            await DisRM("scorer", settings, pool[:1]).start()
        pool[1].failure = None
        with pytest.raises(DeadlinePassed, match=r"reward\.scorer: its replicas did not score"):
            await DisRM("scorer", settings, pool[1:], start_deadline_seconds=0.1).start()

    asyncio.run(main())


# -- the comparison itself ----------------------------------------------------------------------

ROWS = tuple(CheckRow(text, tuple(range(size))) for text, size in (("a", 1), ("b", 2), ("c", 3)))


def check(*alone: float, **more: Any) -> RowCheck:
    return RowCheck(ROWS, alone, more.pop("together", alone), **more)


@pytest.mark.parametrize(
    ("found", "wanted", "words"),
    [
        ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0019), None),
        (
            (1.0, 2.0, 3.0),
            (1.0, 2.0, 3.0021),
            "row 3 of 3 ('c', 3 tokens): .*: 3; .*: 3.0021; ",
        ),
        ((1.0, math.nan, 3.0), (1.0, 2.0, 3.0), "row 2 of 3 ('b', 2 tokens): .*: nan"),
        ((1.0, 2.0, math.inf), (1.0, 2.0, math.inf), "row 3 of 3 ('c', 3 tokens): .*alone: inf"),
        # All rows alike: a wrong pooling is seen in far smaller gaps than their size.
        ((100.0, 100.0, 100.005), (100.0, 100.0, 100.0), None),
        ((100.0, 100.0, 100.02), (100.0, 100.0, 100.0), "100.02; .*: 100; 0.01 apart is allowed"),
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), None),
        ((1e-7, 0.0, 0.0), (0.0, 0.0, 0.0), "row 1 of 3 ('a', 1 token): "),
    ],
)
def test_where_scores_differ(
    found: tuple[float, ...], wanted: tuple[float, ...], words: str | None
) -> None:
    told = difference({"replica 0": check(*wanted, together=found)})
    assert (told is None) == (words is None)
    if told and words:
        assert told.kind == ("batch" if all(map(math.isfinite, found)) else "not_finite")
        for part in words.split(".*"):
            assert part in told.words


def test_what_is_compared_first() -> None:
    good, bad = (1.0, 2.0, 3.0), (1.0, 2.0, 4.0)
    cases = {
        "padding": [check(*bad, transformers=good, padded=bad)],
        "backend": [check(*bad, transformers=good, padded=good)],
        "replicas": [check(*good, transformers=good, padded=good), check(*bad)],
        "batch": [check(*good), check(*good, together=bad)],
    }
    for kind, checks in cases.items():
        told = difference({f"replica {i}": one for i, one in enumerate(checks)})
        assert told is not None
        assert told.kind == kind
        assert ("replica 1" in told.words) == (kind in {"replicas", "batch"})
    fewer = RowCheck(ROWS[:2], good[:2], good[:2])
    told = difference({"replica 0": check(*good), "replica 1": fewer})
    assert told is not None
    assert "replica 0 reads 3 rows, 'c', 3 tokens among them" in told.words
    assert difference({"replica 0": RowCheck(), "replica 1": RowCheck()}) is None
