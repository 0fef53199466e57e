"""What a scorer proves at start, without vLLM: rows, reference, tolerance, its head."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, RobertaConfig

from offbeat.cluster.build import make_scorer
from offbeat.cluster.specs import ScorerSpec
from offbeat.config import RewardSourceSection
from offbeat.errors import RunFailed, UserError
from offbeat.reward import scorer_check
from offbeat.reward.parity import RowCheck
from offbeat.reward.rows import RowEncoder
from offbeat.reward.scorer import TransformersScorer
from offbeat.reward.scorer_check import check_head, check_rows, in_transformers, tolerance
from offbeat.rollout import vllm_args
from offbeat.testing.tiny import make_tiny_scorer


def section(path: Path, **settings: Any) -> RewardSourceSection:
    base = {"kind": "disrm", "model": str(path), "engine": "vllm"}
    return RewardSourceSection.model_validate(base | settings)


def test_the_tolerance_follows_the_dtype(tmp_path: Path) -> None:
    assert tolerance(section(tmp_path), "cpu") == 1e-3
    assert tolerance(section(tmp_path, dtype="auto"), "cpu") == 1e-3
    assert (
        1e-3
        < tolerance(section(tmp_path), "cuda")
        < tolerance(section(tmp_path, dtype="bfloat16"), "cuda")
    )


def reference(path: Path, rows: list[list[int]], **settings: Any) -> Any:
    return in_transformers(section(path, **settings), "reward.scorer.model", rows, lambda x: x[0])


@pytest.mark.parametrize("decoder", [False, True])
def test_rows_are_of_mixed_length_within_the_limit(tmp_path: Path, decoder: bool) -> None:
    path = make_tiny_scorer(tmp_path / "m", decoder=decoder)
    config = AutoConfig.from_pretrained(path)
    for limit in (1024, 20, 3):
        encoder = RowEncoder("scorer", section(path, max_context=limit, chat=decoder))
        encoder.load(config)
        rows = [list(row.ids) for row in check_rows(encoder, config, ())]
        lengths = {len(row) for row in rows}
        assert max(lengths) <= min(limit, 256)
        assert len(lengths) >= (5 if limit > 20 else 1)
        padded = [row for row in rows if row[-2:] == [config.pad_token_id] * 2]
        assert len(padded) == (limit > 3 or decoder)
    alone, in_batches = reference(path, rows)
    assert in_batches == pytest.approx(alone, rel=1e-4)
    assert len(alone) == len(rows)


def test_rows_of_a_model_that_counts_from_its_pad_hold_none(tmp_path: Path) -> None:
    path = make_tiny_scorer(tmp_path / "m")
    config = RobertaConfig(vocab_size=200, pad_token_id=0, max_position_embeddings=130)
    encoder = RowEncoder("scorer", section(path))
    encoder.load(config)
    rows = check_rows(encoder, config, ())
    assert len(rows) == 5
    assert all(config.pad_token_id not in row.ids for row in rows)


def test_a_large_model_is_not_loaded_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_check, "REFERENCE_BYTES", 1000)
    path = make_tiny_scorer(tmp_path / "m")
    monkeypatch.setattr(scorer_check, "load_model", None)  # nobody calls it
    assert reference(path, [[1], [1, 2]]) == (None, None)

    async def main() -> RowCheck:
        """In transformers the model that is there is compared with itself, in its own dtype."""
        scorer = TransformersScorer(
            "scorer", section(path, engine="transformers", dtype="bfloat16")
        )
        await scorer.start()
        check = await scorer.check_rows([], reference=True)
        await scorer.stop()
        return check

    check = asyncio.run(main())
    assert check.transformers == check.alone
    assert check.relative == 0.1


@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_a_model_must_have_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_level: bool, large: bool
) -> None:
    path = make_tiny_scorer(tmp_path / "m", token_level=token_level, decoder=True)
    config = AutoConfig.from_pretrained(path)
    if large:
        monkeypatch.setattr(scorer_check, "REFERENCE_BYTES", 1000)
    check_head(str(path), "reward.scorer.model", config)
    kept = load_file(path / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in kept.items() if not name.startswith("score.")},
        path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(UserError, match=r"m has no trained weights for score\."):
        check_head(str(path), "reward.scorer.model", config)


def test_a_head_that_the_files_name_otherwise_is_asked_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_scorer(tmp_path / "m")
    config = AutoConfig.from_pretrained(path)
    kept = load_file(path / "model.safetensors")
    kept["classifier.gamma"] = kept.pop("classifier.weight")
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    asked: list[str] = []
    monkeypatch.setattr(scorer_check, "load_model", lambda path, *more: asked.append(path))
    check_head(str(path), "reward.scorer.model", config)
    assert asked == [str(path)]


def test_without_vllm_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_args, "find_spec", lambda name: None)
    scorer = make_scorer(ScorerSpec("scorer", 0, section(make_tiny_scorer(tmp_path / "m")), "cpu"))

    async def main() -> None:
        with pytest.raises(UserError, match=r"-e '\.\[vllm\]' \(GPU\)"):
            await scorer.start()
        with pytest.raises(RunFailed, match=r"the scorer of reward\.scorer is not running"):
            await scorer.logits([])

    asyncio.run(main())
