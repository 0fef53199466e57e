"""Configuration files, overrides, refusals, and the page that is generated from the schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbeat.cluster.plan import check_fits, device_kind, plan_pools, resource_map
from offbeat.config import Config
from offbeat.config_file import load_config, reference, save_config
from offbeat.errors import UserError

BASE = """
run = "one"
[model]
path = "models/actor"
[data]
train = "train.jsonl"
[rollout]
replicas = 2
[reward.correct]
kind = "function"
function = "rewards.py:correct"
[reward.judge]
kind = "genrm"
model = "models/judge"
template = "judge.jinja"
weight = 0.5
[reward.my-scorer]
kind = "disrm"
model = "models/scorer"
replicas = 2
[validate]
every = 3
"""


ONE = "--cluster.single_device --train.max_staleness 0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("actor", "judge", "scorer"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    (tmp_path / "judge.jinja").write_text("{{ question }}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "run.toml").write_text(BASE)
    return tmp_path


def load(folder: Path, *overrides: str) -> Config:
    return load_config(folder / "run.toml", overrides)


def refusal(folder: Path, *overrides: str, text: str | None = None) -> str:
    if text is not None:
        (folder / "run.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        load(folder, *overrides)
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_relative_paths_are_relative_to_the_files_folder(folder: Path) -> None:
    config = load(folder)
    assert config.model.path == folder / "models" / "actor"
    assert config.data.train == folder / "train.jsonl"
    assert config.runs_dir == folder / "runs"
    assert config.base_dir == folder
    assert config.reward["correct"].function == f"{folder}/rewards.py:correct"
    assert config.reward["judge"].model == str(folder / "models" / "judge")
    assert config.reward["judge"].template == folder / "judge.jinja"


def test_modules_and_external_judges_names_are_no_paths(folder: Path) -> None:
    config = load(
        folder,
        *("--reward.judge.base_url", "http://host/v1", "--reward.judge.model", "org/judge"),
        *("--reward.correct.function", "package.module:name"),
    )
    assert config.reward["judge"].model == "org/judge"
    assert config.reward["correct"].function == "package.module:name"
    assert not config.reward["judge"].has_pool


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("--rollout.group-size=4", lambda c: c.rollout.group_size, 4),
        ("--train.learning_rate 1e-5", lambda c: c.train.learning_rate, 1e-5),
        ("--reward.judge.weight 0", lambda c: c.reward["judge"].weight, 0.0),
        ("--reward.my_scorer.weight=2", lambda c: c.reward["my-scorer"].weight, 2.0),
        ("--data.shuffle false", lambda c: c.data.shuffle, False),
        ("--train.prefix_sharing", lambda c: c.train.prefix_sharing, True),
        ("--train.betas 0.8,0.9", lambda c: c.train.betas, (0.8, 0.9)),
        ("--rollout.stop a,b", lambda c: c.rollout.stop, ("a", "b")),
        ('--rollout.stop=["\\n"]', lambda c: c.rollout.stop, ("\n",)),
        ('--rollout.engine_args={"a":1}', lambda c: c.rollout.engine_args, {"a": 1}),
        ("--train.steps none", lambda c: c.train.steps, None),
        ("--reward.correct.weight -1", lambda c: c.reward["correct"].weight, -1),
        ("--run two", lambda c: c.run, "two"),
        ("--validate.every 5", lambda c: c.validation.every, 5),
        ("--validation.every 5", lambda c: c.validation.every, 5),
        ("--use_rewards judge", lambda c: list(c.active_rewards), ["judge"]),
        ("--use-rewards judge,correct", lambda c: list(c.active_rewards), ["correct", "judge"]),
        ("--reward.new.kind function --reward.new.function a:b", lambda c: len(c.reward), 4),
    ],
)
def test_overrides(folder: Path, override: str, get, value: object) -> None:  # type: ignore[no-untyped-def]
    assert get(load(folder, *override.split(" "))) == value


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("--rollout.grop_size 3", ["--rollout.grop_size", "rollout.group_size"]),
        ("--rollout.steps 4", ["steps belongs to [train]"]),
        ("--rolout.group_size 4", ["did you mean rollout?"]),
        ("--reward.jugde.weight 0", ["--reward.jugde.weight", "judge"]),
        ("--rollout 3", ["section"]),
        ("--run", ["--run", "value"]),
        ("stray", ["`stray`", "--section.key value"]),
        ("--rollout.engine_args a", ["rollout.engine_args = a", "a table, written as JSON"]),
        ("--rollout.engine_args 5", ["rollout.engine_args", "must be a table"]),
        ("--rollout.replicas two", ["rollout.replicas", '"two"', "integer at least 1"]),
        ("--rollout.temperature 3", ["rollout.temperature", "3", "at most 2"]),
        ("--train.betas 0.9", ["train.betas", "a list of two numbers"]),
        ("--train.betas 0.9,1", ["train.betas", "below 1"]),
        ("--reward.correct.kind rule", ['"rule"', '"function", "genrm", "disrm"']),
        ("--rollout.group_size 1", ["rollout.group_size = 1", "grpo", "2 or more"]),
        ("--rollout.group_size 1 --train.algorithm rloo", ["group_size = 1", "rloo"]),
        ("--rollout.group_size 1 --train.algorithm dr_grpo", ["group_size = 1", "dr_grpo"]),
        ("--rollout.top_p 0.8", ["rollout.top_p = 0.8", "support", "temperature"]),
        ("--rollout.top_k 20", ["rollout.top_k = 20", "support"]),
        ("--reward.judge.placement colocate", ["reward.judge.placement", "never pauses", "pool"]),
        ("--rollout.devices_per_replica 0", ["rollout.devices_per_replica = 0", "zero devices"]),
        ("--train.devices 0", ["train.devices = 0", "zero devices"]),
        ("--reward.judge.devices_per_replica 0", ["reward.judge.devices_per", "zero devices"]),
        ("--reward.my-scorer.devices_per_replica 0", ["reward.my-scorer.devices", "zero"]),
        ("--reward.judge.model none", ["reward.judge.model", "base_url", "both missing"]),
        ("--reward.my-scorer.model none", ["reward.my-scorer.model is missing"]),
        ("--reward.correct.function none", ["reward.correct.function is missing"]),
        ("--train.min_scored 9", ["train.min_scored = 9", "rollout.group_size = 8"]),
        ("--rollout.max_tokens 2048", ["rollout.max_tokens = 2048", "max_context"]),
        ("--reward.judge.max_tokens 1024", ["reward.judge.max_tokens = 1024", "template"]),
        ("--reward.judge.scale 5,5", ["reward.judge.scale"]),
        ("--use_rewards juge", ["use_rewards", "juge", "correct, judge, my-scorer"]),
        ("--use_rewards=", ["use_rewards", "weight"]),
        ("--use_rewards judge --reward.judge.weight 0", ["weight"]),
        ("--model.path nope", ["model.path", "nope", "does not exist"]),
        ("--model.path .", ["model.path", "config.json"]),
        ("--model.tokenizer nope", ["model.tokenizer", "nope"]),
        ("--data.train nope.jsonl", ["data.train", "nope.jsonl"]),
        ("--data.validation nope.jsonl", ["data.validation", "nope.jsonl"]),
        ("--reward.judge.model nope", ["reward.judge.model", "nope", "does not exist"]),
        ("--reward.judge.template nope", ["reward.judge.template", "nope"]),
        ("--reward.judge.api_key_env NO_SUCH_KEY_HERE", ["NO_SUCH_KEY_HERE", "not set"]),
        ("--run a/b", ["run", "a/b", "letters"]),
        ("--run ..", ["run", "..", "letters"]),
        ("--seed -1", ["seed", "-1", "at least 0"]),
        ("--seed 99999999999999999999", ["seed", "below"]),
        ("--rollout.devices_per_replica 2", ["rollout.devices_per_replica = 2", '"vllm"']),
        ("--reward.judge.devices_per_replica 2", ["reward.judge.devices_per_replica = 2"]),
        ("--reward.my-scorer.devices_per_replica 2", ["reward.my-scorer.devices_per_replica = 2"]),
        ("--reward.judge.structured on", ["reward.judge.structured", '"vllm"', '"auto"']),
        ("--weights.transport ipc", ["weights.transport", "single_device", '"folder"']),
        ("--cluster.single_device", ["train.max_staleness = 2", "take turns", "set it to 0"]),
        (ONE, ["rollout.replicas = 2", "single_device", "set it to 1"]),
        (f"{ONE} --rollout.replicas 1", ["reward.my-scorer.replicas = 2"]),
        (
            f"{ONE} --rollout.replicas 1 --rollout.engine vllm --use_rewards judge "
            "--reward.judge.engine vllm --reward.judge.memory_share 0.3",
            ["rollout.memory_share 0.9 + reward.judge.memory_share 0.3", "more than 0.8", "0.3 e"],
        ),
        ("--validate.every -1", ["validate.every", "-1", "at least 0"]),
    ],
)
def test_refusals_name_the_setting_and_the_mend(
    folder: Path, overrides: str, words: list[str]
) -> None:
    said = refusal(folder, *overrides.split(" "))
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("replicas = 2\n[reward.c", "replica = 2\n[reward.c", ["unknown key rollout.replica;"]),
        ("[rollout]", "[rolout]", ["unknown key rolout", "did you mean rollout"]),
        ('run = "one"', 'run = "one"\nseed = true', ["seed", "an integer"]),
        ("replicas = 2\n[reward.c", "replicas = true\n[reward.c", ["rollout.replicas", "integer"]),
        ("replicas = 2\n[reward.c", "temperature = true\n[reward.c", ["rollout.temperature"]),
        ("weight = 0.5", "weight = true", ["reward.judge.weight", "a number"]),
        ("weight = 0.5", "scale = [true, 10]", ["reward.judge.scale"]),
        ("weight = 0.5", "choices = { good = true }", ["reward.judge.choices"]),
        ("[model]", "[model]\nseed = 3", ["model.seed", "seed belongs to the top level"]),
        ("weight = 0.5", "wight = 0.5", ["unknown key reward.judge.wight", "judge.weight?"]),
        ('path = "models/actor"', "", ["model.path is missing"]),
        ('path = "models/actor"', "path = 3", ["model.path = 3 must be a path"]),
        ('run = "one"', "", ["run is missing"]),
        ('run = "one"', 'run = "one', ["not valid TOML", "line 2"]),
        ('run = "one"', 'run = "one"\ntrain = 3', ["train = 3 must be a table"]),
        ('run = "one"', 'run = "one"\nreward.x = 3', ["reward.x = 3 must be a table"]),
        ("replicas = 2\n[reward.c", 'replicas = "x"\n[reward.c', ['rollout.replicas = "x"']),
        ('kind = "function"\n', "", ["reward.correct.kind is missing"]),
        ("[reward.my-scorer]", '[reward."my/scorer"]', ['reward."my/scorer"']),
    ],
)
def test_faults_of_the_file_name_file_and_key(
    folder: Path, old: str, new: str, words: list[str]
) -> None:
    assert old in BASE
    said = refusal(folder, text=BASE.replace(old, new, 1))
    assert [word for word in ["run.toml", *words] if word not in said] == [], said


def test_truths_where_they_belong(folder: Path) -> None:
    text = BASE + "[train]\nkeep_batches = true\n[reward.correct.arguments]\na = true\nb = [true]\n"
    (folder / "run.toml").write_text(text)
    config = load(folder)
    assert config.train.keep_batches is True
    assert config.reward["correct"].arguments == {"a": True, "b": [True]}


def test_no_reward_source(folder: Path) -> None:
    said = refusal(folder, text=BASE[: BASE.index("[reward.correct]")])
    assert "reward has no source" in said


def test_a_missing_file_and_unused_sources(folder: Path) -> None:
    with pytest.raises(UserError, match="offbeat init"):
        load_config(folder / "other.toml", [])
    config = load(folder, "--reward.judge.model", "nope", "--use_rewards", "correct")
    assert [plan.name for plan in plan_pools(config)] == ["rollout", "train"]


def test_the_saved_configuration_loads_back(folder: Path) -> None:
    config = load(folder, "--use_rewards", "judge")
    (folder / "elsewhere").mkdir()
    save_config(config, folder / "elsewhere" / "config.json")
    assert load_config(folder / "elsewhere" / "config.json", []) == config


def test_pools_are_disjoint_and_told_apart(folder: Path) -> None:
    wide = ["--reward.judge.devices_per_replica", "2", "--reward.judge.engine", "vllm"]
    config = load(folder, "--cluster.device", "cpu", *wide)
    plans = plan_pools(config)
    assert [(p.name, p.role, p.devices) for p in plans] == [
        ("rollout", "rollout", 2),
        ("train", "train", 1),
        ("reward/judge", "genrm", 2),
        ("reward/my-scorer", "disrm", 2),
    ]
    table = resource_map(plans, device_kind(config), config)
    assert [line.split()[-1] for line in table.splitlines()[1:5]] == ["1", "2", "3-4", "6"]
    assert "no pool" in table
    assert "reward/correct" in table


def test_a_single_device_is_one_pool_that_roles_share(folder: Path) -> None:
    more = "--rollout.replicas 1 --reward.my-scorer.replicas 1 --weights.transport ipc"
    config = load(folder, *ONE.split(" "), *more.split(" "), "--cluster.device", "cpu")
    plans = plan_pools(config)
    assert [plan.name for plan in plans] == ["rollout", "train", "reward/judge", "reward/my-scorer"]
    check_fits(plans, 1, "cpu")
    with pytest.raises(UserError, match=r"need 1 slot \(shared 1\) and there are 0"):
        check_fits(plans, 0, "cpu")
    table = resource_map(plans, "cpu", config)
    assert "for rollout, train, reward/judge, reward/my-scorer in turn" in table
    shares = "--rollout.memory_share 0.4 --reward.judge.memory_share 0.4"
    both = f"{ONE} {more} {shares} --rollout.engine vllm --reward.judge.engine vllm"
    assert load(folder, *both.split(" ")).cluster.single_device


def test_too_few_devices_says_role_by_role_what_is_needed(folder: Path) -> None:
    plans = plan_pools(load(folder))
    check_fits(plans, 6, "cpu")
    with pytest.raises(UserError) as caught:
        check_fits(plans, 5, "cpu")
    for word in ("need 6 slots", "rollout 2", "reward/judge 1", "are 5", "cluster.slots to 6"):
        assert word in str(caught.value)
    with pytest.raises(UserError, match=r"there is 1; add GPUs, or lower one of rollout\.replicas"):
        check_fits(plans, 1, "cuda")


def test_derived_values(folder: Path) -> None:
    config = load(folder)
    assert (config.max_live_groups, config.samples_per_step) == (24, 64)
    assert json.loads(config.model_dump_json())["run"] == "one"


def test_the_page_of_settings_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text("utf-8") == reference(), "run: python -m offbeat.config_file > " + str(
        page
    )
