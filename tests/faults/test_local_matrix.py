"""One process with all roles, killed at every point: `offbeat resume` finishes it, every promise
holds, and the weights are those of a run that was never interrupted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.cases import CASES, SHORT, Case
from tests.faults.runs import report, run_to_the_end, start_fork
from tests.promises import check_promises, config_of, equal_to_replay

from offbeat.faults import POINTS
from offbeat.store import read_rows
from offbeat.testing.faults import Fault, FaultPlan
from offbeat.train.checkpoint import newest_valid

Project = Callable[..., Path]
ALWAYS = ("ledger.batch_committed", "store.in_commit", "checkpoint.before_rename")
pytestmark = pytest.mark.timeout(1800)


def params() -> list[object]:
    """A few of them are part of every test run."""
    late = pytest.mark.faults
    return [
        pytest.param(case, id=case.point, marks=() if case.point in ALWAYS else late)
        for case in CASES
    ]


def test_every_point_has_its_case() -> None:
    assert sorted(case.point for case in CASES) == sorted(POINTS)


@pytest.mark.parametrize("case", params())
def test_killed_at(case: Case, project: Project, tmp_path: Path) -> None:
    toml = project(**(SHORT | case.settings))
    plan = FaultPlan(case.faults, tmp_path / "faults")
    seen = run_to_the_end(toml, plan, start_fork)
    plan.assert_fired()
    assert seen.codes[0] == -9, seen.told
    run_dir = tmp_path / "runs" / "run"
    check_promises(run_dir)
    compared = equal_to_replay(run_dir)
    assert compared >= 2
    report("local", case.point, "kill", seen, compared)


@pytest.mark.faults
def test_killed_while_the_payload_of_final_steps_goes(project: Project, tmp_path: Path) -> None:
    toml = project(**(SHORT | {"train__keep_batches": False, "train__checkpoint_every": 1}))
    plan = FaultPlan((Fault("store.before_release", "kill", nth=2),), tmp_path / "faults")
    seen = run_to_the_end(toml, plan, start_fork)
    plan.assert_fired()
    assert seen.codes == [-9, 0], seen.told
    check_promises(tmp_path / "runs" / "run")


OTHERS = (
    Fault("store.in_commit", "enospc", nth=8),
    Fault("checkpoint.model", "enospc", nth=2),
    Fault("checkpoint.optimizer", "enospc", nth=2),
    Fault("ledger.copied", "enospc", nth=2),
    Fault("weights.published", "enospc", nth=2),
    Fault("weights.published", "raise", nth=3),
    Fault("trainer.after_update", "raise", nth=2),
    Fault("ledger.batched", "raise", nth=2),
    Fault("ledger.trained", "raise", nth=3),
    Fault("driver.step", "raise", nth=3),
    Fault("engine.load", "raise", nth=2),
    Fault("engine.loaded", "raise", nth=2),
    Fault("reward.rate", "raise", nth=9),
    Fault("rollout.completion", "raise", nth=9),
    Fault("weights.published", "corrupt", nth=3),
    Fault("reward.rate", "delay", nth=9, seconds=3.0),
    Fault("weights.acknowledged", "delay", nth=2, seconds=3.0),
    Fault("rollout.completion", "stall", nth=9, seconds=3.0),
)


@pytest.mark.faults
@pytest.mark.parametrize("fault", OTHERS, ids=lambda fault: f"{fault.kind}-{fault.point}")
def test_broken_otherwise(fault: Fault, project: Project, tmp_path: Path) -> None:
    """It heals, or ends with 1 and says how to go on."""
    toml = project(**SHORT)
    plan = FaultPlan((fault,), tmp_path / "faults")
    seen = run_to_the_end(toml, plan, start_fork)
    plan.assert_fired()
    assert seen.codes in ([0], [1, 0]), seen.told
    if seen.codes[0] == 1:
        assert "offbeat resume" in seen.said[0]
        assert "Traceback" not in seen.said[0]
    run_dir = tmp_path / "runs" / "run"
    check_promises(run_dir)
    report("local", fault.point, fault.kind, seen, equal_to_replay(run_dir))


@pytest.mark.faults
@pytest.mark.parametrize("point", ["checkpoint.renamed", "checkpoint.before_rename"])
def test_a_checkpoint_whose_bytes_change_is_passed_over(
    point: str, project: Project, tmp_path: Path
) -> None:
    """It is damaged on the disk, and the process is killed: the one before it is gone on from."""
    toml = project(**SHORT)
    faults = (Fault(point, "corrupt", nth=2), Fault("driver.saved", "kill", nth=2))
    plan = FaultPlan(faults, tmp_path / "faults")
    seen = run_to_the_end(toml, plan, start_fork)
    plan.assert_fired()
    assert seen.codes == [-9, 0], seen.told
    run_dir = tmp_path / "runs" / "run"
    assert "step-000002" in seen.told
    check_promises(run_dir)
    report("local", point, "corrupt", seen, equal_to_replay(run_dir))
    newest = newest_valid(run_dir / "checkpoints")
    assert newest is not None
    assert all(row.state == "trained" for row in read_rows(config_of(run_dir).ledger_path))
    assert os.listdir(newest)
