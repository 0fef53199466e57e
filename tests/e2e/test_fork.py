"""`offbeat fork` begins another run at a checkpoint; groups under way keep their ordinals."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import make_project

from offbeat.cli import main
from offbeat.store import read_counts, read_meta, read_payloads, read_rows
from offbeat.testing.faults import Fault, inject
from offbeat.train import checkpoint

STEPS = 6
pytestmark = pytest.mark.timeout(900)  # two cores may be shared with others
Command = tuple[int, str, str]
Offbeat = Callable[..., Command]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """A finished run with checkpoints of steps 0, 2, 4 and 6."""
    root = tmp_path_factory.mktemp("fork")
    path = make_project(
        root, models, ("rule",), train__steps=STEPS, train__checkpoint_every=2,
        train__keep_checkpoints=9, train__warmup_steps=0,
    )  # fmt: skip
    slow = Fault("trainer.before_step", "delay", seconds=0.5, times=None)
    with inject(slow):  # so that groups are scored and wait when a checkpoint is made
        assert main(["train", str(path)]) == 0
    return root / "runs" / "run"


def test_a_fork_goes_on_to_the_end(parent: Path, offbeat: Offbeat) -> None:
    code, said, _ = offbeat("fork", parent, "--step", 4, "second", "--train.learning_rate", "1e-3")
    assert code == 0
    new = parent.parent / "second"
    assert f"offbeat resume {new}" in said
    assert "train.learning_rate: 0.0001 -> 0.001" in said
    assert [p.name for p in (new / "checkpoints").iterdir()] == ["step-000004"]
    theirs, mine = (
        run / "checkpoints" / "step-000004" / "model.safetensors" for run in (parent, new)
    )
    assert os.path.samefile(theirs, mine)
    before = read_rows(new / "ledger.sqlite")
    live = {row.ordinal for row in before if row.state not in ("trained", "discarded")}
    assert live, "groups were under way when the checkpoint was made"
    scored = {
        ordinal: kept.tokens
        for ordinal, kept in read_payloads(new / "ledger.sqlite", live).items()
        if kept.rewards is not None
    }
    lineage = int(read_meta(parent / "ledger.sqlite")["lineage"])
    old = {p.name: p.read_bytes() for p in parent.iterdir() if p.is_file()}

    assert offbeat("resume", new)[0] == 0
    counts = read_counts(new / "ledger.sqlite")
    assert counts["live"] == 0
    assert counts["admitted"] == counts["trained"] + sum(counts["discarded"].values())
    assert counts["trained"] == 2 * STEPS
    after = {row.ordinal: row for row in read_rows(new / "ledger.sqlite")}
    assert all(after[row.ordinal].state in ("trained", "discarded") for row in before)
    assert {row.ordinal: row.step for row in before if row.state == "trained"}.items() <= {
        ordinal: row.step for ordinal, row in after.items()
    }.items()
    kept = read_payloads(new / "ledger.sqlite", scored)
    assert kept, "the last steps' groups are kept until the next checkpoint"
    assert all(scored[ordinal] == found.tokens for ordinal, found in kept.items())
    assert int(read_meta(new / "ledger.sqlite")["lineage"]) > lineage
    last = new / "checkpoints" / "step-000006"
    assert checkpoint.read(last).lineage > lineage
    records = [json.loads(line) for line in (new / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["type"] == "step"]
    assert [record["step"] for record in steps] == [4, 5]
    assert {record["learning_rate"] for record in steps} == {1e-3}
    assert max(record["staleness"]["max"] for record in steps) <= 2
    assert json.loads((new / "summary.json").read_text())["status"] == "finished"
    assert {p.name: p.read_bytes() for p in parent.iterdir() if p.is_file()} == old


def test_with_go_it_goes_on_at_once(parent: Path, offbeat: Offbeat, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    shutil.copytree(parent, run)
    code, said, _ = offbeat("fork", run, "--step", "0", "again", "--train.steps", "2", "--go")
    assert code == 0
    assert "go on with" not in said
    summary = json.loads((run.parent / "again" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)


def test_mistakes_make_nothing(parent: Path, offbeat: Offbeat, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    shutil.copytree(parent, run)
    state = run / "checkpoints" / "step-000002"
    shutil.rmtree(state)
    checkpoint.write(state, checkpoint.TrainerState(0, 2, 2, 0, 0, {}), lambda folder: None)
    damaged = run / "checkpoints" / "step-000006" / "config.json"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for step, name, expected, *overrides in [
        (3, "new", "no checkpoint of step 3; there are those of: 0, 2, 4, 6"),
        (4, "run", "exists already"),
        (4, "a/b", "no name of a run"),
        (2, "new", "no copy of the ledger"),
        (6, "new", "damaged"),
        (4, "new", "rollout.temperature", "--rollout.temperature", "0.5"),
        (4, "new", "unknown", "--train.stepz", "3"),
    ]:
        code, _, error = offbeat("fork", run, "--step", step, name, *overrides)
        assert code == 2, error
        assert expected in error or expected == "unknown"
        assert [p.name for p in run.parent.iterdir()] == ["run"]
