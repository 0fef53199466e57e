"""`offbeat score` as its users run it: answers in, the same answers with rewards out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from offbeat.cli import main
from offbeat.testing.judge_server import Fault, JudgeServer

Project = Callable[..., Path]
pytestmark = pytest.mark.timeout(600)  # two cores may be shared with others

REWARDS = '''
import os, time

def right(prompts, completions, *, reference, **columns):
    return [float(c == r) for c, r in zip(completions, reference)]

def slow(prompts, completions, **columns):
    """Leaves a mark for each answer, and takes its time."""
    with open(os.environ["MARKS"], "a") as file:
        file.write("".join(f"{c}\\n" for c in completions))
    time.sleep(0.01 * len(completions))
    return [len(c) / 3 for c in completions]

def seen(prompts, completions, *, finish_reason, completion_tokens, **columns):
    assert set(columns) == {"reference", "more"}, sorted(columns)
    return [None if t is None else t + (f == "length") / 2
            for t, f in zip(completion_tokens, finish_reason)]

def partly(prompts, completions, **columns):
    return [1 / 3 if c.endswith("0") else float("nan") if c.endswith("1") else None
            for c in completions]
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.setenv("MARKS", str(tmp_path / "marks"))
    return tmp_path


def config(folder: Path, name: str = "run.toml", more: str = "", **sources: str) -> Path:
    """A run of which only the reward sources are there; a source is its settings as TOML."""
    lines = ['[model]\npath = "nowhere"', '[data]\ntrain = "nowhere.jsonl"', more]
    lines += [f"[reward.{source}]\n{settings}" for source, settings in sources.items()]
    path = folder / name
    path.write_text('run = "tried"\n' + "\n".join(lines) + "\n")
    return path


def function(name: str, more: str = "") -> str:
    return f'kind = "function"\nfunction = "rewards.py:{name}"\n{more}'


def judge(url: str, more: str = "") -> str:
    return f'kind = "genrm"\nbase_url = "{url}"\nmodel = "judge"\ncache = false\n{more}'


def answers(path: Path, rows: int = 5, **columns: Any) -> Path:
    found = [
        {"prompt": f"p{i}", "reference": f"a{i}", "completion": f"a{i if i % 2 else -i}"} | columns
        for i in range(rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def score(*arguments: object) -> int:
    return main(["score", *map(str, arguments)])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What it says to a mistake of the user's."""
    assert score(*arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


# -- rows in, rows out


def test_rows_come_out_with_rewards_and_a_table(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(folder, right=function("right"), partly=function("partly", "retries = 0"))
    file = answers(folder / "answers.jsonl", 4, note="\u00e4 \u2603")
    assert score(path, file) == 0
    out = read(folder / "answers.scored.jsonl")
    assert [{k: v for k, v in row.items() if k not in ("reward", "rewards")} for row in out] == (
        read(file)
    )
    assert [row["reward"] for row in out] == [1.33333, None, 0.0, 2.0]
    assert out[0]["rewards"]["partly"] == {
        "value": 0.333333, "status": "scored", "cause": None, "reason": "", "raw": "0.333333",
        "spread": None,
    }  # fmt: skip
    nan = out[1]["rewards"]["partly"]
    assert (nan["status"], nan["cause"], nan["value"]) == ("failed", "non_finite", None)
    assert out[2]["rewards"]["partly"]["status"] == "abstained"
    table = capsys.readouterr().out
    assert "4 rows, 3 with a reward" in table
    assert "partly failed(non_finite) 1, first at line 2" in table
    assert not list(folder.glob("*.progress*"))


def test_formats_hold_the_same(folder: Path) -> None:
    path = config(folder, right=function("right"))
    lines = answers(folder / "a.jsonl", 700, numbers=[1, 2], row={"x": None})
    assert score(path, lines, "-o", folder / "b.parquet") == 0
    assert score(path, lines, "-o", folder / "b.jsonl") == 0
    table = pq.read_table(folder / "b.parquet").drop_columns(["reward", "rewards"])
    pq.write_table(table, folder / "a.parquet")
    assert score(path, folder / "a.parquet", "-o", folder / "c.parquet") == 0
    assert score(path, folder / "a.parquet", "-o", folder / "c.jsonl") == 0
    wanted = read(folder / "b.jsonl")
    assert len(wanted) == 700
    for name in ("b.parquet", "c.parquet", "c.jsonl"):
        assert read(folder / name) == wanted
    again = pq.read_table(folder / "c.parquet")
    assert again.schema.field("numbers").type == table.schema.field("numbers").type


def test_what_is_known_of_an_answer_reaches_the_functions(folder: Path) -> None:
    file = folder / "a.jsonl"
    rows = [
        {"prompt": "p", "text": "a", "more": 1, "completion_tokens": 3, "finish_reason": "length"},
        {"prompt": "p", "text": [{"role": "assistant", "content": "b"}], "more": 2},
        {"prompt": "p", "text": "c", "more": 3, "completion_tokens": 4.0},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = config(folder, seen=function("seen"))
    assert score(path, file, "--answer-column", "text", "--into", "grade") == 0
    out = read(folder / "a.scored.jsonl")
    assert [row["grade"] for row in out] == [3.5, None, 4.0]
    assert out[1]["grades"]["seen"]["status"] == "abstained"


def test_sources_are_chosen_by_rows_and_by_name(folder: Path) -> None:
    path = config(
        folder,
        right=function("right", 'when = { kind = "math" }'),
        partly=function("partly", 'role = "multiply"'),
        slow=function("slow", "weight = 0"),
    )
    file = folder / "a.jsonl"
    row = {"prompt": "p", "reference": "a0", "completion": "a0"}
    rows = [row | {"kind": "math"}, row | {"reward_from": ["right"], "kind": "text"}]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    named = ("--data.reward_column", "reward_from")
    assert score(path, file, "-o", folder / "all.jsonl", *named) == 0
    first, second = read(folder / "all.jsonl")
    assert (first["reward"], second["reward"]) == (pytest.approx(1 / 3, abs=1e-6), 1.0)
    assert second["rewards"]["partly"] is None
    assert score(path, file, "-o", folder / "one.jsonl", "--sources", "slow", *named) == 0
    first, second = read(folder / "one.jsonl")
    assert (first["reward"], second["reward"]) == (pytest.approx(2 / 3, abs=1e-5), None)
    assert list(first["rewards"]) == ["slow"]
    assert second["rewards"] == {"slow": None}


# -- what the user mends


def test_mistakes_are_told_with_their_line_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(folder, slow=function("slow"))
    good = json.dumps({"prompt": "p", "completion": "c"})
    for bad, says in {
        "{": "a.jsonl line 3 is not JSON",
        '{"prompt": "p"}': "line 3 has no column 'completion'; it has: prompt; set --answer-column",
        '{"prompt": "p", "completion": null}': "line 3: column 'completion' must be a text",
        '{"completion": "c"}': "line 3 has no column 'prompt'",
        '{"prompt": "p", "completion": "c", "reward": 1}': "has a column 'reward' already",
        '{"prompt": "p", "completion": "c", "finish_reason": "eos"}': "one of stop, length, abor",
        '{"prompt": "p", "completion": "c", "completion_tokens": "x"}': "completion_tokens = 'x'",
    }.items():
        (folder / "a.jsonl").write_text(f"{good}\n\n{bad}\n")
        said = refused(capsys, path, folder / "a.jsonl")
        assert says in said
        assert "line 3" in said
    pick = '{"prompt": "p", "completion": "c", "reward": ["nobody"]}'
    (folder / "a.jsonl").write_text(f"{good}\n\n{pick}\n")
    said = refused(capsys, path, folder / "a.jsonl", "--into", "x")
    assert 'line 3: reward names "nobody", which is no reward source' in said
    assert not (folder / "marks").exists()


def test_mistakes_in_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(folder, right=function("right"))
    file = answers(folder / "a.jsonl")
    assert "does not exist" in refused(capsys, path, folder / "b.jsonl")
    assert "neither .jsonl nor .parquet" in refused(capsys, path, folder / "a.txt")
    assert "neither .jsonl nor .parquet" in refused(capsys, path, file, "-o", folder / "x.csv")
    assert "is the file itself" in refused(capsys, path, file, "-o", file)
    assert "is no folder" in refused(capsys, path, file, "-o", folder / "no" / "x.jsonl")
    said = refused(capsys, path, file, "--sources", "rigth")
    assert "--sources names 'rigth', which is no reward source; there are right" in said
    (folder / "out.jsonl").write_text("mine\n")
    assert "exists already" in refused(capsys, path, file, "-o", folder / "out.jsonl")
    assert (folder / "out.jsonl").read_text() == "mine\n"
    (folder / "empty.jsonl").write_text("\n")
    assert "has no rows" in refused(capsys, path, folder / "empty.jsonl")
    broken = config(folder, "b.toml", right=function("nothing"))
    assert "has no function nothing" in refused(capsys, broken, file)
    assert not list(folder.glob("*.progress*"))
    said = refused(capsys, path, file, "--answer-column", "prompt")
    assert "--answer-column prompt is the prompt's column" in said
    assert "File name too long" in refused(capsys, path, file, "-o", f"{'x' * 300}.jsonl")
    (folder / "part.jsonl.part").mkdir()
    said = refused(capsys, path, file, "-o", folder / "part.jsonl")
    assert "part.jsonl.part is a folder" in said
    (folder / "mixed.jsonl").write_text(
        '{"prompt": "p", "completion": "c", "x": 1}\n{"prompt": "p", "completion": "c", "x": "y"}\n'
    )
    marked = config(folder, "marked.toml", slow=function("slow"))
    mixed = (marked, folder / "mixed.jsonl", "-o", folder / "mixed.parquet")
    assert "do not fit into a parquet column (x: " in refused(capsys, *mixed)
    assert not marks(folder), "nothing was scored"
    assert not list(folder.glob("*.progress*"))
    assert score(path, folder / "mixed.jsonl", "-o", folder / "m.jsonl") == 0


def test_a_password_in_an_address_is_refused_before_it_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = answers(folder / "a.jsonl")
    for url in ("http://bob:hunter2@127.0.0.1:1/v1", "bob:hunter2@127.0.0.1:1/v1"):
        path = config(folder, right=function("right"), judge=judge(url))
        said = refused(capsys, path, file)
        assert "reward.judge.base_url holds a user or a password" in said
        assert "a.scored.jsonl.progress would keep; take it out" in said
        assert "reward.judge.api_key_env" in said
        assert "hunter2" not in said
    holding = [path.name for path in folder.iterdir() if b"hunter2" in path.read_bytes()]
    assert holding == ["run.toml"], "in the file that the user wrote alone"
    assert score(path, file, "--sources", "right") == 0, "nothing is written of the others"


# -- killed, and run again


def running(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "offbeat", "score", *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def marks(folder: Path) -> list[str]:
    path = folder / "marks"
    return path.read_text().splitlines() if path.exists() else []


def wait_for(process: subprocess.Popen[str], what: Callable[[], bool]) -> None:
    until = time.monotonic() + 240
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_run_that_was_killed_goes_on_and_writes_the_same_bytes(folder: Path, suffix: str) -> None:
    path = config(folder, right=function("right"), slow=function("slow", "concurrency = 8"))
    file, rows = answers(folder / "a.jsonl", 500), 500
    whole, out = folder / f"whole{suffix}", folder / f"out{suffix}"
    assert score(path, file, "-o", whole) == 0
    assert len(marks(folder)) == rows
    (folder / "marks").unlink()
    process = running(path, file, "-o", out, "--in-flight", 32)
    wait_for(process, lambda: len(marks(folder)) > rows // 2)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not out.exists()
    assert list(folder.glob(f"out{suffix}.progress"))
    before = len(marks(folder))
    again = running(path, file, "-o", out)
    said, noted = again.communicate(timeout=240)
    assert again.returncode == 0, noted
    assert "of 500 rows are done already" in noted
    assert "500 rows, 500 with a reward" in said
    assert out.read_bytes() == whole.read_bytes()
    assert len(marks(folder)) - before < rows * 0.75, "what was scored was not scored again"
    assert not list(folder.glob("out*.progress*"))


def test_a_full_disk_keeps_what_was_scored(folder: Path) -> None:
    path = config(folder, slow=function("slow", "concurrency = 8"))
    file, out = answers(folder / "a.jsonl", 1000), folder / "out.jsonl"
    command = [sys.executable, "-m", "offbeat", "score", path, file, "-o", out]
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *map(str, command)]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2, done.stderr
    assert f"{out}.progress cannot be written: disk I/O error; make room" in done.stderr
    assert "of 1000 rows are kept; the same command goes on from there" in done.stderr
    assert "Traceback" not in done.stderr
    before = len(marks(folder))
    assert score(path, file, "-o", out) == 0
    assert len(read(out)) == 1000
    assert len(marks(folder)) - before < 1000, "what was scored was not scored again"


def test_ctrl_c_keeps_what_was_scored(folder: Path) -> None:
    path = config(folder, slow=function("slow", "concurrency = 8"))
    file, out = answers(folder / "a.jsonl", 500), folder / "out.jsonl"
    process = running(path, file, "-o", out)
    wait_for(process, lambda: len(marks(folder)) > 100)
    process.send_signal(signal.SIGINT)
    _, noted = process.communicate(timeout=60)
    assert process.returncode == 130, noted
    assert "of 500 rows are kept; the same command goes on from there" in noted
    assert score(path, file, "-o", out) == 0
    assert len(read(out)) == 500
    assert len(marks(folder)) < 800


@pytest.fixture
def halfway(folder: Path) -> Iterator[tuple[Path, Path, Path, subprocess.Popen[str]]]:
    """A scoring that is under way, of a file to an output."""
    path = config(folder, slow=function("slow", "concurrency = 8\ndeadline_seconds = 90"))
    file, out = answers(folder / "a.jsonl", 1000), folder / "out.jsonl"
    process = running(path, file, "-o", out)
    try:
        wait_for(process, lambda: len(marks(folder)) > 50)
        yield path, file, out, process
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_progress_belongs_to_one_process_and_to_what_the_scores_follow_from(
    folder: Path,
    halfway: tuple[Path, Path, Path, subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, file, out, process = halfway
    assert "is in use: another offbeat score writes" in refused(capsys, path, file, "-o", out)
    process.kill()
    process.wait(60)
    said = refused(capsys, path, file, "-o", out, "--reward.slow.weight", "2")
    assert "with another reward.slow.weight (1.0, now 2.0); put that back to go on, or de" in said
    assert f"delete {out}.progress to begin anew" in said
    said = refused(capsys, path, file, "-o", out, "--answer-column", "reference")
    assert 'another answer-column ("completion", now "reference")' in said
    code = (folder / "rewards.py").read_text()
    (folder / "rewards.py").write_text(code.replace("/ 3", "/ 4"))
    assert "rewards.py" in refused(capsys, path, file, "-o", out)
    (folder / "rewards.py").write_text(code)
    text = file.read_text()
    answers(file, 999)
    assert "another content of a.jsonl (" in refused(capsys, path, file, "-o", out)
    file.write_text(text)
    more = ("--reward.slow.deadline_seconds", "100", "--reward.slow.workers", "2")
    assert score(path, file, "-o", out, *more) == 0, "how it is asked may change"
    capsys.readouterr()
    (folder / "out2.jsonl.progress").write_text("not a database, but long enough to be one\n" * 50)
    said = refused(capsys, path, file, "-o", folder / "out2.jsonl")
    assert "is no progress of offbeat score" in said


# -- judges


def grade(text: str) -> str:
    """A grade that follows from the judged text."""
    return str(1 + len(text) % 10)


def test_a_judge_is_tried_and_no_more_than_in_flight_is_under_way(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with JudgeServer(reply=grade, delay=0.02) as server:
        path = config(folder, judge=judge(server.base_url))
        file = answers(folder / "a.jsonl", 60)
        assert score(path, file, "--in-flight", 4) == 0
        assert server.most_at_once <= 4
        assert len(server.calls) == 60
    out = read(folder / "a.scored.jsonl")
    assert all(0 <= row["reward"] <= 1 for row in out)
    assert all(row["rewards"]["judge"]["raw"].isdigit() for row in out)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("judge")]
    _, scored, _, failed, _, calls, cached, tokens, _ = line.split()
    assert (scored, failed, calls, cached) == ("60", "0", "60", "0")
    assert int(tokens) > 60


def test_a_judge_that_is_down_past_its_patience_ends_it_and_later_it_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "patience_seconds = 2\ndeadline_seconds = 2\nretries = 1\nconcurrency = 4"
    with JudgeServer(reply=grade, delay=0.01) as server:
        path = config(folder, judge=judge(server.base_url, more))
        file = answers(folder / "a.jsonl", 300)
        whole = folder / "whole.jsonl"
        assert score(path, file, "-o", whole) == 0
        server.mix = None
        server.delay = 0.05
        out = folder / "out.jsonl"
        process = running(path, file, "-o", out)
        before = server.arrived_calls
        wait_for(process, lambda: server.arrived_calls > before + 50)
        server.stop()
        _, noted = process.communicate(timeout=240)
        assert process.returncode == 1, noted
        assert "reward.judge" in noted
        assert "Traceback" not in noted
        assert "rows are kept; the same command goes on from there" in noted
        assert not out.exists()
        server.start()
        server.delay = 0.0
        before = server.arrived_calls
        assert score(path, file, "-o", out, "--retry-failed") == 0
        assert server.arrived_calls - before < 290, "what was scored was not judged again"
    assert out.read_bytes() == whole.read_bytes()


def test_failures_are_named_and_never_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [Fault(body=b"garbage"), Fault(status=400)]
    with JudgeServer(reply="10", script=faults) as server:
        path = config(folder, judge=judge(server.base_url, "retries = 0\nconcurrency = 1"))
        assert score(path, answers(folder / "a.jsonl", 8)) == 0
    out = read(folder / "a.scored.jsonl")
    failed = [row for row in out if row["rewards"]["judge"]["status"] == "failed"]
    assert len(failed) == 2
    assert all(row["reward"] is None and row["rewards"]["judge"]["cause"] for row in failed)
    assert all(row["rewards"]["judge"]["value"] is None for row in failed)
    assert {row["reward"] for row in out} == {None, 1.0}
    assert "judge failed(" in capsys.readouterr().out


def test_a_source_that_always_fails_is_reported_and_stalls_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(folder, right=function("right"), seen=function("seen", "retries = 0"))
    file = answers(folder / "a.jsonl", 200)
    assert score(path, file, "--reward.seen.max_failed_share", "0.1") == 0
    out = read(folder / "a.scored.jsonl")
    assert {row["rewards"]["seen"]["cause"] for row in out} == {"raised"}
    assert {row["rewards"]["right"]["status"] for row in out} == {"scored"}
    said = capsys.readouterr().out
    assert "seen failed(raised) 200, first at line 1: AssertionError: ['reference']" in said


def test_rows_of_a_group_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows on end with one prompt are a group, or those with one value of --group-column."""

    def longer(text: str) -> str:
        """Prefers the longer of the two answers that it is shown."""
        return "A" if text.index("xx") < text.index(" y ") else "B"

    file = folder / "a.jsonl"
    rows = [
        {"prompt": f"p{i // 2}", "of": i // 2, "completion": "xx " if i % 2 else " y "}
        for i in range(6)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with JudgeServer(reply=longer) as server:
        path = config(folder, judge=judge(server.base_url, 'pairwise = "all"'))
        assert score(path, file) == 0
        assert [row["reward"] for row in read(folder / "a.scored.jsonl")] == [0.0, 1.0] * 3
        assert score(path, file, "-o", folder / "b.jsonl", "--group-column", "of") == 0
        assert (folder / "b.jsonl").read_text() == (folder / "a.scored.jsonl").read_text()
        file.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], rows[2], rows[1])))
        said = refused(capsys, path, file, "-o", folder / "c.jsonl", "--group-column", "of")
        assert "line 3 belongs to a group that ended before; sort the rows by of" in said


# -- models of the run's own


def test_models_stand_in_this_process_or_on_ray_and_say_the_same(
    project: Project, models: Path
) -> None:
    more = {"reward__judge__parser": "number", "cluster__slots": 2}
    path = project(("rule", "judge", "scorer"), **more)
    file = path.parent / "a.jsonl"
    rows = read(models / "validation.jsonl")
    file.write_text("".join(json.dumps(r | {"completion": r["prompt"][:2]}) + "\n" for r in rows))
    local, ray = path.parent / "local.jsonl", path.parent / "ray.jsonl"
    chosen = ("--sources", "judge,scorer", "--reward.judge.max_failed_share", "1")
    assert score(path, file, "-o", local, *chosen) == 0
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-m", "offbeat", "score", path, file, "-o", ray, *chosen]
    command += ["--cluster.backend", "ray"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    assert local.read_bytes() == ray.read_bytes()
    outcomes = [row["rewards"] for row in read(local)]
    assert all(outcome["scorer"]["status"] == "scored" for outcome in outcomes)
    for outcome in outcomes:
        judged = outcome["judge"]
        assert (judged["status"] == "scored") == (judged["value"] is not None)
        assert (judged["status"] == "failed") == (judged["cause"] is not None)
    assert not (path.parent / "runs").joinpath("run").exists(), "the run's name is still free"
