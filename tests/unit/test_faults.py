"""The fault injector: what is planned happens, once over all processes, and is seen to happen."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from offbeat.cluster.pools import process_env
from offbeat.errors import RunFailed
from offbeat.faults import POINTS, apoint, point
from offbeat.testing.faults import Fault, FaultPlan, FaultPlanError, InjectedFault, inject

SRC = Path(__file__).parents[2] / "src" / "offbeat"
USED = re.compile(r"""\ba?point\(\s*"([a-z_.]+)\"""")


def test_every_point_is_placed_and_every_placed_point_is_listed() -> None:
    used = {name for path in SRC.rglob("*.py") for name in USED.findall(path.read_text())}
    assert used == set(POINTS)


def test_an_unknown_point_kind_or_error_is_refused_with_the_nearest() -> None:
    with pytest.raises(FaultPlanError, match=r"'ledger\.batch'; the nearest is 'ledger\.batched'"):
        Fault("ledger.batch", "kill")
    with pytest.raises(FaultPlanError, match=r"kind 'explode'.*kill, hang"):
        Fault("ledger.batched", "explode")  # type: ignore[arg-type]
    with pytest.raises(FaultPlanError, match="exception 'Nonsense'"):
        Fault("ledger.batched", "raise", error="Nonsense")
    with pytest.raises(FaultPlanError, match="RoleDied is not made of a message alone"):
        Fault("ledger.batched", "raise", error="RoleDied")
    with pytest.raises(FaultPlanError, match="count from 1"):
        Fault("ledger.batched", "raise", nth=0)
    with pytest.raises(FaultPlanError, match="share"):
        Fault("ledger.batched", "raise", share=0.0)


def test_a_fault_fires_at_the_nth_passing_once_and_is_booked() -> None:
    with inject(Fault("store.in_commit", "raise", nth=2, error="RunFailed")) as plan:
        point("store.in_commit")
        point("store.before_commit")
        assert plan.fired() == []
        with pytest.raises(AssertionError, match=r"raise at store\.in_commit \(nth 2\)"):
            plan.assert_fired()
        with pytest.raises(RunFailed, match=r"injected at store\.in_commit"):
            point("store.in_commit")
        point("store.in_commit")
    plan.assert_fired()
    (firing,) = plan.fired()
    assert (firing.point, firing.kind, firing.passing) == ("store.in_commit", "raise", 2)
    assert firing.pid == os.getpid()
    point("store.in_commit")  # nothing is injected any more


def test_times_and_share_are_counted_over_processes_and_drawn_by_seed(tmp_path: Path) -> None:
    fault = Fault("reward.rate", "raise", times=3, share=0.5, seed=7)
    seen = []
    for folder in ("a", "b"):
        plan = FaultPlan((fault,), tmp_path / folder)
        with inject(fault, log=plan.log):
            raised = []
            for i in range(20):
                try:
                    point("reward.rate")
                except InjectedFault:
                    raised.append(i)
        seen.append(raised)
        assert len(plan.fired()) == 3
    assert seen[0] == seen[1]
    assert seen[0] != [0, 1, 2]
    with inject(fault, log=tmp_path / "a"):  # another process of the run: used up
        for _ in range(20):
            point("reward.rate")


def test_a_full_disk_and_bytes_that_change(tmp_path: Path) -> None:
    with inject(Fault("checkpoint.optimizer", "enospc")), pytest.raises(OSError) as full:  # noqa: PT011
        point("checkpoint.optimizer")
    assert full.value.errno == errno.ENOSPC
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "weights"
    file.write_bytes(bytes(1000))
    stamp = file.stat().st_mtime_ns
    with inject(Fault("checkpoint.renamed", "corrupt", seed=3)) as plan:
        point("checkpoint.renamed", tmp_path)
    after = file.read_bytes()
    assert len(after) == 1000
    assert sum(byte != 0 for byte in after) == 16
    assert file.stat().st_mtime_ns == stamp
    assert plan.fired()[0].path == str(tmp_path)
    with (
        inject(Fault("ledger.batched", "corrupt")),
        pytest.raises(FaultPlanError, match="names no file"),
    ):
        point("ledger.batched")


def test_a_hang_blocks_its_thread_until_the_plan_ends() -> None:
    ended: list[str] = []

    def work() -> None:
        try:
            point("trainer.before_step")
        except InjectedFault as error:
            ended.append(str(error))

    with inject(Fault("trainer.before_step", "hang")) as plan:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        plan.assert_fired()
    thread.join(10)
    assert ended == ["trainer.before_step: hung until the plan's end"]


def test_on_an_event_loop_a_hang_and_a_delay_stop_nobody_else() -> None:
    async def passing() -> float:
        start = time.monotonic()
        await apoint("reward.rate")
        return time.monotonic() - start

    async def all_of_it() -> tuple[list[float], bool]:
        hung = asyncio.create_task(apoint("rollout.generate"))
        found = await asyncio.gather(passing(), passing())
        alive = not hung.done()
        hung.cancel()
        return list(found), alive

    faults = (Fault("rollout.generate", "hang"), Fault("reward.rate", "delay", seconds=0.2))
    with inject(*faults) as plan:
        (late, quick), alive = asyncio.run(all_of_it())
    plan.assert_fired()
    assert alive
    assert late >= 0.2 > quick


def test_a_stall_holds_the_event_loop_up() -> None:
    async def ticks() -> float:
        start = time.monotonic()
        _, seconds = await asyncio.gather(apoint("reward.rate"), asyncio.sleep(0.01, "x"))
        assert seconds == "x"
        return time.monotonic() - start

    with inject(Fault("reward.rate", "stall", seconds=0.3)):
        assert asyncio.run(ticks()) >= 0.3


CHILD = "from offbeat.faults import point; point('ledger.copied'); point('ledger.copied'); print(1)"


def test_a_child_process_is_killed_by_the_environment_and_the_next_one_is_not(
    tmp_path: Path,
) -> None:
    plan = FaultPlan((Fault("ledger.copied", "kill", nth=2),), tmp_path / "log")
    env = os.environ | plan.environment()
    first, second = (
        subprocess.run([sys.executable, "-c", CHILD], env=env, capture_output=True, timeout=60)
        for _ in range(2)
    )
    assert first.returncode == -signal.SIGKILL
    assert (second.returncode, second.stdout) == (0, b"1\n")
    (firing,) = plan.fired()
    assert firing.pid != os.getpid()
    plan.assert_fired()


def test_without_the_variable_no_process_imports_the_injector() -> None:
    code = (
        "import sys; from offbeat.faults import point; point('ledger.copied'); print(*sys.modules)"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("OFFBEAT_")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "offbeat.testing.faults" not in done.stdout.split()


def test_actors_get_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = FaultPlan((Fault("ledger.copied", "kill"),), tmp_path)
    assert not set(plan.environment()) & set(process_env(1, gpu=False))
    for key, value in plan.environment().items():
        monkeypatch.setenv(key, value)
    for gpu in (False, True):
        assert plan.environment().items() <= process_env(1, gpu=gpu).items()
    assert FaultPlan.from_environment().faults == plan.faults
    monkeypatch.setenv("OFFBEAT_FAULTS", json.dumps([{"nonsense": 1}]))
    with pytest.raises(FaultPlanError, match="OFFBEAT_FAULTS is no list of faults"):
        FaultPlan.from_environment()
