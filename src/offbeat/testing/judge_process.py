"""The fake judge in a process of its own: the command line, and its handle for tests."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from offbeat.testing.judge_faults import Fault, LogNormal, Mix, read_script

START_SECONDS = 60.0


class JudgeProcess:
    """`python -m offbeat.testing.judge_server` as a child that ends with its parent.

    `start` may follow `stop` and `kill`: the port stays the same. Options are those of the
    command line; the first start reads the port.
    """

    def __init__(self, *options: str) -> None:
        """Starts nothing."""
        self._options = list(options)
        self._port: str | None = None
        self._process: subprocess.Popen[str] | None = None
        self.base_url = ""

    @property
    def pid(self) -> int:
        """The process; raises `RuntimeError` if there is none."""
        if self._process is None:
            raise RuntimeError("the judge is not started")
        return self._process.pid

    def start(self) -> JudgeProcess:
        """Returns when it listens; raises `RuntimeError` with its words if it cannot."""
        again = [] if self._port is None else ["--port", self._port]
        command = [sys.executable, "-m", "offbeat.testing.judge_server", "--child"]
        process = subprocess.Popen(
            [*command, *self._options, *again],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process = process
        assert process.stdout is not None
        limit = threading.Timer(START_SECONDS, process.kill)
        limit.start()
        address = process.stdout.readline().strip()
        limit.cancel()
        if not address:
            self._end()
            raise RuntimeError(f"the judge did not start: {' '.join(command[1:])}")
        self.base_url = address
        self._port = address.removesuffix("/v1").rpartition(":")[2]
        return self

    def kill(self) -> None:
        """Ends it with SIGKILL: its connections break."""
        if self._process is not None:
            self._process.kill()
        self._end()

    def stop(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.terminate()
        self._end()

    def stats(self) -> dict[str, float]:
        """Chat completions so far, now, the most at once, and `JudgeServer.call_seconds`: `calls`,
        `now`, `most_at_once`, `call_seconds`; the last one at `clock` (`time.monotonic()`)."""
        with urllib.request.urlopen(f"{self.base_url}/stats", timeout=30) as reply:
            found: dict[str, float] = json.load(reply)
        return found

    def _end(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None


@contextlib.contextmanager
def judge_process(*options: str) -> Iterator[JudgeProcess]:
    """A started `JudgeProcess`, stopped at the end."""
    judge = JudgeProcess(*options)
    try:
        yield judge.start()
    finally:
        judge.stop()


def _script(path: str) -> list[Fault]:
    try:
        return read_script(Path(path))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None


def _mix(text: str) -> Mix:
    try:
        return Mix(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m offbeat.testing.judge_server",
        description="A fake OpenAI-compatible judge with faults, for tests.",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen at")
    add("--port", type=int, default=0, help="0: a free one, which is printed")
    add("--model", default="judge", help="the model's name")
    add("--reply", default="8", help="the verdict")
    add("--distribution", type=json.loads, help='verdicts by probability: {"8": 0.7, "3": 0.3}')
    add("--delay", type=float, default=0.0, help="seconds before each answer")
    add("--latency", type=float, nargs=2, metavar=("MEDIAN", "SIGMA"), help="log-normal, seconds")
    faults = 'faults in order: [{"status": 500}, {}, {"hang": true}]'
    add("--script", type=_script, default=[], metavar="FILE.json", help=faults)
    add("--mix", type=_mix, help='shares of random faults: {"garbage": 0.2, "hang": 0.05}')
    add("--fail-every", type=int, default=0, help="each n-th call answers 500")
    add("--seed", type=int, default=0, help="of latency and mix")
    add("--child", action="store_true", help="end when standard input does")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: serves until it is interrupted, or, as a child, its parent is gone."""
    from offbeat.testing.judge_server import JudgeServer

    parser = _parser()
    told = parser.parse_args(arguments)
    server = JudgeServer(
        told.reply,
        told.script,
        model=told.model,
        delay=told.delay,
        latency=LogNormal(told.latency[0], told.latency[1], told.seed) if told.latency else None,
        distribution=told.distribution,
        mix=replace(told.mix, seed=told.mix.seed or told.seed) if told.mix else None,
        fail_every=told.fail_every,
        host=told.host,
        port=told.port,
        keep_calls=False,
    )
    try:
        server.start()
    except (OSError, OverflowError) as error:
        parser.error(f"--port {told.port}: {error}")
    sys.stdout.write(f"{server.base_url}\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        if told.child:
            sys.stdin.read()
        else:
            threading.Event().wait()
    server.stop()
    return 0
