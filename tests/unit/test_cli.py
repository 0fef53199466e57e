"""The commands and their exit codes."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_data import save_tokenizer

from offbeat.cli import main
from offbeat.errors import RunFailed, UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 128}')
    (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # no tensors
    return folder


@pytest.fixture
def project(tmp_path: Path, model: Path) -> Path:
    folder = tmp_path / "project"
    assert main(["init", str(folder), "--model", str(model)]) == 0
    return folder


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--reward.other.when", '{"tsk": ["a"]}'], "reward.other.when names the column 'tsk'"),
        (["--data.reference_column", "refrence"], "data.reference_column names the column 'refr"),
    ],
)
def test_a_column_that_no_row_has_is_refused_with_those_that_are_there(
    project: Path, more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (project / "run.toml").read_text()
    text += '\n[reward.other]\nkind = "function"\nfunction = "rewards.py:correct"\n'
    (project / "run.toml").write_text(text)
    assert main(["check", str(project / "run.toml"), *more]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "there are prompt, reference" in said


def test_check_says_what_does_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (project / "run.toml").read_text().replace('validation = "validation.jsonl"', "")
    text += '\n[reward.other]\nkind = "function"\nfunction = "rewards.py:correct"\n'
    (project / "run.toml").write_text(text + 'when = { reference = "none of them" }\n')
    assert main(["check", str(project / "run.toml")]) == 0
    out = capsys.readouterr().out
    assert "reward.other scores no row of" in out
    assert "validate.every = 10 does nothing, as data.validation is not set" in out


def test_settings_before_the_file_are_told(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--run", "other", str(project / "run.toml")]) == 2
    assert "settings stand behind the file: offbeat check CONFIG --run" in capsys.readouterr().err


def test_init_writes_a_project_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = sorted(path.name for path in project.iterdir())
    assert names == ["rewards.py", "run.toml", "train.jsonl", "validation.jsonl"]
    before = (project / "run.toml").read_text()
    assert main(["init", str(project)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (project / "run.toml").read_text() == before


def test_check_says_what_a_run_would_do(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(project / "run.toml"), "--train.steps", "30"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for line in (
        "steps = 30",
        "[reward.correct]",
        "2 of 8 slots",
        f"reward.correct.function = '{project}/rewards.py:correct' on 3 rows:\n"
        "  empty answers: 0, 0, 0",
        "  reference answers: 1, 1, 1",
        "  short answers: 0, 0, 0",
        "train: 24 prompts",
        "validation: 8 prompts",
        "steps: 30, of 2400 prompts",
        "32 samples, 512 completion tokens at most",
        "live groups: 12 at most",
        "note: rollout.max_context = 256 is more than the model's 128 positions",
    ):
        assert line in out
    assert not (project / "runs").exists()


@pytest.mark.parametrize("block", ["none", "finder"])
def test_check_needs_neither_torch_nor_ray(project: Path, block: str) -> None:
    code = """
import sys
from offbeat.cli import main
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "ray"):
            raise ImportError("blocked " + name)
if sys.argv[1] == "none":
    sys.modules["torch"] = sys.modules["ray"] = None
else:
    sys.meta_path.insert(0, Block())
code = main(["check", sys.argv[2], "--data.on_overlong", "skip"])
assert not sys.modules.get("torch") and not sys.modules.get("ray")
raise SystemExit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, block, str(project / "run.toml")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    said = "train: 24 prompts" if block == "none" else "24 training rows read; not tokenised"
    assert said in done.stdout


class _Judge(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


def test_a_ray_address_where_nothing_listens_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(["check", str(project / "run.toml"), "--cluster.backend", "ray"]) == 2
    assert f"RAY_ADDRESS = '{address}' does not answer" in capsys.readouterr().err


@pytest.fixture
def judge() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), _Judge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (404, 0), (401, 2), (503, 2)])
def test_external_judges_are_probed(
    project: Path,
    judge: HTTPServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    code: int,
) -> None:
    monkeypatch.setattr(_Judge, "status", status)
    (project / "judge.jinja").write_text("{{ question }}|{{ answer }}|{{ columns.reference }}")
    address = f"http://127.0.0.1:{judge.server_port}/v1"
    arguments = ["check", str(project / "run.toml"), "--reward.judge.kind", "genrm"]
    arguments += ["--reward.judge.base_url", address, "--reward.judge.template", "judge.jinja"]
    assert main(arguments) == 2  # no model named, and none listed
    assert "reward.judge.model is missing" in capsys.readouterr().err or code == 2
    arguments += ["--reward.judge.model", "j"]
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert f"external judge at {address}" in out
    assert (f"{address} answers (HTTP {status}" in out) == (code == 0)
    assert (address in err) == (code == 2)
    assert "9+" in out or "=|" in out


def test_a_template_that_uses_an_unknown_name(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "judge.jinja").write_text("{{ completion }}")
    arguments = ["check", str(project / "run.toml"), "--reward.judge.kind", "genrm"]
    arguments += ["--reward.judge.base_url", "http://127.0.0.1:9/v1"]
    assert main([*arguments, "--reward.judge.template", "judge.jinja"]) == 2
    assert "reward.judge.template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [0.0]", ["1 values for 3 completions"]),
        ("return 'abc'", ["reward.correct.function", "returned str"]),
        ("raise KeyError('level')", ["KeyError", "every kind of answer"]),
        ("import os; os._exit(3)", ["cannot be used", "the worker ended with 3"]),
        ("return ['x'] * len(completions)", ["not a number"]),
    ],
)
def test_functions_that_cannot_work_are_refused(
    project: Path, capsys: pytest.CaptureFixture[str], body: str, words: list[str]
) -> None:
    source = f"def correct(prompts, completions, **columns):\n    {body}\n"
    (project / "rewards.py").write_text(source)
    assert main(["check", str(project / "run.toml")]) == 2
    err = capsys.readouterr().err
    assert [word for word in words if word not in err] == []
    assert err.count("\n") == 1


def test_a_function_that_hangs_is_ended_at_its_deadline(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "import time\ndef correct(prompts, completions):\n    time.sleep(600)\n"
    (project / "rewards.py").write_text(source)
    arguments = ["check", str(project / "run.toml"), "--reward.correct.deadline_seconds", "0.5"]
    assert main(arguments) == 2
    assert "more than 0.5 s" in capsys.readouterr().err


def test_functions_that_fail_on_some_answers_are_shown(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "async def correct(prompts, completions):\n    return [1 / len(c) for c in completions]"
    )
    (project / "rewards.py").write_text(source)
    assert main(["check", str(project / "run.toml")]) == 0
    assert "empty answers: raised ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (None, 0, ""),
        (UserError("mend\nthis"), 2, "offbeat: mend this\n"),
        (RunFailed("engine 0 died after step 3"), 1, "offbeat: engine 0 died after step 3\n"),
        (ExceptionGroup("tasks", [UserError("mend")]), 2, "offbeat: mend\n"),
        (ExceptionGroup("tasks", [UserError("a"), ValueError("b")]), 1, "Traceback"),
        (ValueError("ours"), 1, "Traceback"),
        (KeyboardInterrupt(), 130, "offbeat: interrupted\n"),
    ],
)
def test_exit_codes(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException | None,
    code: int,
    said: str,
) -> None:
    launch = pytest.importorskip("offbeat.cluster.launch")

    def train(config: Any, stream: Any) -> int:
        if raised is not None:
            raise raised
        return 0

    monkeypatch.setattr(launch, "train", train)
    assert main(["train", str(project / "run.toml")]) == code
    err = capsys.readouterr().err
    assert said in err
    assert ("Traceback" in err) == ("Traceback" in said)


@pytest.mark.parametrize("setting", ["runs_dir", "ledger_dir", "weights.folder"])
def test_check_refuses_folders_that_cannot_be_made(
    project: Path, tmp_path: Path, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["check", str(project / "run.toml"), f"--{setting}", str(tmp_path / "file")]) == 2
    err = capsys.readouterr().err
    assert f"{setting}: " in err
    assert "is no folder; set it to" in err


def test_plot_and_eval_refuse_what_is_not_there(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(tmp_path / "none"), "-o", "x.png"]) == 2
    assert main(["eval", str(project / "run.toml"), "--model", str(tmp_path / "none")]) == 2
    assert main(["eval", str(project / "run.toml"), "--validate.function", "none"]) == 2
    err = capsys.readouterr().err
    assert "no run directory" in err
    assert "--model" in err
    assert "validate.function is not set" in err


def test_half_of_a_character_in_a_prompt_is_refused_with_its_line(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, command in (("train", "check"), ("validation", "eval")):
        path = project / f"{name}.jsonl"
        whole = path.read_text()
        path.write_text(whole + '{"prompt": "abc\\ud83d>", "reference": "1"}\n')
        line = len(whole.splitlines()) + 1
        assert main([command, str(project / "run.toml")]) == 2
        err = capsys.readouterr().err
        assert f"{name}.jsonl line {line} has \\ud83d alone in its prompt" in err
        assert err.count("\n") == 1
        path.write_text(whole)


@pytest.mark.parametrize(("key", "named"), [("--model", "--model"), ("--model.path", "model.path")])
def test_eval_of_weights_that_were_cut_short_says_what_check_says(
    project: Path, tmp_path: Path, key: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    save_tokenizer(cut)
    (cut / "config.json").write_text('{"model_type": "llama"}')
    (cut / "model.safetensors").write_bytes(b"\xff" * 100)
    assert main(["check", str(project / "run.toml"), "--model.path", str(cut)]) == 2
    said = capsys.readouterr().err
    assert "model.safetensors is no safetensors file or was cut short" in said
    assert main(["eval", str(project / "run.toml"), key, str(cut)]) == 2
    assert capsys.readouterr().err == said.replace("model.path:", f"{named}:")


def test_eval_of_a_model_directory(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    pytest.importorskip("offbeat.rollout.transformers_engine")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(shape).save_pretrained(str(tmp_path / "checkpoint" / "model"))
    arguments = ["eval", str(project / "run.toml"), "--model", str(tmp_path / "checkpoint")]
    assert main(arguments) == 2
    assert "holds no tokenizer" in capsys.readouterr().err
    save_tokenizer(tmp_path / "checkpoint" / "model")
    assert main([*arguments, "--model.path", str(project / "none")]) == 0
    said = capsys.readouterr().out
    assert "accuracy 0" in said
    assert "n 8" in said
    more = ["--validate.samples", "2", "--validate.temperature", "1", "--validate.limit", "3"]
    assert main([*arguments, *more]) == 0
    said = capsys.readouterr().out
    assert "n 3" in said
    assert "pass@2" in said
    assert "reward" not in said.partition(":")[2], "reward models are for runs"
