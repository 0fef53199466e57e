"""The plot: a small PNG from any metrics.jsonl with a step, a named error from others."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import UserError
from offbeat.track.metrics import MetricsWriter
from offbeat.track.plot import plot, running_mean


def write_run(run_dir: Path, steps: int) -> None:
    rng = random.Random(1)
    writer = MetricsWriter(run_dir)
    for step in range(1, steps + 1):
        rise = 1 - math.exp(-step / 60)
        reward: dict[str, Any] = {
            "judge": None if step == 5 else 0.4 + 0.3 * rise + rng.gauss(0, 0.05),
            "scorer": -0.2 + 0.5 * rise + rng.gauss(0, 0.08),
            "correct": 0.2 + 0.6 * rise + rng.gauss(0, 0.06),
        }
        reward["total"] = sum(v for v in reward.values() if v is not None) / 2
        top = rng.choice([1, 1, 2])
        writer.write({
            "type": "step", "step": step, "reward": reward,
            "staleness": {"mean": top * rng.uniform(0.4, 0.8), "max": top, "histogram": {}},
        })  # fmt: skip
        if step % 20 == 1:
            metrics = {"accuracy": 0.22 + 0.55 * rise}
            writer.write({"type": "validation", "step": step, "version": "1", "metrics": metrics})
    writer.close()


@pytest.mark.parametrize("steps", [1, 200])
def test_a_run_becomes_a_small_png(tmp_path: Path, steps: int) -> None:
    write_run(tmp_path, steps)
    (tmp_path / "config.json").write_text(json.dumps({"train": {"max_staleness": 2}}))
    out = tmp_path / "pictures" / "run.png"
    plot(tmp_path, out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert 10_000 < out.stat().st_size < 150_000


def test_validations_by_data_source_have_lines_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path, 60)
    plot(tmp_path, tmp_path / "without.png")
    writer = MetricsWriter(tmp_path)
    for step in (1, 21, 41):
        metrics: dict[str, float] = {"accuracy": 0.4, "accuracy/gsm8k": 0.3, "accuracy/code": 0.5}
        if step == 21:  # nothing of it was scored
            metrics["accuracy/code"] = math.nan
        writer.write({"type": "validation", "step": step, "version": "1", "metrics": metrics})
    writer.close()
    plot(tmp_path, tmp_path / "with.png")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_without_validation_and_with_gaps(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    empty = {"mean": None, "max": None, "histogram": {}}
    for step in (1, 2):
        reward = {"total": None, "judge": None}
        writer.write({"type": "step", "step": step, "reward": reward, "staleness": empty})
    writer.close()
    plot(tmp_path, tmp_path / "run.png")
    assert (tmp_path / "run.png").exists()


def test_missing_or_empty_metrics_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(UserError, match=r"metrics\.jsonl does not exist"):
        plot(tmp_path, tmp_path / "run.png")
    path.write_text("")
    with pytest.raises(UserError, match=r"metrics\.jsonl holds no step"):
        plot(tmp_path, tmp_path / "run.png")
    path.write_text('{"type": "step"}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read"):
        plot(tmp_path, tmp_path / "run.png")


def test_running_mean_leaves_out_what_is_missing() -> None:
    means = running_mean([1.0, math.nan, 3.0, math.nan, math.nan], 2)
    assert means[:4] == [1.0, 1.0, 3.0, 3.0]
    assert math.isnan(means[4])
