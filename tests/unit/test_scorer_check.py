"""What a scorer on vLLM proves at start, without vLLM: rows, reference, tolerance, its absence."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from offbeat.cluster.build import make_scorer
from offbeat.cluster.specs import ScorerSpec
from offbeat.config import RewardSourceSection
from offbeat.errors import RunFailed, UserError
from offbeat.reward import scorer_check
from offbeat.reward.rows import RowEncoder
from offbeat.reward.scorer_check import (
    check_rows,
    reference_logits,
    tolerance,
    where_they_differ,
)
from offbeat.rollout import vllm_args
from offbeat.testing.tiny import make_tiny_model, make_tiny_scorer


def section(path: Path, **settings: Any) -> RewardSourceSection:
    base = {"kind": "disrm", "model": str(path), "engine": "vllm"}
    return RewardSourceSection.model_validate(base | settings)


ROWS = [[1], [1, 2], [1, 2, 3]]


@pytest.mark.parametrize(
    ("found", "wanted", "words"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0019], None),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0021], "3 instead of 3.0021 for a row of 3 tokens"),
        ([1.0, math.nan, 3.0], [1.0, 2.0, 3.0], "nan instead of 2 for a row of 2 tokens"),
        ([1.0, 2.0, math.inf], [1.0, 2.0, 3.0], "inf instead of 3"),
        # All rows alike: a wrong pooling is seen in far smaller gaps than their size.
        ([100.0, 100.0, 100.005], [100.0, 100.0, 100.0], None),
        ([100.0, 100.0, 100.02], [100.0, 100.0, 100.0], "100.02 instead of 100"),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], None),
    ],
)
def test_where_they_differ(found: list[float], wanted: list[float], words: str | None) -> None:
    told = where_they_differ(ROWS, found, wanted, 1e-3)
    assert (told is None) == (words is None)
    assert words is None or words in (told or "")


def test_the_tolerance_follows_the_dtype(tmp_path: Path) -> None:
    assert tolerance(section(tmp_path), "cpu") == 1e-3
    assert tolerance(section(tmp_path, dtype="auto"), "cpu") == 1e-3
    assert (
        1e-3
        < tolerance(section(tmp_path), "cuda")
        < tolerance(section(tmp_path, dtype="bfloat16"), "cuda")
    )


def test_rows_are_of_mixed_length_within_the_limit(tmp_path: Path) -> None:
    path = make_tiny_scorer(tmp_path / "m")
    config = AutoConfig.from_pretrained(path)
    for limit in (1024, 20, 3):
        encoder = RowEncoder("scorer", section(path, max_context=limit))
        encoder.load(config)
        rows = check_rows(encoder, config)
        lengths = {len(row) for row in rows}
        assert max(lengths) <= min(limit, 128)
        assert len(lengths) >= (5 if limit > 20 else 1)
        padded = [row for row in rows if row[-2:] == [config.pad_token_id] * 2]
        assert len(padded) == (limit > 3)
    reference = reference_logits(str(path), "reward.scorer.model", rows)
    assert reference is not None
    assert len(reference) == len(rows)


def test_a_large_model_is_not_loaded_twice_but_must_have_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_check, "REFERENCE_BYTES", 1000)
    path = make_tiny_scorer(tmp_path / "m")
    assert reference_logits(str(path), "reward.scorer.model", ROWS) is None
    headless = make_tiny_model(tmp_path / "headless")
    config = LlamaConfig.from_pretrained(headless, num_labels=1)
    LlamaForCausalLM(config).save_pretrained(headless)
    with pytest.raises(UserError, match=r"headless has no trained weights for score\.weight"):
        reference_logits(str(headless), "reward.scorer.model", ROWS)


def test_without_vllm_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_args, "find_spec", lambda name: None)
    scorer = make_scorer(ScorerSpec("scorer", 0, section(make_tiny_scorer(tmp_path / "m")), "cpu"))

    async def main() -> None:
        with pytest.raises(UserError, match=r"-e '\.\[vllm\]' \(GPU\)"):
            await scorer.start()
        with pytest.raises(RunFailed, match=r"the scorer of reward\.scorer is not running"):
            await scorer.logits([])

    asyncio.run(main())
