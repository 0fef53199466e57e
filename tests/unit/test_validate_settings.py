"""What [validate] may be, the pool that it may have, and what `check` says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.cli_models import check_models
from offbeat.cluster.plan import PoolPlan, plan_pools, resource_map
from offbeat.cluster.specs import RunSpec, policy_engine, validators
from offbeat.config import Config
from offbeat.config_file import load_config
from offbeat.errors import UserError
from offbeat.testing.tiny import make_tiny_model

RUN = """
run = "far"
[model]
path = "models/actor"
[data]
train = "data/train.jsonl"
validation = "data/validation.jsonl"
[rollout]
engine = "vllm"
replicas = 4
devices_per_replica = 2
[validate]
on = "dedicated"
replicas = 2
devices_per_replica = 4
[reward.exact]
kind = "function"
function = "rewards.py:exact"
"""
ONE = ["--cluster.single_device", "--train.max_staleness", "0", "--rollout.replicas", "1"]


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose model and data are elsewhere."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    body = "def exact(prompts, completions, **_):\n    return [0.0] * len(completions)\n"
    (tmp_path / "rewards.py").write_text(body)
    (tmp_path / "far.toml").write_text(RUN)
    return tmp_path / "far.toml"


def config_of(far: Path, *overrides: str) -> Config:
    return load_config(far, list(overrides), files=False)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--validate.samples", "4"], ["samples = 4", "temperature = 0", "1.0", "samples to 1"]),
        (
            [*ONE, "--rollout.devices_per_replica", "1"],
            ['validate.on = "dedicated"', "single_device", '"rollout"', '"train"'],
        ),
        (
            ["--rollout.engine", "transformers", "--rollout.devices_per_replica", "1"],
            ["validate.devices_per_replica = 4", "set it to 1", 'rollout.engine to "vllm"'],
        ),
        (["--validate.on", "here"], ["validate.on"]),
    ],
)
def test_refusals_name_the_setting_and_the_mend(
    far: Path, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        config_of(far, *overrides)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_samples_with_a_temperature_and_the_trainer_on_a_single_device_are_fine(far: Path) -> None:
    sampled = ["--validate.samples", "4", "--validate.temperature", "0.6"]
    alone = [*ONE, "--rollout.devices_per_replica", "1", "--rollout.memory_share", "0.5"]
    config = config_of(far, *sampled, *alone, "--validate.on", "train")
    assert "validate" not in {plan.name for plan in plan_pools(config)}


def test_engines_that_only_validate_have_a_pool_where_they_are_wanted(far: Path) -> None:
    config = config_of(far)
    settings = ("validate.replicas", "validate.devices_per_replica")
    assert PoolPlan("validate", "validate", 2, 4, settings) in plan_pools(config)
    assert "validate" in resource_map(plan_pools(config), "cuda", config)
    for on in ("rollout", "train"):
        others = config_of(far, "--validate.on", on)
        assert validators(others) == 0
        assert "validate" not in {plan.name for plan in plan_pools(others)}
    nothing = config.model_copy(
        update={"data": config.data.model_copy(update={"validation": None})}
    )
    assert "validate" not in {plan.name for plan in plan_pools(nothing)}


def test_their_engines_are_rollouts_on_devices_of_their_own(far: Path) -> None:
    config, run = config_of(far), RunSpec("id", "cuda", Path("w"))
    rollout, own = policy_engine(config, run, 1), policy_engine(config, run, 1, "validate")
    assert (own.role, own.devices, rollout.devices) == ("validate", 4, 2)
    assert own.seed != rollout.seed, "else both would draw the same"
    for name in ("engine", "model_path", "max_context", "dtype", "memory_share", "engine_args"):
        assert getattr(own, name) == getattr(rollout, name)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["check", *arguments]) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_check_lays_their_pool_out_and_says_where_weights_do_not_reach(
    far: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broadcast = ["--weights.transport", "broadcast"]
    out = said(capsys, str(far), "--assume", "3x8", *broadcast)
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert rows["validate"][:3] == ["2", "4", "8"]
    assert len(rows["validate"]) == 5
    few = said(capsys, str(far), "--assume", "2x8", *broadcast, code=2)
    assert "validate 8" in few
    assert "validate.replicas" in few
    # Rollout beside the trainer, validation on another node: files in memory do not get there.
    near = ["--rollout.replicas", "3", "--validate.replicas", "1", "--validate.devices_per_replica"]
    err = said(capsys, str(far), "--assume", "2x7", *near, "7", code=2)
    assert "weights.transport" in err
    assert "engines on node" in err


def test_heads_must_divide_among_their_devices(
    far: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model(far.parent / "models" / "actor", layers=1)
    (far.parent / "models" / "actor" / "config.json").write_text('{"num_attention_heads": 6}')
    err = said(capsys, str(far), "--assume", "3x8", "--weights.transport", "broadcast", code=2)
    assert "validate.devices_per_replica = 4 does not divide the 6 attention heads" in err


def test_check_knows_which_models_the_trainers_own_engine_refuses(far: Path) -> None:
    folder = far.parent / "models" / "actor"
    make_tiny_model(folder)
    config = config_of(far, "--validate.on", "train")
    check_models(config, assumed=False)
    described: dict[str, Any] = json.loads((folder / "config.json").read_text())
    described["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r'validate\.on = "train" .*rope type dynamic'):
        check_models(config, assumed=False)
    check_models(config_of(far, "--validate.on", "rollout"), assumed=False)
