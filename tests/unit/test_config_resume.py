"""Which settings may change on resume: every one is classified, and a refusal says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from offbeat.config import Config, RewardSourceSection
from offbeat.config_file import load_config
from offbeat.config_resume import REWARD, SETTINGS, check_changes, settings, why_not
from offbeat.config_schema import takes
from offbeat.errors import UserError

Project = Callable[..., Path]


def every_setting() -> set[str]:
    """All settings of the schema but those of reward sources."""
    found = set()
    for name, field in Config.model_fields.items():
        section, key = takes(field), field.alias or name
        if section is None:
            found.add(key)
        elif section is not RewardSourceSection:
            found |= {f"{key}.{inner}" for inner in section.model_fields}
    return found


def test_every_setting_is_classified_and_no_other() -> None:
    assert set(SETTINGS) == every_setting()
    assert set(REWARD) == set(RewardSourceSection.model_fields)


def test_settings_that_wait_or_count_processes_are_harmless() -> None:
    named = [*SETTINGS, *(f"reward.any.{name}" for name in REWARD)]
    ends = ("_seconds", ".threads", ".replicas", ".devices_per_replica", ".seats", ".memory_share")
    starts = ("cluster.", "weights.", "validate.", "train.keep_")
    for key in named:
        if key.endswith(ends) or key.startswith(starts):
            assert why_not(key) is None, key


def test_what_is_not_known_may_not_change() -> None:
    assert why_not("train.new_setting") is not None
    assert why_not("reward.judge.new_setting") is not None


def pair(project: Project, overrides: list[str], **changes: object) -> tuple[Config, Config]:
    path = project(("rule", "judge"), **changes)
    return load_config(path, []), load_config(path, overrides, files=False)


REFUSED: Mapping[str, Any] = {
    "seed": 5,
    "base_dir": "elsewhere",
    "ledger_dir": "elsewhere",
    "use_rewards": "rule",
    "combine": "gdpo",
    "model.dtype": "bfloat16",
    "data.train": "other.jsonl",
    "data.epochs": 3,
    "data.limit": 7,
    "rollout.group_size": 2,
    "rollout.temperature": 0.7,
    "rollout.max_tokens": 4,
    "rollout.stop": ".",
    "train.algorithm": "rloo",
    "train.groups_per_step": 4,
    "train.max_staleness": 1,
    "train.betas": "0.8,0.9",
    "train.clip_high": 0.3,
    "train.on_no_signal": "train",
    "train.tokens_per_micro_batch": 64,
    "train.prefix_sharing": "false",
    "train.schedule": "linear",
    "reward.rule.weight": 0.5,
    "reward.rule.role": "multiply",
    "reward.judge.model": "other",
    "reward.judge.template": "grade",
    "reward.judge.temperature": 0.5,
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_change_that_breaks_a_promise_is_refused_by_name(project: Project, key: str) -> None:
    before, after = pair(project, [f"--{key}", str(REFUSED[key])])
    with pytest.raises(UserError) as refused:
        check_changes(before, after)
    said = str(refused.value)
    assert said.startswith(f"{key} cannot change when a run is resumed: ")
    assert "begin another run" in said
    assert "\n" not in said


TAKEN: Mapping[str, Any] = {
    "train.learning_rate": 1e-3,
    "train.steps": 40,
    "train.checkpoint_every": 1,
    "train.keep_checkpoints": 9,
    "rollout.replicas": 2,
    "rollout.seats": 3,
    "rollout.max_attempts": 9,
    "rollout.snapshot_tokens": 0,
    "cluster.backend": "ray",
    "validate.every": 5,
    "weights.loads_at_once": 1,
    "reward.judge.retries": 3,
    "reward.judge.concurrency": 2,
    "reward.judge.max_failed_share": 1,
    "reward.judge.deadline_seconds": 5,
    "reward.judge.cache": "false",
}


def test_harmless_changes_are_taken_and_told(project: Project) -> None:
    overrides = [word for key, value in TAKEN.items() for word in (f"--{key}", str(value))]
    before, after = pair(project, overrides)
    told = check_changes(before, after)
    assert {line.partition(":")[0] for line in told} == set(TAKEN)
    assert "train.learning_rate: 0.0001 -> 0.001" in told
    assert check_changes(before, before) == []


def test_the_number_of_steps_is_part_of_a_schedule_that_ends(project: Project) -> None:
    before, after = pair(project, ["--train.steps", "9"], train__schedule="linear")
    with pytest.raises(UserError, match=r"^train.steps cannot .*schedule = \"linear\""):
        check_changes(before, after)


def test_another_reward_source_is_refused(project: Project) -> None:
    more = ["--reward.more.kind", "function", "--reward.more.function", "rewards.py:letters"]
    before, after = pair(project, more)
    with pytest.raises(UserError, match=r"^reward.more cannot .* leave it out"):
        check_changes(before, after)
    with pytest.raises(UserError, match=r"^reward.more cannot .* keep it"):
        check_changes(after, before)


def test_settings_of_a_config_are_named_as_in_the_file(project: Project) -> None:
    before, _ = pair(project, [])
    found = dict(settings(before))
    assert found["train.steps"] == 4
    assert found["validate.every"] == 0
    assert found["reward.judge.retries"] == 0
    assert set(found) == every_setting() | {
        f"reward.{source}.{name}" for source in ("rule", "judge") for name in REWARD
    }
