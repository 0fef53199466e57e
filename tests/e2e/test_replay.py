"""`offbeat replay` trains what was recorded again: bit for bit, also across a kill and a resume."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import make_project

from offbeat.cli import main
from offbeat.redo_log import RedoLog
from offbeat.testing.faults import Fault, FaultPlan
from offbeat.train import checkpoint

STEPS = 6
pytestmark = pytest.mark.timeout(900)  # two cores may be shared with others
Command = tuple[int, str, str]
Offbeat = Callable[..., Command]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """A run that was killed after the update of its fourth step, and resumed with another rate."""
    root = tmp_path_factory.mktemp("replay")
    path = make_project(
        root, models, ("rule",), train__steps=STEPS, train__checkpoint_every=2,
        train__keep_batches=True, train__keep_checkpoints=9, train__warmup_steps=0,
    )  # fmt: skip
    plan = FaultPlan((Fault("trainer.after_update", "kill", nth=4),), log=root / "faults")
    train = [sys.executable, "-m", "offbeat.cli", "train", str(path)]
    with (root / "said").open("wb") as said:
        done = subprocess.run(
            train, env=os.environ | plan.environment(), stdout=said, stderr=said, timeout=600
        )
    assert done.returncode == -signal.SIGKILL, (root / "said").read_text()
    plan.assert_fired()
    run = root / "runs" / "run"
    assert checkpoint.newest_valid(run / "checkpoints") == run / "checkpoints" / "step-000002"
    assert main(["resume", str(run), "--train.learning_rate", "3e-4"]) == 0
    return run


def test_a_killed_and_resumed_run_is_its_own_record(recorded: Path, offbeat: Offbeat) -> None:
    code, said, _ = offbeat("replay", recorded)
    assert code == 0
    lines = [line for line in said.splitlines() if line.startswith("step ")]
    assert [int(re.findall(r"\d+", line)[0]) for line in lines] == list(range(STEPS))
    assert all(line.endswith("as recorded") for line in lines)
    assert "no step differs" in said
    assert "weights equal step-000006 of the run bit for bit" in said
    mine, theirs = recorded / "replay" / "step-000006", recorded / "checkpoints" / "step-000006"
    name = "model.safetensors"
    assert (mine / name).read_bytes() == (theirs / name).read_bytes()
    state, other = checkpoint.read(mine), checkpoint.read(theirs)
    assert (state.step, state.updates) == (other.step, other.updates)
    assert [p.name for p in (recorded / "replay").iterdir()] == ["step-000006"]


def test_recorded_batches_keep_the_rate_that_they_had(recorded: Path) -> None:
    log = RedoLog.read(recorded / "ledger.sqlite")
    assert [rate.learning_rate for rate in log.rates] == [1e-4, 3e-4]
    changed = log.rates[0].until
    assert changed is not None
    assert changed >= 4, "step 3 was recorded before the change"
    records = map(json.loads, (recorded / "metrics.jsonl").read_text().splitlines())
    steps = [record for record in records if record["type"] == "step"]
    for record in steps:
        assert record["learning_rate"] == (1e-4 if record["step"] < changed else 3e-4)


def test_from_a_later_checkpoint(recorded: Path, offbeat: Offbeat, tmp_path: Path) -> None:
    code, said, _ = offbeat("replay", recorded, "--from", 4, "--out", tmp_path / "again")
    assert code == 0
    assert re.findall(r"^step (\d+)", said, re.M) == ["4", "5"]
    assert "bit for bit" in said
    assert checkpoint.read(tmp_path / "again" / "step-000006").extra["from"] == 4


def test_what_differs_is_found_and_named(recorded: Path, offbeat: Offbeat, tmp_path: Path) -> None:
    """Another rate at step 4 than was recorded: its loss is the same, that of step 5 is not."""
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    rates = [{"until": 4, "learning_rate": 1e-4, "total_steps": STEPS},
             {"until": None, "learning_rate": 1.0, "total_steps": STEPS}]  # fmt: skip
    with sqlite3.connect(run / "ledger.sqlite") as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'rates'", (json.dumps(rates),))
    code, said, _ = offbeat("replay", run)
    assert code == 1
    assert re.search(r"differs first at step 5: loss \S+, recorded ", said)
    assert re.search(r"weights differ from step-000006 of the run in \d+ of \d+ tensors", said)


def test_a_run_that_kept_no_batches_says_so(
    recorded: Path, offbeat: Offbeat, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    with sqlite3.connect(run / "ledger.sqlite") as db:
        steps = dict(db.execute("SELECT ordinal, step FROM groups WHERE step IS NOT NULL"))
        early = [(ordinal,) for ordinal, step in steps.items() if step < 3]
        db.executemany("DELETE FROM tokens WHERE ordinal = ?", early)
    code, _, error = offbeat("replay", run, "--out", tmp_path / "out")
    assert code == 2
    assert "has not kept the batch of step 2" in error
    assert "train.keep_batches = true" in error
    assert "--from 4" in error
    assert not (tmp_path / "out").exists()
    assert offbeat("replay", run, "--from", 4)[0] == 0


def test_a_damaged_record_is_named(recorded: Path, offbeat: Offbeat, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    ordinal = RedoLog.read(run / "ledger.sqlite").steps[1][0].ordinal
    with sqlite3.connect(run / "ledger.sqlite") as db:
        query = "SELECT packed FROM tokens WHERE ordinal = ?"
        (tokens,) = db.execute(query, (ordinal,)).fetchone()
        broken = tokens[:-3] + bytes([tokens[-3] ^ 1]) + tokens[-2:]
        db.execute("UPDATE tokens SET packed = ? WHERE ordinal = ?", (broken, ordinal))
    code, said, error = offbeat("replay", run)
    assert code == 1
    assert re.findall(r"^step (\d+)", said, re.M) == ["0"]
    assert f"step 1, group {ordinal}: a recorded group is damaged" in error


def test_a_model_that_was_cut_short_is_the_users_to_mend(
    recorded: Path, offbeat: Offbeat, tmp_path: Path
) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(recorded, run)
    config = json.loads((run / "config.json").read_text())
    shutil.copytree(config["model"]["path"], model)
    (model / "model.safetensors").write_bytes(b"\xff" * 100)
    config["model"]["path"] = str(model)
    (run / "config.json").write_text(json.dumps(config))
    assert offbeat("replay", run, "--from", 2)[0] == 0, "a checkpoint needs no model"
    for folder in (run / "checkpoints").iterdir():
        shutil.rmtree(folder)
    code, _, error = offbeat("replay", run)
    assert code == 2
    assert "model.path: " in error
    assert "model.safetensors is no safetensors file or was cut short" in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--from", "3"], "no checkpoint of step 3; there are those of: 0, 2, 4, 6"),
        (["--from", "6"], "no step after the checkpoint of step 6"),
        (["--out", "checkpoints"], "own checkpoints"),
        (["--train.steps", "9"], "unexpected argument --train.steps"),
    ],
)
def test_mistakes(
    recorded: Path, offbeat: Offbeat, monkeypatch: pytest.MonkeyPatch, arguments: list[str],
    expected: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(recorded)
    code, _, error = offbeat("replay", recorded, *arguments)
    assert code == 2
    assert expected in error


def test_no_run(offbeat: Offbeat, tmp_path: Path) -> None:
    assert offbeat("replay", tmp_path / "none")[0] == 2
