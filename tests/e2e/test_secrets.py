"""A judge's key is in nothing that a run writes or says, nor on any command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.starts import Started

from offbeat.cli import main
from offbeat.config_file import load_config
from offbeat.testing.faults import Fault
from offbeat.testing.judge_faults import Fault as Answer
from offbeat.testing.judge_server import JudgeServer

Project = Callable[..., Path]
KEY = "sk-very-secret-abcdefghij"


def project_with_judge(project: Project, base_url: str, **changes: object) -> Path:
    return project(
        ("judge", "rule"), reward__judge__kind="genrm", reward__judge__base_url=base_url,
        reward__judge__model="judge", reward__judge__api_key_env="OFFBEAT_TEST_KEY",
        reward__judge__max_tokens=16, reward__judge__max_context=512,
        reward__judge__retries=1, train__steps=3, train__checkpoint_every=1, **changes,
    )  # fmt: skip


def command_lines(pid: int) -> bytes:
    """Of a process and all that it started, as `ps` shows them."""
    found = b""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)] = int(stat[1])
    for one in parents:
        at = one
        while at in parents and at != pid:
            at = parents[at]
        if at == pid:
            try:
                found += (Path("/proc") / str(one) / "cmdline").read_bytes() + b"\n"
            except OSError:
                continue
    return found


def holding(folder: Path, secret: str) -> list[Path]:
    """Files that have it, as it is or as JSON, SQLite and uncompressed parquet have it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if secret.encode() in path.read_bytes()]


def test_a_key_is_in_no_file_no_line_and_no_command(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_TEST_KEY", KEY)
    echo = f'{{"error": "the key {KEY} is over its quota, Bearer {KEY}"}}'
    script = [Answer(), *(Answer(429 if n % 2 else 500, body=echo.encode()) for n in range(4))]
    with JudgeServer(reply=f"{KEY} 8", script=script) as server:
        path = project_with_judge(project, server.base_url, reward__judge__parser="last_number")
        run_dir = load_config(path, []).run_dir
        first = Started(["train", path], tmp_path, Fault("trainer.before_step", "hang", nth=2))
        first.fires()
        shown = command_lines(first.pid)
        first.kill()
        again = Started(["resume", run_dir], tmp_path)
        assert again.ends() == 0, again.text
        assert any(f"Bearer {KEY}" in call.headers.values() for call in server.calls)
    assert b"python" in shown
    assert KEY.encode() not in shown
    found = [p for p in holding(run_dir, KEY) if p.parent.name != "transcripts"]
    assert found == []
    assert holding(run_dir / "transcripts", KEY) == []
    assert KEY not in first.text + again.text
    assert holding(run_dir.parent, KEY) == [], "nor in the verdicts that are kept"


def test_a_failure_tells_the_servers_words_without_the_key(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("OFFBEAT_TEST_KEY", KEY)
    refused = Answer(401, body=f"no such key: {KEY}".encode())
    with JudgeServer(script=[refused] * 1000) as server:
        path = project_with_judge(project, server.base_url, reward__judge__patience_seconds=1)
        assert main(["train", str(path)]) == 1
    said = capsys.readouterr()
    run_dir = load_config(path, []).run_dir
    assert "reward.judge" in said.err
    assert "no such key: ***" in (run_dir / "logs" / "driver.log").read_text()
    assert KEY not in said.out + said.err
    assert holding(run_dir, KEY) == []


def test_a_password_in_an_address_is_refused_before_it_is_written(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("OFFBEAT_TEST_KEY", KEY)
    path = project_with_judge(project, "http://me:hunter2@127.0.0.1:9/v1")
    for command in ("train", "check"):
        assert main([command, str(path)]) == 2
        said = capsys.readouterr()
        assert "reward.judge.api_key_env" in said.err
        assert "hunter2" not in said.out + said.err
    assert not load_config(path, []).run_dir.exists()
    assert main(["train", str(path), "--use_rewards", '["rule"]']) == 2, "config.json has them all"
    assert "hunter2" not in capsys.readouterr().err
    well = ["--reward.judge.base_url", "http://127.0.0.1:9/v1", "--use_rewards", '["rule"]']
    assert main(["train", str(path), *well]) == 0
    run_dir = load_config(path, []).run_dir
    with_password = ["--reward.judge.base_url", "http://me:hunter2@127.0.0.1:9/v1"]
    for words in (["fork", str(run_dir), "--step", "2", "other"], ["resume", str(run_dir)]):
        assert main([*words, *with_password]) == 2
        said = capsys.readouterr()
        assert "reward.judge.api_key_env" in said.err
        assert "hunter2" not in said.out + said.err
    assert holding(tmp_path, "hunter2") == [path], "in the file that the user wrote alone"
    assert "OFFBEAT_TEST_KEY" in os.environ
