"""Signals, in processes of their own: the first drains, a second ends, also what cannot be broken
off."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, os, signal, threading, time
from offbeat.cluster import signals

signals.END_SECONDS = 0.5
TIDY = {tidy}

async def run(last):
    handlers = signals.Signals({grace}, last)
    asked = asyncio.Event()
    handlers.drain_with(lambda: (print("draining", flush=True), asked.set()))
    os.kill(os.getpid(), signal.SIGTERM)
    await asked.wait()
    if TIDY:
        print("saved", flush=True)
        return
    try:
        if {twice}:
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.to_thread(time.sleep, 60)
    except asyncio.CancelledError:
        print("ended", flush=True)
        raise

with signals.LastResort() as last:
    asyncio.run(run(last))
time.sleep(1 if TIDY else 0)
print("left", flush=True)
"""


def said(*, tidy: bool, twice: bool = False, grace: float = 50.0) -> tuple[int, str]:
    program = PROGRAM.format(tidy=tidy, twice=twice, grace=grace)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout


def test_the_first_signal_lets_the_run_end_by_itself() -> None:
    assert said(tidy=True) == (0, "draining\nsaved\nleft\n")


def test_a_second_one_ends_a_process_whose_thread_does_not_end() -> None:
    assert said(tidy=False, twice=True) == (130, "draining\nended\n")


def test_so_does_the_end_of_the_grace_time() -> None:
    assert said(tidy=False, grace=0.3) == (130, "draining\nended\n")
