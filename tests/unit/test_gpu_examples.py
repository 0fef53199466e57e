"""examples/gpu: every configuration is checked for its cluster, and its small twin trains here."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from importlib import util
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

from offbeat.cli import main
from offbeat.cluster.launch import train
from offbeat.cluster.plan import plan_pools
from offbeat.config_file import load_config
from offbeat.testing import tiny

FOLDER = Path(__file__).parents[2] / "examples" / "gpu"
SIZES = {
    "one_device": ("1", []),
    "three_devices": ("3", ["2"]),
    "eight_devices": ("8", ["7"]),
    "eight_by_eight": ("8x8", ["63", "7x9", "9x7", "7x8", "16x4"]),
}
"""The cluster that each is for, and some that it cannot have."""
SHORT = "Q:{{ question[:4] }}>\nA:{{ answer[:7] }}\nGrade:"
"""What the tiny judge can read: `tiny.JUDGE_TEMPLATE` with texts of the length it was shown."""
PASS_THROUGH = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def module(name: str) -> ModuleType:
    spec = util.spec_from_file_location(f"gpu_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


rewards, problems, make_data = module("rewards"), module("problems"), module("make_data")


def test_every_configuration_is_here_and_in_the_readme() -> None:
    readme = (FOLDER / "README.md").read_text("utf-8")
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(SIZES)
    for name, (size, _) in SIZES.items():
        assert f"{name}.toml" in readme
        assert f"--assume {size}" in readme
    assert "not run on GPUs" in readme or "not been run on GPUs" in readme


@pytest.mark.parametrize("name", SIZES)
def test_check_accepts_its_cluster_and_refuses_a_smaller_one(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    size, too_small = SIZES[name]
    path = FOLDER / f"{name}.toml"
    assert main(["check", str(path), "--assume", size]) == 0
    out, err = capsys.readouterr()
    devices = sum(plan.devices for plan in plan_pools(load_config(path, files=False)))
    if name == "one_device":
        assert "1 of 1 GPUs" in out
        assert "take turns" in out
    else:
        assert f"{devices} of {devices} GPUs" in out
    assert len(set(re.findall(r"node\d+:[\d-]+", out))) >= 1
    assert err == ""
    for small in too_small:
        assert main(["check", str(path), "--assume", small]) == 2
        assert "GPUs" in capsys.readouterr().err


def test_on_several_nodes_weights_must_get_to_every_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check = ["check", str(FOLDER / "eight_devices.toml"), "--assume", "2x4"]
    assert main(check) == 2
    assert "weights.folder" in capsys.readouterr().err
    assert main([*check, "--weights.transport", "broadcast"]) == 0


def test_the_three_device_run_is_of_3200_rollouts() -> None:
    config = load_config(FOLDER / "three_devices.toml", files=False)
    assert (config.train.steps or 0) * config.samples_per_step == 3200
    assert config.reward["exact"].weight == 0
    assert config.rollout.seats >= config.max_live_groups * config.rollout.group_size


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 4 + 5 = 9\n#### 9", 9),
        ("#### 1,234.50 dollars, not 7", Fraction("1234.5")),
        ("The answer is $42.", 42),
        ("12-5=7", 7),
        ("it falls by -3", -3),
        ("8 - 12 = -4 degrees", -4),
        ("#### 8 and then #### 10", 10),
        ("####", None),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_number(text: str, number: int | Fraction | None) -> None:
    assert rewards.final_number(text) == number


def test_the_checker_compares_numbers_and_abstains_without_a_reference() -> None:
    texts, wanted = ["#### 1,000", "1000.0", "999", "none", "5"], ["1000"] * 4 + [None]
    assert rewards.exact([""] * 5, texts, reference=wanted) == [1.0, 1.0, 0.0, 0.0, None]


def test_problems_are_distinct_solved_and_the_same_for_a_seed() -> None:
    made = list(islice(problems.problems(3), 600))
    assert made == list(islice(problems.problems(3), 600))
    assert made != list(islice(problems.problems(4), 600))
    assert len({problem.question for problem in made}) == 600
    for problem in made:
        assert rewards.final_number(problem.steps) == problem.answer
        *steps, last = problem.steps.splitlines()
        assert last == f"#### {problem.answer}"
        assert 2 <= len(steps) <= 4
        sums = re.findall(r"([\d*/+ -]*\d) = (\d+)", problem.steps)
        assert len(sums) >= 2
        for sum_, result in sums:  # every step is right
            assert eval(sum_.strip()) == int(result), problem.steps


def test_gsm8ks_own_files_and_faults_in_them(tmp_path: Path) -> None:
    rows = [
        {"question": f"How many is {n}?", "answer": f"It is {n}.\n#### {n},000"} for n in (3, 4)
    ]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert make_data.main(["--gsm8k", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    read = (tmp_path / "out" / "validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["reference"] for line in read] == ["3000", "4000"]
    assert json.loads(read[0])["question"] == "How many is 3?"
    (tmp_path / "test.jsonl").write_text('{"question": "a", "answer": "no mark 3"}\n')
    with pytest.raises(SystemExit, match=r"test\.jsonl line 1: has no \"#### number\""):
        make_data.main(["--gsm8k", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="does not exist"):
        make_data.main(["--gsm8k", str(tmp_path / "none")])


def chatty(model: Path, positions: int) -> Path:
    """Gives a tiny model a chat template, and positions for the example's texts."""
    (model / "chat_template.jinja").write_text(PASS_THROUGH)
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        described = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(described | {key: positions}))
    return model


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[str]]:
    """Overrides that put tiny models and few rows into an example, for the CPU."""
    root = tmp_path_factory.mktemp("twin")
    actor = chatty(tiny.make_tiny_model(root / "actor"), 512)
    judge = chatty(tiny.make_tiny_judge(root / "judge"), 2048)
    make_data.main(["--out", str(root / "data"), "--train", "24", "--validation", "4"])
    (root / "short.jinja").write_text(SHORT)
    settings = {
        "model.path": actor,
        "model.dtype": "float32",
        "data.train": root / "data" / "train.jsonl",
        "data.validation": root / "data" / "validation.jsonl",
        "rollout.engine": "transformers",
        "rollout.dtype": "float32",
        "rollout.max_tokens": 12,
        "rollout.max_context": 512,
        "train.groups_per_step": 3,
        "train.steps": 2,
        "reward.judge.engine": "transformers",
        "reward.judge.model": judge,
        "reward.judge.dtype": "float32",
        "reward.judge.structured": "auto",
        "reward.judge.template": root / "short.jinja",
        "validate.every": 1,
        "cluster.device": "cpu",
        "cluster.backend": "local",
    }
    flat = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return lambda runs: [*flat, "--runs_dir", str(runs)]


@pytest.mark.parametrize("name", ["three_devices", "one_device"])
def test_its_twin_trains_on_the_cpu(
    name: str,
    tmp_path: Path,
    twin: Callable[[Path], list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = twin(tmp_path / "runs")
    own = ["--reward.judge.template", str(FOLDER / "judge.jinja")]
    assert main(["check", str(FOLDER / f"{name}.toml"), *overrides, *own]) == 0
    assert "The right final number: " in capsys.readouterr().out
    config = load_config(FOLDER / f"{name}.toml", overrides)
    assert train(config, io.StringIO()) == 0
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 2
    assert summary["groups"]["trained"] == 6
    assert summary["staleness"]["max"] <= config.train.max_staleness
    assert summary["groups"]["no_signal"] < 6
    judged, exact = summary["rewards"]["judge"], summary["rewards"]["exact"]
    samples = 2 * config.samples_per_step
    assert judged["scored"] >= samples, "the judge's grades are what is learnt from"
    assert 0 < judged["mean_last"] < 1
    assert exact["scored"] >= samples, "and the checker's stand beside them"
    assert [entry["step"] for entry in summary["validation"]] == [0, 1, 2]
    assert all(entry["metrics"]["n"] == 4 for entry in summary["validation"])
