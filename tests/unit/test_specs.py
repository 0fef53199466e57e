"""What replicas are built from holds what their section says of the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from offbeat.cluster.specs import EngineSpec, RunSpec, judge_engine, policy_engine
from offbeat.config_file import load_config


def test_engines_of_policy_and_judge_are_those_of_their_sections(
    project: Callable[..., Path],
) -> None:
    path = project(
        ("rule", "judge"), rollout__engine="vllm", rollout__memory_share=0.5,
        rollout__devices_per_replica=2, reward__judge__engine="vllm",
        reward__judge__memory_share=0.25, reward__judge__devices_per_replica=4,
        cluster__slots=7,
    )  # fmt: skip
    config = load_config(path)
    run = RunSpec("run-1", "cpu", path.parent)

    def of(spec: EngineSpec) -> tuple[str, float, int, int]:
        return spec.engine, spec.memory_share, spec.devices, spec.replica

    assert of(policy_engine(config, run, 1)) == ("vllm", 0.5, 2, 1)
    section = config.active_rewards["judge"]
    assert of(judge_engine("judge", section, config, run, 3)) == ("vllm", 0.25, 4, 3)
