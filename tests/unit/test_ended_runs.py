"""What a driver that was killed leaves behind, a trainer that is asked twice for a step, and how
often reward replicas begin again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tests.unit.test_reward_replicas import Mortal, Stock, drive, outcomes, replicas
from trainer_cases import make_model, make_trainer, record_steps, to_batch, weights_of

from offbeat.cluster.leftovers import RUN_TAG, end_run
from offbeat.errors import OffbeatError, RunFailed
from offbeat.records import Manifest, PolicyVersion
from offbeat.weights.sync import Replica, WeightSync
from offbeat.weights.transport import FolderTransport


def test_stopped_processes_of_an_earlier_start_are_ended_and_no_others(tmp_path: Path) -> None:
    def start(directory: Path) -> subprocess.Popen[bytes]:
        code = "import time; print(flush=True); time.sleep(300)"
        command = [sys.executable, "-c", code]
        env = os.environ | {RUN_TAG: str(directory)}
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    mine, other = start(tmp_path / "runs" / "a"), start(tmp_path / "runs" / "ab")
    try:
        mine.send_signal(signal.SIGSTOP)
        end_run(tmp_path / "runs" / "a")
        assert mine.wait(timeout=10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        mine.kill()
        other.kill()
        mine.communicate()
        other.communicate()


def test_the_shared_memory_of_processes_that_are_ended_goes_with_them(tmp_path: Path) -> None:
    code = (
        "import time; from multiprocessing.shared_memory import SharedMemory as S;"
        "s = S(create=True, size=4096); print(s.name, flush=True); time.sleep(300)"
    )
    env = os.environ | {RUN_TAG: str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        segment = Path("/dev/shm") / process.stdout.readline().decode().strip()
        assert segment.exists()
        end_run(tmp_path)
        assert not segment.exists()
    finally:
        process.kill()
        process.communicate()


def test_a_step_whose_answer_was_lost_is_answered_again_and_trained_once(tmp_path: Path) -> None:
    trainer = make_trainer(make_model(tmp_path / "actor"))
    trainer.setup()
    try:
        first, second = (to_batch(step, groups) for step, groups in enumerate(record_steps(2)))
        trainer.step(*first)
        done = trainer.step(*second)
        after = {name: weight.clone() for name, weight in weights_of(trainer).items()}
        assert trainer.step(*second) == done
        assert trainer.version.step == 2
        assert all(torch.equal(after[name], w) for name, w in weights_of(trainer).items())
        with pytest.raises(RunFailed, match="at step 2 and got batch 0"):
            trainer.step(*first)
    finally:
        trainer.close()


@pytest.mark.parametrize("most", [0, 1, 5])
def test_a_reward_replica_begins_again_as_often_as_is_set(most: int) -> None:
    async def main() -> None:
        replace = Stock(*[Mortal(0) for _ in range(20)], seconds=0.0)
        routes = replicas(Mortal(0), replace=replace, max_restarts=most)
        for _ in range(most + 3):
            await outcomes(routes, 1)
        assert replace.asked == [0] * most
        await routes.stop()

    drive(main)


def test_the_newest_version_of_a_trainer_that_died_stays_until_engines_have_a_newer_one(
    tmp_path: Path,
) -> None:
    def publish(transport: FolderTransport, lineage: int, step: int) -> Path:
        return Path(transport.publish({"a": torch.ones(3)}, {}, PolicyVersion(lineage, step)).path)

    dead = FolderTransport(tmp_path, "run-1")
    first, newest = publish(dead, 0, 1), publish(dead, 0, 2)
    stranger = FolderTransport(tmp_path, "run-2")
    for transport in (dead, stranger):  # their processes have ended
        (transport.folder / "owner.json").write_text(json.dumps({"host": gethostname(), "pid": 0}))
    again = FolderTransport(tmp_path, "run-1")
    assert not first.exists()
    assert newest.exists()
    assert not stranger.folder.exists()
    publish(again, 1, 1)
    publish(again, 1, 2)
    assert newest.exists()
    publish(again, 1, 3)
    assert not dead.folder.exists()
    again.close()
    assert list(tmp_path.iterdir()) == []


def test_a_replacement_waits_for_the_successor_of_a_trainer_that_died() -> None:
    """What was published last is gone with its trainer: that is not the engine's fault."""

    class Loads:
        alive, gone = True, True

        async def load(self, manifest: Manifest) -> PolicyVersion:
            if not self.alive or (self.gone and manifest.version.lineage == 0):
                raise OffbeatError("the version is gone")
            return manifest.version

        async def health(self) -> Any:
            if not self.alive:
                raise OffbeatError("dead")

    async def main() -> None:
        first, fresh = Loads(), Loads()
        first.gone = False

        async def replace(index: int) -> Loads:
            return fresh

        async def changed() -> None:
            if replica.routable and replica.version.lineage == 1:
                joined.set()

        replica, joined = Replica(0, first, PolicyVersion(0, 0)), asyncio.Event()
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            sync = WeightSync(
                [replica], deadline_seconds=5, start_deadline_seconds=20, replace=replace,
                on_change=changed, tasks=tasks, max_restarts=1,
            )  # fmt: skip
            assert await sync.publish(Manifest(PolicyVersion(0, 1), "full", "", {})) == 1
            first.alive = False
            await sync.check(replica, first, RuntimeError("no answer"))
            await asyncio.sleep(1)
            assert not replica.routable
            assert replica.restarts == 1
            await sync.publish(Manifest(PolicyVersion(1, 2), "full", "", {}))
            await joined.wait()
            assert (replica.version, replica.restarts) == (PolicyVersion(1, 2), 1)

    asyncio.run(main())
