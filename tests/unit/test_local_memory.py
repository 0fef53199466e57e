"""In one process all models lie on the first GPU: `check` refuses shares that leave the trainer
none of its memory. No GPU is needed: `cluster.device` says that there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat import cli_cluster
from offbeat.config_file import load_config
from offbeat.errors import UserError


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout__memory_share": 0.3, "rollout__replicas": 2}, None),
        ({"rollout__memory_share": 0.5, "rollout__replicas": 2}, "memory_share 0.5 x 2"),
        ({}, "memory_share 0.9 x 1"),
        ({"rollout__engine": "transformers"}, None),
        ({"cluster__device": "cpu"}, None),
    ],
)
def test_shares_of_one_gpu(
    project: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    says: str | None,
) -> None:
    monkeypatch.setattr(cli_cluster, "cuda_devices", lambda: 4)
    settings = {"rollout__engine": "vllm", "cluster__device": "cuda"} | changes
    config = load_config(project(**settings))
    told: list[str] = []
    if says is None:
        cli_cluster.check_devices(config, told.append)
        assert "backend local" in told[-1]
    else:
        with pytest.raises(UserError, match=says) as refused:
            cli_cluster.check_devices(config, told.append)
        assert 'cluster.backend to "ray"' in str(refused.value)
