"""Bad input: one sentence on stderr, exit 2, nothing started and no run directory.

Every case goes through `check` and `train` in this process; one goes through real processes.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.cli import main

Change = Callable[[Path], None]
RUN = "run.toml"


def write(name: str, text: str) -> Change:
    return lambda folder: _write(folder / name, text)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def replace(old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        text = (folder / RUN).read_text()
        assert old in text
        (folder / RUN).write_text(text.replace(old, new, 1))

    return change


def nothing(folder: Path) -> None:
    """The project as `init` wrote it."""


def cut_weights(folder: Path) -> None:
    """As a copy that broke off leaves it."""
    (folder.parent / "model" / "model.safetensors").write_bytes(b"\xff" * 100)


def dead_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/v1"


DEAD = dead_address()
JUDGE = f"--reward.judge.kind genrm --reward.judge.base_url {DEAD} --reward.judge.model j"

CASES: dict[str, tuple[Change, str, list[str]]] = {
    "missing model": (nothing, "--model.path nope", ["model.path", "nope", "does not exist"]),
    "missing judge": (
        nothing,
        "--reward.j.kind genrm --reward.j.model nope",
        ["reward.j.model", "nope"],
    ),
    "no model directory": (nothing, "--model.path .", ["model.path", "config.json"]),
    "row is no JSON": (
        write("train.jsonl", '{"prompt": "a"}\n{"prompt": "b"\n'),
        "",
        ["train.jsonl line 2", "not JSON"],
    ),
    "missing column": (
        write("train.jsonl", '{"prompt": "a"}\n{"text": "b"}\n'),
        "--train.groups_per_step 2",
        ["train.jsonl line 2", "'prompt'", "text"],
    ),
    "missing data": (nothing, "--data.train nope.jsonl", ["data.train", "nope.jsonl"]),
    "unknown reward kind": (
        replace('kind = "function"', 'kind = "rule"'),
        "",
        [RUN, "reward.correct.kind", '"rule"', '"function", "genrm", "disrm"'],
    ),
    "function that does not import": (
        write("rewards.py", "import no_such_module_anywhere\n"),
        "",
        ["reward.correct.function", "rewards.py", "no_such_module_anywhere"],
    ),
    "function file missing": (
        nothing,
        "--reward.correct.function nope.py:correct",
        ["reward.correct.function", "nope.py"],
    ),
    "function name missing": (
        nothing,
        "--reward.correct.function rewards.py:corect",
        ["reward.correct.function", "corect", "correct"],
    ),
    "too few devices": (
        nothing,
        "--cluster.slots 2 --rollout.replicas 2 --cluster.device cpu",
        ["need 3 slots", "rollout 2, train 1", "there are 2", "cluster.slots"],
    ),
    "zero devices for rollout": (
        nothing,
        "--rollout.devices_per_replica 0",
        ["rollout.devices_per_replica = 0", "zero devices"],
    ),
    "zero devices for train": (nothing, "--train.devices 0", ["train.devices = 0"]),
    "group of one": (
        nothing,
        "--rollout.group_size 1",
        ["rollout.group_size = 1", "grpo", "2 or more"],
    ),
    "more groups than data": (
        nothing,
        "--train.groups_per_step 25",
        ["train.groups_per_step = 25", "24 rows", "at most 24"],
    ),
    "run name exists": (
        lambda folder: (folder / "runs" / "first").mkdir(parents=True),
        "",
        ["run name exists", "first", "--run"],
    ),
    "judge does not answer": (nothing, JUDGE, ["reward.judge.base_url", DEAD, "not answer"]),
    "top_p": (nothing, "--rollout.top_p 0.8", ["rollout.top_p = 0.8", "support"]),
    "top_k": (nothing, "--rollout.top_k 20", ["rollout.top_k = 20", "support"]),
    "colocate": (
        nothing,
        "--reward.correct.placement colocate",
        ["reward.correct.placement", "never pauses"],
    ),
    "unknown key": (
        replace("group_size", "grop_size"),
        "",
        [RUN, "rollout.grop_size", "rollout.group_size?"],
    ),
    "unknown override": (
        nothing,
        "--train.learning_rat 1",
        ["--train.learning_rat", "train.learning_rate?"],
    ),
    "wrong type": (replace("slots = 8", 'slots = "many"'), "", [RUN, "cluster.slots", '"many"']),
    "no room": (nothing, "--rollout.max_tokens 256", ["rollout.max_tokens = 256", "max_context"]),
    "weights cut short": (
        cut_weights,
        "",
        ["model.path", "model.safetensors", "cut short", "save_pretrained"],
    ),
    "weight that is no number": (nothing, "--reward.correct.weight nan", ["reward.correct.weight"]),
    "function that returns nan": (
        write("rewards.py", "def correct(p, c, **k):\n    return [float('nan')] * len(c)\n"),
        "",
        ["reward.correct.function", "returned nan"],
    ),
    "no GPU": (
        nothing,
        "--cluster.backend local --cluster.device cuda",
        ["cluster.device = cuda", "cpu"],
    ),
    "no file": (lambda folder: (folder / RUN).unlink(), "", [RUN, "offbeat init"]),
    "no TOML": (write(RUN, "run = "), "", [RUN, "not valid TOML"]),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert main(["init", str(tmp_path / "project"), "--model", str(model)]) == 0
    return tmp_path / "project"


def assert_refused(project: Path, code: int, err: str, words: list[str], before: bool) -> None:
    assert code == 2, err
    assert err.startswith("offbeat: ")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == [], err
    assert (project / "runs").exists() == before
    if before:
        assert list((project / "runs" / "first").iterdir()) == []


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("case", CASES)
def test_bad_input(
    project: Path, capsys: pytest.CaptureFixture[str], case: str, command: str
) -> None:
    change, overrides, words = CASES[case]
    change(project)
    before = (project / "runs").exists()
    capsys.readouterr()
    code = main([command, str(project / RUN), *overrides.split()])
    assert_refused(project, code, capsys.readouterr().err, words, before)


@pytest.mark.parametrize("command", ["check", "train"])
def test_bad_input_of_a_real_process(project: Path, command: str) -> None:
    change, overrides, words = CASES["row is no JSON"]
    change(project)
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", command, str(project / RUN), *overrides.split()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert_refused(project, done.returncode, done.stderr, words, False)
