"""The demo's engine switch: which settings it changes, on the example's own configuration."""

from __future__ import annotations

import sys

import pytest
from examples.max_of_three import demo

from offbeat.config_file import load_config


def engines(reward: str, engine: str) -> dict[str, str]:
    """Section -> engine, of the policy and of every active model, as the demo would train."""
    overrides = ["--use_rewards", demo.SOURCES[reward], *demo.engine_overrides(engine, reward)]
    config = load_config(demo.HERE / "run.toml", overrides, files=False)
    models = {name: s.engine for name, s in config.active_rewards.items() if s.has_pool}
    return {"rollout": config.rollout.engine, **models}


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize(
    ("reward", "models"),
    [
        ("all", ["judge", "scorer"]),
        ("rule", []),
        ("judge", ["judge"]),
        ("scorer", ["scorer"]),
    ],
)
def test_the_policy_and_every_active_model_run_on_the_engine(
    reward: str, models: list[str], engine: str
) -> None:
    assert engines(reward, engine) == dict.fromkeys(["rollout", *models], engine)


def test_without_vllm_the_demo_says_how_to_install_it_and_makes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(demo.subprocess, "run", lambda *a, **k: pytest.fail("something was begun"))
    monkeypatch.setattr(sys, "argv", ["demo", "--engine", "vllm"])
    assert demo.main() == 2
    assert "make .venv/.vllm" in capsys.readouterr().out
