"""`offbeat check --assume`: the map of a cluster that is not there, or why there is none."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offbeat import cli_cluster
from offbeat.cli import main
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
[train]
steps = 5
[reward.judge]
kind = "genrm"
engine = "vllm"
model = "models/judge"
template = "judge.jinja"
devices_per_replica = 6
[reward.exact]
kind = "function"
function = "rewards.py:exact"
weight = 0
[weights]
transport = "broadcast"
"""
REWARDS = "def exact(prompts, completions, reference, **_):\n    return [0.0] * len(completions)\n"


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose models and data are elsewhere; its template and function are here."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "far.toml").write_text(RUN)
    (tmp_path / "judge.jinja").write_text("{{ question }}: {{ answer }}")
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path / "far.toml"


def said(capsys: pytest.CaptureFixture[str], config: Path, *arguments: str, code: int = 0) -> str:
    assert main(["check", str(config), *arguments]) == code
    out, err = capsys.readouterr()
    if code:
        assert err.count("\n") == 1
        assert "ready" not in out
        return err
    assert err == ""
    return out


def model(folder: Path, heads: int) -> None:
    make_tiny_model(folder, layers=1)
    (folder / "config.json").write_text(f'{{"num_attention_heads": {heads}}}')


def test_the_map_says_node_and_devices_of_every_replica(
    far: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, far, "--assume", "2x8")
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert lines["reward/judge"] == ["1", "6", "6", "node0:0-5"]
    rollout = ["node0:6-7", "node1:0-1", "node1:2-3", "node1:4-5"]
    assert lines["rollout"] == ["4", "2", "8", *rollout]
    assert lines["train"] == ["1", "1", "1", "node1:6"]
    assert "assuming 2 nodes of 8 GPUs" in out
    assert "15 of 16 GPUs" in out
    for name in (
        "model.path = models/actor",
        "reward.judge.model = models/judge",
        "data.train = data/train.jsonl",
        "data.validation = data/validation.jsonl",
    ):
        assert f"not on this machine: {name}" in out
    assert "every one must see under the same path" in out
    assert "steps: 5 at most, which take 40 prompts" in out
    assert "judge.jinja is not tried" in out


def test_one_node_and_slots(far: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, far, "--assume=15")
    assert "assuming 1 node of 15 GPUs" in out
    assert "node0:14" in out
    assert "same path" not in out
    assert "1 node of 15 slots" in said(capsys, far, "--assume", "15", "--cluster.device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--assume 14", ["need 15 GPUs", "rollout 8", "are 14", "rollout.replicas"]),
        ("--assume 4x4", ["reward/judge wants 6 GPUs", "largest node has 4", "reward.judge.dev"]),
        (
            "--assume 2x8 --rollout.replicas 3 --rollout.devices_per_replica 3",
            ["16 GPUs", "rollout 3 x 3", "2 nodes of 8", "change one of rollout.replicas"],
        ),
        ("--assume 2x8 --weights.transport folder", ["weights.folder", "node0", '"broadcast"']),
        ("--assume 15 --weights.transport ipc", ["weights.transport", "single_device"]),
        ("--assume 15 --cluster.backend local", ["one process", "--cluster.backend"]),
        ("--assume 15 --rollout.engine transformers", ["rollout.devices_per_replica = 2"]),
        ("--assume 15 --reward.judge.template no.jinja", ["reward.judge.template", "no.jinja"]),
        ("--assume", ["--assume ''", "2x8"]),
        ("--assume 0", ["--assume '0'", "from 1 to"]),
        ("--assume 0x8", ["--assume '0x8'"]),
        ("--assume 2x", ["--assume '2x'"]),
        ("--assume -3", ["--assume"]),
        ("--assume 2by8", ["'2by8'"]),
        ("--assume 99999x8", ["from 1 to 10000"]),
        ("--assume 1.5", ["'1.5'"]),
    ],
)
def test_what_cannot_work_is_one_sentence(
    far: Path, capsys: pytest.CaptureFixture[str], arguments: str, words: list[str]
) -> None:
    if arguments.startswith("--assume 2x8 --rollout"):
        words = [*words, "reward/judge 1 x 6"]
    err = said(capsys, far, *arguments.split(" "), code=2)
    assert [word for word in words if word not in err] == [], err


def test_a_shared_folder_lets_weights_travel(far: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["--weights.transport", "folder", "--weights.folder", "/shared/weights"]
    assert "weights.folder (/shared/weights)" in said(capsys, far, "--assume", "2x8", *shared)
    near = "--weights.transport folder --rollout.replicas 1 --rollout.devices_per_replica 1"
    said(capsys, far, "--assume", "2x8", *near.split(" "))  # rollout fits on the trainer's node


def test_what_is_there_is_checked_as_always(far: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (far.parent / "data").mkdir()
    data = far.parent / "data" / "train.jsonl"
    data.write_text('{"prompt": "a", "reference": "b"}\n' * 40)
    out = said(capsys, far, "--assume", "15")
    assert "40 training rows read; not tokenised, as" in out
    assert "reference answers: 0, 0, 0" in out
    assert "  | a: b" in out
    assert "steps: 5, of 40 prompts" in out
    data.write_text("{\n")
    assert "line 1 is not JSON" in said(capsys, far, "--assume", "15", code=2)
    data.unlink()
    model(far.parent / "models" / "judge", 16)
    err = said(capsys, far, "--assume", "15", code=2)
    assert "reward.judge.devices_per_replica = 6 does not divide the 16 attention heads" in err
    assert "1, 2, 4, 8, 16" in err
    out = said(capsys, far, "--assume", "15", "--reward.judge.devices_per_replica", "4")
    assert "reward.judge.model" not in out.partition("ready")[0].rpartition("not on this")[2]
    (far.parent / "models" / "judge" / "model.safetensors").unlink()
    arguments = ["--assume", "15", "--reward.judge.devices_per_replica", "4"]
    assert "has no weights" in said(capsys, far, *arguments, code=2)


def test_without_vllm_it_is_a_note_for_elsewhere_and_a_refusal_here(
    far: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec

    def find(name: str, *more: Any) -> Any:
        return None if name == "vllm" else real(name, *more)

    monkeypatch.setattr(cli_cluster, "find_spec", find)
    far.write_text(RUN.replace("replicas = 4", "replicas = 4\nengine_args = { no_such = 1 }"))
    out = said(capsys, far, "--assume", "15")
    assert "rollout.engine_args is not checked" in out
    assert "engine_args = { no_such = 1 }" in out
    (far.parent / "data").mkdir()
    for name in ("train", "validation"):
        (far.parent / "data" / f"{name}.jsonl").write_text('{"prompt": "a"}\n' * 8)
    for name in ("actor", "judge"):
        model(far.parent / "models" / name, 12)
    err = said(capsys, far, "--cluster.device", "cpu", "--cluster.slots", "15", code=2)
    assert 'rollout.engine = "vllm", and vLLM is not installed' in err
    assert "-e '.[vllm]'" in err


def test_engine_args_are_checked_by_name_where_vllm_is(
    far: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("offbeat.rollout.vllm_args")
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    for args, words in (
        ("{ max_num_batched_token = 1 }", "did you mean max_num_batched_tokens"),
        ("{ gpu_memory_utilization = 0.5 }", "set rollout.memory_share"),
    ):
        far.write_text(RUN.replace("replicas = 4", f"replicas = 4\nengine_args = {args}"))
        assert words in said(capsys, far, "--assume", "15", code=2)
    far.write_text(RUN.replace("replicas = 4", "replicas = 4\nengine_args = { swap = 1 }"))
    arguments = ["--rollout.engine", "transformers", "--rollout.devices_per_replica", "1"]
    assert "rollout.engine_args is for engine" in said(capsys, far, "--assume", "15", *arguments)


def test_a_single_device_says_that_roles_alternate(
    far: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = "--cluster.single_device --train.max_staleness 0 --rollout.replicas 1 "
    one += "--rollout.devices_per_replica 1 --reward.judge.devices_per_replica 1 "
    one += "--rollout.memory_share 0.4 --reward.judge.memory_share 0.4 --assume 1"
    folder = ["--weights.transport", "folder"]
    out = said(capsys, far, *one.split(" "), *folder)
    assert "node0:0 for rollout, train, reward/judge in turn" in out
    assert "the roles take turns" in out
    assert "Rollout and training never overlap" in out
    assert "1 of 1 GPUs" in out
    assert "NCCL" in said(capsys, far, *one.split(" "), code=2)


def test_it_needs_neither_torch_nor_ray_nor_vllm(far: Path) -> None:
    code = """
import sys
for name in ("torch", "ray", "vllm", "transformers"):
    sys.modules[name] = None
from offbeat.cli import main
raise SystemExit(main(["check", sys.argv[1], "--assume", "2x8"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(far)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "15 of 16 GPUs" in done.stdout
