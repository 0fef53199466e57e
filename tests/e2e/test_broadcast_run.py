"""A run whose versions travel over a process group, in one process and on Ray."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offbeat.cluster.launch import train
from offbeat.config import Config
from offbeat.config_file import load_config
from offbeat.errors import UserError
from offbeat.track.metrics import read_metrics

Project = Callable[..., Path]


def run(path: Path, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]], Config]:
    config = load_config(path, list(overrides))
    assert train(config, io.StringIO()) == 0
    summary = json.loads((config.run_dir / "summary.json").read_text())
    return summary, list(read_metrics(config.run_dir / "metrics.jsonl")), config


@pytest.fixture
def ray_ready(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield
    ray.shutdown()


def check(summary: dict[str, Any], records: list[dict[str, Any]], steps: int) -> None:
    assert summary["status"] == "finished"
    assert summary["steps"] == steps
    syncs = [r for r in records if r["type"] == "sync"]
    assert syncs
    assert all(sync["acknowledged"] for sync in syncs)
    trained = [r for r in records if r["type"] == "step"]
    assert len(trained) == steps
    for record in trained:
        assert record["logprob_diff_tokens"] > 0
        assert math.isfinite(record["logprob_diff_mean"])
        assert record["drift"] is None
        if record["logprob_diff_exact"]:
            assert record["logprob_diff_p99"] < 1e-3  # the engines hold what the trainer sent
    assert summary["drift"]["steps"] == 0
    assert summary["drift"]["compared_steps"] >= 1  # a busy machine takes less probes


def test_in_one_process(project: Project, tmp_path: Path) -> None:
    path = project(
        weights__transport="broadcast", weights__folder=str(tmp_path / "unused"), train__steps=8
    )
    summary, records, _ = run(path)
    check(summary, records, 8)
    assert not (tmp_path / "unused").exists()
    versions = {record["version"] for record in records if record["type"] == "sync"}
    assert max(versions) >= 4


@pytest.mark.usefixtures("ray_ready")
def test_on_ray_with_two_engines(project: Project) -> None:
    path = project(weights__transport="broadcast", rollout__replicas=2, train__steps=6)
    summary, records, _ = run(path, "--cluster.backend", "ray")
    check(summary, records, 6)
    assert {record["replica"] for record in records if record["type"] == "sync"} == {0, 1}


def test_ipc_on_a_cpu_is_refused_before_training(project: Project) -> None:
    path = project(weights__transport="ipc", train__max_staleness=0, cluster__single_device=True)
    config = load_config(path, [])
    with pytest.raises(UserError, match=r"ipc"):
        train(config, None)
