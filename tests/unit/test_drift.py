"""Why engine and trainer differ: from made-up statistics, and with a real engine at fault."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine_models import make_model
from trainer_cases import make_config

from offbeat.records import (
    Batch,
    Completion,
    GenerateRequest,
    Group,
    Manifest,
    Payload,
    Prompt,
    Sample,
    Sampling,
)
from offbeat.rollout.transformers_engine import TransformersEngine
from offbeat.train import probe
from offbeat.train.drift import DriftContext, DriftStats, cause_of, compare, diagnose
from offbeat.train.step import StepResult
from offbeat.train.trainer import Trainer
from offbeat.weights.transport import load_manifest

EXACT = DriftContext("float32", "float32", "recompute", 1.0)
ROUGH = replace(EXACT, engine_dtype="bfloat16")
KEEP = replace(EXACT, on_update="keep_kv")
FINE = DriftStats(1000, True, 1e-5, 1e-4, 1e-3, 0.0, unmixed=1e-5)
OFF = replace(FINE, mean=0.06, p99=0.4, max=1.0, outside=0.2, left=0.06, unmixed=0.06)


def said(stats: DriftStats, context: DriftContext = EXACT) -> str | None:
    text = diagnose(stats, context)
    return None if text is None else cause_of(text)


@pytest.mark.parametrize(
    ("stats", "context", "cause"),
    [
        (FINE, EXACT, None),
        (OFF, EXACT, "unexplained"),
        (OFF, ROUGH, "engine numerics"),
        (OFF, replace(EXACT, trainer_dtype="bfloat16"), "engine numerics"),
        (replace(OFF, mean=0.01, outside=0.01), ROUGH, None),  # as bfloat16 is
        (replace(OFF, mean=0.01, outside=0.01), EXACT, "unexplained"),
        (replace(OFF, version=7, fits={5: 0.05, 6: 0.001, 7: 0.06}), EXACT, "weights not loaded"),
        (replace(OFF, version=7, fits={6: 0.05, 7: 0.06}), EXACT, "unexplained"),
        (
            replace(OFF, version=7, fits={6: 0.02, 7: 0.06}, like_engine=0.01),
            ROUGH,
            "engine numerics",
        ),
        (
            replace(OFF, version=7, fits={6: 0.002, 7: 0.06}, like_engine=0.01),
            ROUGH,
            "weights not loaded",
        ),
        (
            replace(OFF, version=7, fits={6: 0.02, 7: 0.06}, like_engine=0.05),
            ROUGH,
            "weights not loaded",
        ),
        (replace(OFF, mixed=0.3, unmixed=1e-5), KEEP, "stale KV cache"),
        (replace(OFF, mixed=0.3, unmixed=None), KEEP, "stale KV cache"),
        (replace(OFF, mixed=0.3, unmixed=1e-5), EXACT, "stale KV cache"),
        (replace(OFF, mixed=0.06), KEEP, "unexplained"),
        (replace(OFF, slope=1.4, left=0.02), EXACT, "temperature"),
        (replace(OFF, slope=0.7, left=0.02), ROUGH, "temperature"),
        (replace(OFF, slope=1.4, left=0.05), EXACT, "unexplained"),
        (replace(OFF, slope=1.01, left=0.001), EXACT, "unexplained"),
        (replace(FINE, by_lag={0: 1e-5, 2: 0.4}, ratio_outside=0.5), EXACT, "policy change"),
        (replace(FINE, by_lag={0: 1e-5, 2: 0.4}, ratio_outside=0.05), EXACT, None),
        (replace(OFF, tokens=5), EXACT, None),
        (replace(OFF, exact=False), EXACT, None),
        (compare(*np.zeros((2, 0)), np.zeros(0, bool), exact=True), EXACT, None),
    ],
)
def test_each_cause_is_named(stats: DriftStats, context: DriftContext, cause: str | None) -> None:
    assert said(stats, context) == cause


def test_the_sentence_has_the_figures_and_what_to_do() -> None:
    text = diagnose(replace(OFF, version=7, fits={6: 0.001, 7: 0.06}), EXACT)
    assert text is not None
    assert "tokens of version 7 fit version 6 better (0.001 instead of 0.06 nats)" in text
    text = diagnose(replace(OFF, mixed=0.3, unmixed=1e-5), KEEP)
    assert text is not None
    assert '"recompute" does not' in text


def test_statistics_of_log_probs() -> None:
    rng = np.random.default_rng(0)
    engine = -rng.exponential(2.0, 1000)
    mixed = np.arange(1000) % 4 == 0
    trainer = 1.5 * engine - 0.25
    trainer[5] = np.nan
    stats = compare(engine, trainer, mixed, exact=True)
    off = np.delete(np.abs(trainer - engine), 5)
    assert stats.tokens == 999
    assert stats.mean == pytest.approx(off.mean())
    assert stats.p99 == pytest.approx(np.quantile(off, 0.99))
    assert stats.max == pytest.approx(off.max())
    assert stats.slope == pytest.approx(1.5)
    assert stats.left == pytest.approx(0, abs=1e-9)
    assert stats.mixed == pytest.approx(np.abs(trainer - engine)[mixed].mean())
    ratios = np.exp(np.delete(trainer - engine, 5))
    assert stats.outside == pytest.approx(((ratios < 0.9) | (ratios > 1.1)).mean())


class Rig:
    """A trainer and a real engine that generates for it; `fault` is put between them."""

    def __init__(
        self,
        path: Path,
        on_update: Any = "recompute",
        rate: float = 2e-3,
        dtype: str = "float32",
        engine_dtype: str = "auto",
    ) -> None:
        settings = make_config(
            path, learning_rate=rate, warmup_steps=0, max_staleness=4, dtype=dtype
        )
        rollout = settings.rollout.model_copy(
            update={
                "on_update": on_update, "max_tokens": 40, "max_context": 64, "dtype": engine_dtype,
            }
        )  # fmt: skip
        self.trainer = Trainer(
            settings.model_copy(update={"rollout": rollout}),
            total_steps=20, lineage=0, publish_folder=path.parent / "weights", run_id="drift",
        )  # fmt: skip
        self.trainer.setup()
        self.stuck: Manifest | None = None
        self.engine = TransformersEngine(
            str(path), seats=16, max_context=64, on_update=on_update, load_manifest=self._load,
            dtype=dtype if engine_dtype == "auto" else engine_dtype,
        )  # fmt: skip
        self.temperature = 1.0
        self.step = 0

    def _load(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        return load_manifest(self.stuck or manifest)

    async def group(self, name: str) -> tuple[Group, list[Payload]]:
        ids = np.arange(5, 11, dtype=np.int32)
        request = GenerateRequest(name, ids, 8, Sampling(40, self.temperature))
        found: list[Completion] = [
            item async for item in self.engine.generate(request) if isinstance(item, Completion)
        ]
        random = np.random.default_rng(len(name))
        samples = tuple(Sample(c, {}, float(random.normal())) for c in found)
        return Group(Prompt(self.step, ids, "", ""), 0, 99, samples), [c.ref for c in found]

    def train(self, *groups: tuple[Group, list[Payload]]) -> StepResult:
        batch = Batch(self.step, tuple(group for group, _ in groups))
        self.step += 1
        return self.trainer.step(batch, [payloads for _, payloads in groups])

    async def update(self) -> Manifest:
        manifest = self.trainer.publish()
        await self.engine.load(manifest)
        return manifest

    async def close(self) -> None:
        await self.engine.stop()
        self.trainer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("drift") / "m", "llama-tied", eos_token_id=None)


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TIME_SHARE", 1e9)  # tiny steps: a probe in every one


@pytest.mark.parametrize(("rate", "cause"), [(1e-4, None), (5e-3, "policy change")])
def test_a_healthy_engine_is_fine_at_every_lag(model: Path, rate: float, cause: str | None) -> None:
    """Whatever the policy's change: that is named for what it is."""

    async def main() -> list[StepResult]:
        rig = Rig(model, rate=rate)
        await rig.engine.start()
        old = [await rig.group("old") for _ in range(4)]
        results = [rig.train(await rig.group("new"))]
        for late in old[:3]:  # version 0 at steps 1, 2, 3: no token of the current version
            await rig.update()
            results.append(rig.train(late))
        results.append(rig.train(old[3], await rig.group("newer")))
        await rig.close()
        return results

    results = asyncio.run(main())
    assert [r.staleness[0] for r in results] == [0, 1, 2, 3, 4]
    for result in results[:3]:
        assert result.logprob_diff_exact
        assert result.logprob_diff_tokens > 0
        assert result.logprob_diff_mean < 1e-4
    assert not results[3].logprob_diff_exact  # three versions are kept, and that is older
    assert np.isfinite(results[3].logprob_diff_mean)
    assert results[4].logprob_diff_exact
    assert results[0].drift is None
    assert [r.drift and cause_of(r.drift) for r in results[2:]] == [cause] * 3


@pytest.mark.parametrize(("engine_dtype", "cause"), [("auto", None), ("float32", "numerics")])
def test_bfloat16_agrees_where_both_round_alike(
    model: Path, engine_dtype: str, cause: str | None
) -> None:
    """Rates so small that most of a rounded weight stands still: an engine that does not round
    has another policy, which is not named as weights that were not loaded."""

    async def main() -> list[StepResult]:
        rig = Rig(model, rate=3e-4, dtype="bfloat16", engine_dtype=engine_dtype)
        await rig.engine.start()
        results = [rig.train(await rig.group("first"))]
        for name in ("second", "third", "fourth"):
            await rig.update()
            results.append(rig.train(await rig.group(name)))
        await rig.close()
        return results

    results = asyncio.run(main())
    assert all(result.logprob_diff_exact for result in results)
    if cause is None:
        assert all(result.drift is None for result in results)
        assert max(result.logprob_diff_mean for result in results) < 1e-2
    else:
        named = {cause_of(result.drift) for result in results if result.drift}
        assert named <= {"engine numerics"}


def test_an_engine_that_did_not_load_is_named(model: Path) -> None:
    async def main() -> list[StepResult]:
        rig = Rig(model)
        await rig.engine.start()
        results = [rig.train(await rig.group("first"))]
        rig.stuck = await rig.update()
        results.append(rig.train(await rig.group("second")))
        await rig.update()  # says version 2, holds version 1
        group = await rig.group("third")
        results.append(rig.train(group))
        rig.stuck = None
        await rig.update()
        results.append(rig.train(await rig.group("fourth")))
        await rig.close()
        return results

    results = asyncio.run(main())
    assert results[0].drift is results[1].drift is None
    assert results[2].drift is not None
    assert "weights not loaded: tokens of version 2 fit version 1 better" in results[2].drift
    assert results[3].drift is None


def test_a_wrong_temperature_is_named(model: Path) -> None:
    async def main() -> StepResult:
        rig = Rig(model)
        await rig.engine.start()
        rig.temperature = 0.7
        result = rig.train(await rig.group("cool"), await rig.group("cooler"))
        await rig.close()
        return result

    result = asyncio.run(main())
    assert cause_of(result.drift or "none") == "temperature"


@pytest.mark.parametrize("on_update", ["keep_kv", "recompute"])
def test_a_stale_cache_is_named_and_a_recomputed_one_is_fine(model: Path, on_update: Any) -> None:
    async def main() -> tuple[StepResult, list[Payload]]:
        rig = Rig(model, on_update, rate=5e-3)
        await rig.engine.start()
        rig.train(await rig.group("first"))
        across = asyncio.ensure_future(rig.group("across"))
        while not (await rig.engine.health()).running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        await rig.update()
        group, payloads = await across
        result = rig.train((group, payloads), await rig.group("after"))
        await rig.close()
        return result, payloads

    result, payloads = asyncio.run(main())
    assert any(p.versions[0] < p.versions[-1] for p in payloads), "no sample crossed the update"
    if on_update == "keep_kv":
        assert cause_of(result.drift or "none") == "stale KV cache"
    else:
        assert result.drift is None or cause_of(result.drift) == "policy change"
        assert result.logprob_diff_mean < 1e-4
