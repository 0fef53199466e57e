"""Real Ray, one process a role: the process that passes a point is killed there. The run heals by
itself, or ends with another code than 0 and `offbeat resume` finishes it; every promise holds, and
the weights are those of a run that was never interrupted.

A start takes half a minute on two quiet cores, most of it imports.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.faults.cases import CASES, SHORT, Case
from tests.faults.runs import Start, report, run_to_the_end, start_on_cluster
from tests.promises import check_promises, equal_to_replay

from offbeat.testing.faults import Fault, FaultPlan

Project = Callable[..., Path]
RAY = {"cluster__backend": "ray"}
OF_THE_DRIVER = ("driver.started", "driver.step", "driver.saved")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts drivers on a cluster that lives as long as the tests."""
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "resources": {"offbeat_slot": 4}, "object_store_memory": 128 << 20}
    for left in reversed(range(5)):  # Ray gives a busy machine 30 s for it
        try:
            head = {**node, "include_dashboard": False}
            cluster = Cluster(initialize_head=True, head_node_args=head)
            break
        except Exception as error:
            if left == 0 or "timed out during startup" not in str(error):
                raise
    yield partial(start_on_cluster, cluster.address)
    cluster.shutdown()


def on_ray(case: Case) -> Case:
    """What brings the run to the point: with the driver alive the rollouter is restored at once."""
    if case.point == "rollout.restored":
        return replace(case, before=(Fault("ledger.trained", "kill", nth=2),))
    return case


@pytest.mark.parametrize("case", [pytest.param(on_ray(c), id=c.point) for c in CASES])
def test_killed_at(case: Case, project: Project, start: Start, tmp_path: Path) -> None:
    toml = project(**(SHORT | RAY | case.settings))
    plan = FaultPlan(case.faults, tmp_path / "faults")
    seen = run_to_the_end(toml, plan, start)
    plan.assert_fired()
    if case.point in OF_THE_DRIVER:
        assert seen.codes == [-9, 0], seen.told
    assert all(code in (-9, 0, 1) for code in seen.codes), seen.told
    if seen.codes[0] == 1:
        assert "offbeat resume" in seen.said[0]
    run_dir = tmp_path / "runs" / "run"
    check_promises(run_dir)
    compared = equal_to_replay(run_dir)
    assert compared >= 2
    report("ray", case.point, "kill", seen, compared)


OTHERS = (
    (Fault("trainer.before_step", "hang", nth=2), {"train__deadline_seconds": 30}),
    (Fault("engine.load", "hang", nth=2), {"weights__deadline_seconds": 20}),
    (Fault("rollout.completion", "stall", nth=9, seconds=10_000.0), {}),
    (Fault("store.in_commit", "enospc", nth=8), {}),
    (Fault("checkpoint.optimizer", "enospc", nth=2), {}),
    (Fault("trainer.after_update", "raise", nth=2), {}),
    (Fault("ledger.batched", "raise", nth=2), {}),
)


@pytest.mark.parametrize(
    ("fault", "settings"), [pytest.param(f, s, id=f"{f.kind}-{f.point}") for f, s in OTHERS]
)
def test_broken_otherwise(
    fault: Fault, settings: dict[str, object], project: Project, start: Start, tmp_path: Path
) -> None:
    """A role that hangs is found by its deadline or its heartbeat, and started again."""
    toml = project(**(SHORT | RAY | {"cluster__heartbeat_seconds": 40} | settings))
    plan = FaultPlan((fault,), tmp_path / "faults")
    seen = run_to_the_end(toml, plan, start)
    plan.assert_fired()
    assert seen.codes in ([0], [1, 0]), seen.told
    run_dir = tmp_path / "runs" / "run"
    check_promises(run_dir)
    report("ray", fault.point, fault.kind, seen, equal_to_replay(run_dir))
