"""`offbeat resume` after SIGKILL: nothing is lost, nothing is done twice, the bound holds."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.e2e.starts import Started, rows, summary_of

from offbeat.cli import main
from offbeat.cli_resume import plan_resume
from offbeat.config_file import load_config
from offbeat.errors import UserError
from offbeat.ledger import LEFT_OVER
from offbeat.store import read_counts, read_meta
from offbeat.testing.faults import Fault
from offbeat.track.metrics import read_metrics
from offbeat.train.checkpoint import all_checkpoints

Project = Callable[..., Path]
HOLD = Fault("trainer.before_step", "hang", nth=4)  # a run that stands still in its fourth step
NOTING = """
import os

def noting(prompts, completions, id, **columns):
    line = "".join(f"{n}\\n" for n in id)
    fd = os.open(NOTED, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode())
    os.close(fd)
    return [sum(ch.isalpha() for ch in c) / 8 for c in completions]
"""


def run_dir_of(path: Path) -> Path:
    return load_config(path, []).run_dir


def check_books(run_dir: Path, steps: int, groups_per_step: int) -> None:
    """Every ordinal ended once, and every step consumed its groups."""
    counts = read_counts(run_dir / "ledger.sqlite")
    lost = sum(counts["discarded"].values())
    assert counts["admitted"] == counts["trained"] + lost + counts["live"]
    trained = [row for row in rows(run_dir) if row.state == "trained"]
    assert counts["trained"] == len(trained) == steps * groups_per_step
    assert Counter(row.step for row in trained) == dict.fromkeys(range(steps), groups_per_step)
    assert summary_of(run_dir)["groups"] == counts


def check_samples(run_dir: Path, bound: int) -> None:
    """What each step trained on: no ordinal twice, all within the bound, as the ledger says."""
    by_ordinal: dict[int, int] = {}
    for file in sorted((run_dir / "samples").glob("step-*.parquet")):
        step = int(file.stem.partition("-")[2])
        table = pq.read_table(file).to_pydict()
        assert all(0 <= stale <= bound for stale in table["staleness"]), file
        for ordinal in set(table["ordinal"]):
            assert ordinal not in by_ordinal, f"{ordinal} in steps {by_ordinal[ordinal]}, {step}"
            by_ordinal[ordinal] = step
    found = {row.ordinal: row.step for row in rows(run_dir) if row.state == "trained"}
    assert by_ordinal == found


def test_a_reward_that_changed_between_two_starts_has_drifted(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The resumed run looks at its anchors when they are due, and knows the first look."""
    body = "def f(prompts, completions):\n    return [{} for c in completions]\n"
    (tmp_path / "f.py").write_text(body.format("len(c) / 8"))
    anchors = [{"question": "q", "answer": "a" * n, "grade": n / 8} for n in (0, 4, 8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in anchors))
    path = project(
        ("f",), reward__f__kind="function", reward__f__function="f.py:f", train__steps=4,
        reward__f__anchors="a.jsonl", reward__f__anchors_every=3, train__warmup_steps=0,
    )  # fmt: skip
    run_dir = run_dir_of(path)
    assert main(["train", str(path)]) == 0
    (tmp_path / "f.py").write_text(body.format("1 - len(c) / 8"))
    assert main(["resume", str(run_dir), "--train.steps", "8"]) == 0
    looks = [r for r in read_metrics(run_dir / "metrics.jsonl") if r["type"] == "anchors"]
    first, second, third = looks
    assert (first["step"], first["drift"]) == (0, None)
    assert (second["step"] in (3, 4), second["drift"]) == (True, 0)
    assert (third["step"] in (6, 7, 8), third["drift"]) == (True, pytest.approx(2 / 3))
    assert "agreement with the known grades 1.00 -> -1.00" in capsys.readouterr().out
    (warning,) = summary_of(run_dir)["health"]["warnings"]
    assert warning["source"] == "f"


def test_a_killed_run_goes_on_with_a_new_rate_and_tells_one_story(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project(train__steps=9, train__checkpoint_every=2, train__warmup_steps=0)
    run_dir = run_dir_of(path)
    first = Started(["train", path], tmp_path, Fault("trainer.before_step", "hang", nth=6))
    first.fires()
    assert main(["resume", str(run_dir)]) == 2, "it is being trained"
    assert f"process {first.pid}" in capsys.readouterr().err
    first.kill()
    first.plan.assert_fired()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"type":"step","step":5,"ti')  # as a killed process leaves it
    before = (run_dir / "config.json").read_bytes()
    assert main(["train", str(path)]) == 2
    assert f"offbeat resume {run_dir}" in capsys.readouterr().err
    assert main(["resume", str(run_dir), "--rollout.group_size", "2"]) == 2
    assert "rollout.group_size cannot change" in capsys.readouterr().err
    assert (run_dir / "config.json").read_bytes() == before, "refused, and nothing is touched"

    assert main(["resume", str(run_dir), "--train.learning-rate", "3e-4"]) == 0
    said = capsys.readouterr().out
    assert "train.learning_rate: 0.0001 -> 0.0003" in said
    assert "goes on from step-000004" in said
    assert main(["resume", str(run_dir)]) == 0
    assert "is finished: all 9 steps are done" in capsys.readouterr().out

    check_books(run_dir, 9, 2)
    check_samples(run_dir, 2)
    records = list(read_metrics(run_dir / "metrics.jsonl"))
    steps = [record for record in records if record["type"] == "step"]
    assert [record["step"] for record in steps] == [0, 1, 2, 3, 4, *range(4, 9)]
    rates = {record["step"]: record["learning_rate"] for record in steps}
    recorded = 1 + max(step for step, rate in rates.items() if rate == 1e-4)
    assert recorded >= 6, "steps whose batch was recorded are redone with their old rate"
    assert all(rates[step] == 3e-4 for step in range(recorded, 9))
    summary = summary_of(run_dir)
    assert (summary["status"], summary["steps"]) == ("finished", 9)
    assert [(s["from_step"], s["lineage"], s["status"]) for s in summary["starts"]] == [
        (0, 0, "killed"),
        (4, 1, "finished"),
    ]
    took = sum(start["wall_seconds"] for start in summary["starts"])
    assert summary["wall_seconds"] == pytest.approx(took, abs=0.01)
    assert summary["staleness"]["max"] <= 2
    assert read_meta(run_dir / "ledger.sqlite")["lineage"] == "1"
    configs = [json.loads(line) for line in (run_dir / "configs.jsonl").read_text().splitlines()]
    assert [c["config"]["train"]["learning_rate"] for c in configs] == [1e-4, 3e-4]
    assert json.loads((run_dir / "config.json").read_text()) == configs[-1]["config"]
    assert main(["plot", str(run_dir), "-o", str(tmp_path / "run.png")]) == 0


def test_w4_what_was_generated_and_judged_before_the_kill_is_not_done_again(
    project: Project, tmp_path: Path
) -> None:
    data, noted = tmp_path / "data.jsonl", tmp_path / "noted.txt"
    lines = [{"prompt": f"reverse {n}", "reference": "x", "id": n} for n in range(48)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "noting.py").write_text(NOTING.replace("NOTED", repr(str(noted))))
    path = project(
        ("noting",), reward__noting__kind="function", reward__noting__function="noting.py:noting",
        data__train=str(data), train__steps=20, train__max_staleness=14, train__checkpoint_every=50,
        data__shuffle=False,
    )  # fmt: skip
    run_dir = run_dir_of(path)

    def done() -> dict[int, str]:
        found = {row.ordinal: row.state for row in rows(run_dir)}
        return {o: s for o, s in found.items() if s in ("scored", "ready", "batched", "trained")}

    first = Started(["train", path], tmp_path, HOLD)
    first.fires()
    first.until(lambda: sum(state == "ready" for state in done().values()) >= 26, "30 groups")
    first.kill()
    before = done()
    judged = Counter(map(int, noted.read_text().split()))
    calls = len(noted.read_text().split())
    assert len(before) >= 30
    plan = plan_resume(run_dir)
    from offbeat.cluster import launch

    assert launch.resume(plan.config, plan.go_on, None) == 0
    again = Counter(map(int, noted.read_text().split()[calls:]))
    twice = {o: again[o] for o in before if again[o]}
    assert twice == {}, "judged a second time"
    assert all(judged[o] >= 4 for o in before), "by its four samples, and preflight's tries"
    check_books(run_dir, 20, 2)
    states = {row.ordinal: row.state for row in rows(run_dir)}
    assert all(states[o] == "trained" for o in before)
    attempts = {row.ordinal: row.attempt for row in rows(run_dir)}
    assert all(attempts[o] == 0 for o in before), "generated a second time"
    check_samples(run_dir, 14)


def test_five_kills_in_a_row_reach_the_end_within_the_bound(
    project: Project, tmp_path: Path
) -> None:
    path = project(train__steps=14, train__checkpoint_every=3)
    run_dir = run_dir_of(path)
    points = (
        Fault("trainer.after_update", "kill", nth=3),
        Fault("checkpoint.before_rename", "kill"),
        Fault("ledger.batch_committed", "kill", nth=2),
        Fault("driver.saved", "kill", nth=1),
        Fault("weights.published", "kill", nth=2),
    )
    for number, fault in enumerate(points):
        words = ["resume", run_dir] if number else ["train", path]
        start = Started(words, tmp_path, fault)
        assert start.ends() == -9, start.text
        start.plan.assert_fired()
    last = Started(["resume", run_dir], tmp_path)
    assert last.ends() == 0, last.text
    check_books(run_dir, 14, 2)
    check_samples(run_dir, 2)
    summary = summary_of(run_dir)
    assert summary["steps"] == 14
    lineages = [start["lineage"] for start in summary["starts"]]
    assert lineages == sorted(set(lineages)), "none is used twice"
    versions = {r["step"]: r["staleness"]["max"] for r in read_metrics(run_dir / "metrics.jsonl")
                if r["type"] == "step"}  # fmt: skip
    assert max(versions.values()) <= 2


def test_groups_beyond_the_steps_that_a_resumed_run_has_are_left_over_by_name(
    project: Project, tmp_path: Path
) -> None:
    path = project(train__steps=40, train__max_staleness=8, data__epochs=2)
    run_dir = run_dir_of(path)
    first = Started(["train", path], tmp_path, HOLD)
    first.fires()
    first.until(lambda: sum(row.state == "ready" for row in rows(run_dir)) >= 8, "8 groups")
    first.kill()
    assert main(["resume", str(run_dir), "--train.steps", "5"]) == 0
    check_books(run_dir, 5, 2)
    counts = read_counts(run_dir / "ledger.sqlite")
    assert counts["live"] == 0
    assert counts["discarded"] == {LEFT_OVER: counts["admitted"] - 10}
    assert counts["discarded"][LEFT_OVER] >= 4


def test_w5_the_bound_holds_from_the_first_batch_after_a_resume_late_in_a_run(
    project: Project, tmp_path: Path
) -> None:
    path = project(train__steps=44, data__epochs=2, train__checkpoint_every=40)
    run_dir = run_dir_of(path)
    first = Started(["train", path], tmp_path, Fault("trainer.before_step", "hang", nth=42))
    first.fires()
    first.kill()
    plan = plan_resume(run_dir)
    assert plan.go_on is not None
    assert plan.go_on.version == 40
    last = Started(["resume", run_dir], tmp_path)
    assert last.ends() == 0, last.text
    check_books(run_dir, 44, 2)
    check_samples(run_dir, 2)


def test_what_is_no_run_or_damaged_is_refused_in_a_sentence(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project(train__steps=2)
    assert main(["train", str(path)]) == 0
    run_dir = run_dir_of(path)

    def files(run: Path) -> list[Path]:
        """Without what a reader of the ledger makes beside it."""
        found = run.rglob("*") if run.is_dir() else []
        return sorted(p for p in found if not p.name.endswith(("-wal", "-shm")))

    def refused(run: Path, *words: str) -> str:
        there = files(run)
        capsys.readouterr()
        assert main(["resume", str(run), *words]) == 2
        assert there == files(run)
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1, "one sentence"
        return said.err

    def copy(name: str) -> Path:
        return Path(shutil.copytree(run_dir, tmp_path / "moved" / name))

    assert "is no run directory" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(tmp_path / "empty")
    cut = copy("cut")
    (cut / "config.json").write_text((run_dir / "config.json").read_text()[:300])
    assert "config.json is damaged" in refused(cut)
    odd = copy("odd")
    (odd / "config.json").write_text("[]")
    assert "no configuration that a run wrote" in refused(odd)
    gone = copy("gone")
    (gone / "ledger.sqlite").unlink()
    assert "the run's ledger, is gone" in refused(gone)
    bad = copy("bad")
    (bad / "ledger.sqlite").write_bytes(b"no database at all" * 100)
    assert "the run's ledger, is damaged" in refused(bad)
    away = copy("away")
    text = (run_dir / "config.json").read_text()
    (away / "config.json").write_text(text.replace("/actor", "/gone"))
    assert "model.path" in refused(away)
    assert "runs_dir cannot change" in refused(run_dir, "--runs_dir", "x")
    assert "--nonsense is no setting" in refused(run_dir, "--nonsense", "1")
    assert "train.steps = 1, but 2 steps" in refused(run_dir, "--train.steps", "1")

    moved = copy("whole")
    assert main(["resume", str(moved)]) == 0, "it lies elsewhere, under another name"
    assert plan_resume(moved).config.run_dir == moved
    assert main(["resume", str(moved), "--train.steps", "4"]) == 0, "and is made longer"
    check_books(moved, 4, 2)
    assert read_counts(run_dir / "ledger.sqlite")["trained"] == 4


def test_a_run_that_had_not_begun_begins(project: Project, tmp_path: Path) -> None:
    path = project(train__steps=2)
    run_dir = run_dir_of(path)
    first = Started(["train", path], tmp_path, Fault("trainer.setup", "kill"))
    assert first.ends() == -9
    assert not (run_dir / "ledger.sqlite").exists()
    assert plan_resume(run_dir).go_on is None
    assert main(["resume", str(run_dir)]) == 0
    check_books(run_dir, 2, 2)


def test_a_run_made_longer_that_is_killed_is_not_finished(project: Project, tmp_path: Path) -> None:
    path = project(train__steps=4, train__checkpoint_every=2)
    run_dir = run_dir_of(path)
    assert main(["train", str(path)]) == 0
    assert plan_resume(run_dir).finished == 4
    longer = ["resume", run_dir, "--train.steps", "8"]
    second = Started(longer, tmp_path, Fault("trainer.before_step", "kill", nth=3))
    assert second.ends() == -9, second.text
    assert not (run_dir / "summary.json").exists(), "the one of the first start is over"
    assert plan_resume(run_dir).finished is None
    assert main(["resume", str(run_dir)]) == 0
    assert plan_resume(run_dir).finished == 8
    check_books(run_dir, 8, 2)


def test_what_cannot_be_written_is_told_in_a_sentence(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project(train__steps=2)
    run_dir = run_dir_of(path)
    (path.parent / "file").write_text("no folder")
    assert main(["train", str(path), "--ledger_dir", str(path.parent / "file" / "x")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("offbeat: ledger_dir: "), said
    assert not run_dir.exists()
    assert main(["train", str(path)]) == 0
    (run_dir / "driver.lock").unlink()
    (run_dir / "driver.lock").mkdir()
    capsys.readouterr()
    assert main(["resume", str(run_dir), "--train.steps", "3"]) == 2
    assert f"{run_dir} cannot be written to" in capsys.readouterr().err


def test_a_run_that_the_user_must_mend_keeps_what_it_has_without_a_summary(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full: neither the next version nor the summary can be written."""
    path = project(train__steps=4)
    run_dir = run_dir_of(path)

    async def fails(*_: object) -> None:
        raise UserError("weights.folder: no room on the disk")

    monkeypatch.setattr("offbeat.cluster.local.LocalTrainer.publish", fails)
    monkeypatch.setattr("offbeat.track.recorder.write_summary", lambda *_: 1 / 0)
    assert main(["train", str(path)]) == 2
    assert not (run_dir / "summary.json").exists()
    assert all_checkpoints(run_dir / "checkpoints")
    monkeypatch.undo()
    assert main(["resume", str(run_dir)]) == 0
    check_books(run_dir, 4, 2)


def test_checkpoints_that_are_all_damaged_are_told(project: Project) -> None:
    path = project(train__steps=4, train__checkpoint_every=1, train__keep_checkpoints=1)
    assert main(["train", str(path)]) == 0
    run_dir = run_dir_of(path)
    (run_dir / "checkpoints" / "step-000004" / "trainer" / "optimizer.pt").write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint can be gone on from"):
        plan_resume(run_dir)
