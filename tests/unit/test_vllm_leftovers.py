"""What vLLM's processes take with them when the engine's process is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


def core(names: Connection) -> None:
    """As vLLM's core does: makes a ring, and tells of it."""
    os.environ["OFFBEAT_VLLM"] = "1"
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    from offbeat.weights import vllm_transfer

    vllm_transfer.register()
    ring = ShmRingBuffer(1, 1024, 2)
    names.send(ring.shared_memory.name)
    signal.pause()


def engine(names: Connection) -> None:
    """An engine's process with a core below it."""
    multiprocessing.get_context("spawn").Process(target=core, args=(names,)).start()
    signal.pause()


def test_a_killed_engines_rings_are_removed() -> None:
    """By the processes below it: what tidies shared memory up in Python may be killed as well, and
    does so only when all have ended."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=engine, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.poll(100)
    ring = Path("/dev/shm") / ours.recv()
    assert ring.exists()
    process.kill()
    process.join(10)
    assert ours.poll(20), "the core lives on"
    with pytest.raises(EOFError):
        ours.recv()
    assert not ring.exists()
