"""Shared parts: tiny models made once a session, and a project folder to run."""

from __future__ import annotations

import os
import signal

# Where the tests run in the background of a script, children would inherit that Ctrl-C is ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

for _key, _value in {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}.items():
    os.environ.setdefault(_key, _value)

from collections.abc import Callable  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402

from offbeat.cli import main  # noqa: E402
from offbeat.testing import tiny  # noqa: E402

ON_RAY = {
    "test_broadcast_run", "test_interrupted", "test_placement", "test_ray_run",
    "test_reward_revival", "test_shared_pool", "test_single_device", "test_supervision",
    "test_validate_on_ray", "test_vllm_run",
}  # fmt: skip

REWARDS = '''
def correct(prompts, completions, reference, **columns):
    return [float(c.strip() == r) for c, r in zip(completions, reference)]


def letters(prompts, completions, **columns):
    """Share of letters: a signal also where no answer is right."""
    return [sum(ch.isalpha() for ch in c) / 8 for c in completions]
'''


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with actor (untrained), judge and scorer, and data to reverse words."""
    root = tmp_path_factory.mktemp("models")
    tiny.make_tiny_model(root / "actor")
    tiny.make_tiny_judge(root / "judge")
    tiny.make_tiny_scorer(root / "scorer", 0)
    (root / "judge.jinja").write_text(tiny.JUDGE_TEMPLATE)
    tiny.write_reverse_data(root / "train.jsonl", 64, 1, longest=3)
    tiny.write_reverse_data(root / "validation.jsonl", 8, 2, longest=3)
    (root / "rewards.py").write_text(REWARDS)
    return root


@pytest.hookimpl(tryfirst=True)  # before tests are picked by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that all workers end at about the same time."""
    for item in items:
        if item.path.stem in ON_RAY:
            item.add_marker(pytest.mark.ray)
    items.sort(key=lambda item: (item.path.stem not in ON_RAY, item.path.parent.name != "e2e"))


class OneCluster(LoadScopeScheduling):
    """A file's tests run in one worker, and all that start Ray clusters in the same one: two
    clusters would share two cores."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "ray" if Path(file).stem in ON_RAY else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return OneCluster(config, log)


ProjectMaker = Callable[..., Path]


@pytest.fixture
def project(tmp_path: Path, models: Path) -> ProjectMaker:
    """Writes a run's TOML into the test's folder; keywords are `section__key=value`."""
    return partial(make_project, tmp_path, models)


def make_project(
    folder: Path,
    models: Path,
    sources: tuple[str, ...] = ("rule",),
    name: str = "run",
    **changes: object,
) -> Path:
    """Writes a run's TOML into `folder`; keywords are `section__key=value`."""
    values: dict[str, dict[str, object]] = {
        "model": {"path": str(models / "actor"), "dtype": "float32"},
        "data": {"train": str(models / "train.jsonl")},
        "rollout": {"max_tokens": 8, "max_context": 64, "group_size": 4, "seats": 16},
        "train": {"groups_per_step": 2, "steps": 4, "learning_rate": 1e-4},
        "cluster": {"backend": "local", "slots": 4},
    }
    if "rule" in sources:
        values["reward.rule"] = {
            "kind": "function",
            "function": f"{models / 'rewards.py'}:letters",
        }
    if "judge" in sources:
        values["reward.judge"] = {
            "kind": "genrm",
            "model": str(models / "judge"),
            "template": str(models / "judge.jinja"),
            "max_tokens": 2,
            "max_context": 96,
            "on_failure": "abstain",
            "retries": 0,
        }
    if "scorer" in sources:
        values["reward.scorer"] = {
            "kind": "disrm",
            "model": str(models / "scorer"),
            "max_context": 64,
        }
    for key, value in changes.items():
        section, _, setting = key.rpartition("__")
        values.setdefault(section.replace("__", "."), {})[setting] = value
    path = folder / f"{name}.toml"
    path.write_text(_toml(name, values))
    return path


def _toml(name: str, values: dict[str, dict[str, object]]) -> str:
    lines = [f'run = "{name}"']
    for section, settings in values.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_value(value)}" for key, value in settings.items()]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(part) for part in value) + "]"
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


@pytest.fixture
def offbeat(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call
