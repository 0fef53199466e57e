"""What a replica that died leaves behind on its node: processes of its own, say an engine's core.

Every replica's process carries the replica's name in its environment, and so do those that it
starts, also when it died without a word to them. Whoever takes its devices ends them first. The
processes of a run carry its directory too: the driver that has the directory's lock ends those of
drivers that were killed, which a stopped process outlives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path

from offbeat.errors import OffbeatError

TAG = "OFFBEAT_REPLICA"
RUN_TAG = "OFFBEAT_RUN"
GONE_SECONDS = 20.0
SEGMENTS = " /dev/shm/psm_"

log = logging.getLogger(__name__)


def end_leftovers() -> None:
    """Kills what is left of this replica's earlier life on this node, and waits until it is gone.

    Only a process that has started nothing yet may call it. Raises `OffbeatError` for what does
    not go within `GONE_SECONDS`.
    """
    name = os.environ.get(TAG)
    if name:
        _end(TAG, name, f"of {name}, which died, hold its devices still")


def end_run(directory: Path) -> None:
    """Kills the processes on this node of earlier starts of the run in `directory`, and waits until
    they are gone; for whoever has its lock, before it starts any. Raises: see `end_leftovers`."""
    _end(RUN_TAG, str(directory), f"of an earlier start of {directory} do not end")


def _end(tag: str, name: str, said: str) -> None:
    give_up = time.monotonic() + GONE_SECONDS
    seen: set[int] = set()
    shared: set[Path] = set()
    while left := _carrying(tag, name):
        shared.update(*map(_shared, left))
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        seen.update(left)
        if time.monotonic() >= give_up:
            raise OffbeatError(f"processes {left} {said}")
        time.sleep(0.05)
    for segment in shared - set[Path]().union(*map(_shared, _processes())):
        segment.unlink(missing_ok=True)  # whoever would have removed it was just killed
    if seen:
        log.info("%s: ended %d processes of its earlier life", name, len(seen))


def _carrying(tag: str, name: str) -> list[int]:
    """Processes other than this one whose environment has the tag; a dead one's is empty."""
    wanted = f"{tag}={name}".encode()
    found = []
    for pid in _processes():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return sorted(found)


def _processes() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def _shared(pid: int) -> set[Path]:
    """The segments of Python's shared memory that a process has mapped."""
    with contextlib.suppress(OSError):  # ended meanwhile, or another user's
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        return {Path(line.split()[5]) for line in lines if SEGMENTS in line}
    return set()
