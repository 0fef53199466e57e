"""A user's reward function as a source: worker processes, a deadline per call, typed failures.

Samples that wait are scored in one call. A call that fails as a whole (an exception, a wrong
length, a timeout, a dead worker) is taken apart: each of its samples is scored alone, so one
sample's trouble never becomes its neighbour's. A worker that hangs is killed and replaced.

Limit: when three samples more of a call time out than are answered, its rest is not waited for. It
fails as `untried`, for which the reward loop asks again. So a function that hangs on everything
holds a call for four deadlines, not for one of each sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.config import RewardSourceSection
from offbeat.errors import OffbeatError, UserError
from offbeat.records import Reward, ScoreItem, Span
from offbeat.reward.function_style import Calls, Outcome, RewardFunction, Style
from offbeat.reward.loader import load_function
from offbeat.reward.waiting import Waiter, WaitingLine, untried

__all__ = ["FunctionSource", "RewardFunction", "WorkerProcess", "calls_of", "load_function"]

LARGEST_BATCH = 64
LARGEST_CALL = 1_000_000
"""Characters of a call of several samples: packing many more would stop the event loop."""
START_SECONDS = 120.0
STOP_SECONDS = 5.0
PIPE_BYTES = 2**24
MORE_TIMEOUTS = 3
"""So many samples more of a call, scored alone, time out than are answered before the rest is left
untried."""

log = logging.getLogger(__name__)
_HEADER = struct.Struct(">Q")
_SPANS_KEPT = 10_000


class WorkerFailed(OffbeatError):
    """A call without an answer: the worker timed out, died or could not be started."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause, self.reason = cause, reason


def calls_of(items: Sequence[ScoreItem]) -> Calls:
    """What a function is told of samples. `columns` are the rows' own, None where a row lacks one,
    and `reference`. A count of tokens that nobody took is None."""
    names = dict.fromkeys(name for item in items for name in item.prompt.columns)
    columns = {name: [item.prompt.columns.get(name) for item in items] for name in names}
    columns["reference"] = [item.prompt.reference for item in items]
    messages = [item.prompt.messages for item in items]
    return Calls(
        prompts=[item.prompt.text for item in items],
        completions=[item.completion for item in items],
        columns=columns,
        messages=[
            None if said is None else [dict(message) for message in said] for said in messages
        ],
        finish_reasons=[item.finish_reason for item in items],
        tokens=[item.tokens if item.tokens or not item.completion else None for item in items],
    )


class WorkerProcess:
    """One worker: started when needed, killed when late."""

    def __init__(
        self,
        spec: str,
        base: Path,
        setting: str,
        style: Style = "offbeat",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts nothing. `style` says how the function is called, `arguments` with what more."""
        self._spec, self._base, self._setting = spec, base, setting
        self._settings = (style, dict(arguments or {}))
        self.one_by_one = False
        self._process: asyncio.subprocess.Process | None = None
        self._answers: asyncio.StreamReader | None = None
        self._transport: asyncio.BaseTransport | None = None

    @property
    def pid(self) -> int | None:
        """The process's id while it runs."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process is not None else None

    async def start(self) -> None:
        """Starts the process and imports the function; raises `UserError` or `WorkerFailed`."""
        reading, writing = os.pipe()
        try:
            self._answers = asyncio.StreamReader(PIPE_BYTES)
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(_reader(self._answers)), os.fdopen(reading)
            )
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "offbeat.reward.function_worker",
                str(writing), self._spec, str(self._base), self._setting,
                stdin=asyncio.subprocess.PIPE, stdout=2, pass_fds=(writing,),
                start_new_session=True, env=_environment(),
            )  # fmt: skip
        finally:
            os.close(writing)
        stdin = self._send(self._settings)
        hello = await self._receive(START_SECONDS, "importing the function", stdin)
        if "user_error" in hello:
            await self.kill()
            raise UserError(hello["user_error"])
        self.one_by_one = bool(hello["one_by_one"])

    async def call(self, items: Sequence[ScoreItem], deadline: float) -> dict[str, Any]:
        """The answer as in `function_style`; raises `WorkerFailed`."""
        if self.pid is None:
            try:
                await self.start()
            except UserError as error:
                raise WorkerFailed("unavailable", str(error)) from error
        stdin = self._send(calls_of(items))
        return await self._receive(deadline, "the function", stdin)

    def _send(self, request: object) -> asyncio.StreamWriter:
        """Puts a request on its way; who receives the answer waits until it has gone."""
        stdin = None if self._process is None else self._process.stdin
        if stdin is None:
            raise WorkerFailed("worker_died", "the worker has no stdin")
        body = pickle.dumps(request)
        stdin.write(_HEADER.pack(len(body)) + body)
        return stdin

    async def kill(self) -> None:
        """Kills the process with all that it started."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.stdin is not None:
                process.stdin.close()
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    async def _receive(
        self, deadline: float, whom: str, stdin: asyncio.StreamWriter | None = None
    ) -> dict[str, Any]:
        answers = _reader(self._answers)
        try:
            async with asyncio.timeout(deadline):
                if stdin is not None:
                    await stdin.drain()
                (size,) = _HEADER.unpack(await answers.readexactly(_HEADER.size))
                answer: dict[str, Any] = json.loads(await answers.readexactly(size))
                return answer
        except TimeoutError as late:
            await self.kill()
            raise WorkerFailed("timeout", f"{whom} took more than {deadline:g} s") from late
        except (asyncio.IncompleteReadError, OSError) as broken:
            process = self._process
            await self.kill()
            code = None if process is None else process.returncode
            raise WorkerFailed("worker_died", f"the worker ended with {code}") from broken
        except asyncio.CancelledError:
            await self.kill()
            raise


class FunctionSource:
    """The reward source of a user's function."""

    def __init__(self, name: str, section: RewardSourceSection, base: Path) -> None:
        """`base` is the folder that a relative file is looked up in. Starts nothing."""
        if section.function is None:
            raise UserError(
                f"reward.{name}.function is missing; set it to file.py:name or package.module:name"
            )
        self._name, self._section = name, section
        setting = f"reward.{name}.function"
        self._workers = [
            WorkerProcess(
                section.function, base.resolve(), setting, section.style, section.arguments
            )
            for _ in range(section.workers)
        ]
        self._line = WaitingLine(name)
        self._tasks: list[asyncio.Task[None]] = []
        self._spans: list[Span] = []
        self._limit = min(LARGEST_BATCH, section.concurrency)  # samples of one call
        self._took = 0.0  # seconds of the last call that was answered

    @property
    def name(self) -> str:
        """The source's name."""
        return self._name

    async def start(self) -> None:
        """Starts the workers, which import the function."""
        results = await asyncio.gather(
            *(worker.start() for worker in self._workers), return_exceptions=True
        )
        for result in results:
            if isinstance(result, WorkerFailed):
                await self.stop()
                raise UserError(f"reward.{self._name}.function: {result.reason}")
            if isinstance(result, BaseException):
                await self.stop()
                raise result
        self._tasks = [
            asyncio.create_task(self._serve(number), name=f"reward/{self._name}/{number}")
            for number in range(len(self._workers))
        ]

    async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
        """Waits in line with all others' items; calls take many at once."""
        return await self._line.ask(items)

    @property
    def down_since(self) -> float | None:
        """None: it serves, or says so by failures."""
        return None

    def facts(self) -> Mapping[str, float]:
        """Running numbers for metrics."""
        return {}

    async def drain_spans(self) -> list[Span]:
        """The workers' compute spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    async def stop(self) -> None:
        """Ends the workers; what waits fails as unavailable."""
        self._line.close("the source was stopped")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def _serve(self, number: int) -> None:
        if self._workers[number].one_by_one:
            self._limit = 1
        while True:
            waiters = await self._line.take(self._limit, len(self._workers), LARGEST_CALL)
            try:
                await self._answer(number, waiters)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                self._give_up(waiters, Reward.failed(self._name, "unavailable", reason=reason))
            finally:
                stopped = Reward.failed(self._name, "unavailable", reason="the source was stopped")
                self._give_up(waiters, stopped)

    async def _answer(self, number: int, waiters: Sequence[Waiter]) -> None:
        failure = await self._try(number, waiters)
        if failure is None:
            return
        if len(waiters) == 1:
            waiters[0].give(failure)
            return
        late, seconds = 0, 0.0
        for waiter in waiters:
            if late >= MORE_TIMEOUTS:
                waiter.give(untried(self._name, failure.reason))
                continue
            alone = await self._try(number, [waiter])
            late += 1 if alone is not None and alone.cause == "timeout" else -1
            if alone is not None:
                waiter.give(alone)
            else:
                seconds += self._took
        if failure.cause == "timeout":
            self._shrink(len(waiters), seconds)

    def _shrink(self, samples: int, seconds: float) -> None:
        """A call that was too late, although none of its samples was: calls get fewer of them."""
        half = self._section.deadline_seconds / 2
        if seconds > half:
            self._limit = max(1, min(self._limit, int(samples * half / seconds)))
            log.warning(
                "reward.%s: %d samples take %.1f s, too long for one call with deadline_seconds = "
                "%g; from now on a call has %d at most",
                self._name, samples, seconds, self._section.deadline_seconds, self._limit,
            )  # fmt: skip

    async def _try(self, number: int, waiters: Sequence[Waiter]) -> Reward | None:
        """One call. Answers its waiters, or returns the failure that they all share."""
        items = [waiter.item for waiter in waiters]
        try:
            answer = await self._workers[number].call(items, self._section.deadline_seconds)
        except WorkerFailed as failed:
            return Reward.failed(self._name, failed.cause, reason=failed.reason)
        self._took = answer["end"] - answer["start"]
        if len(self._spans) < _SPANS_KEPT:
            self._spans.append(
                Span(
                    f"reward/{self._name}", number, "score",
                    answer["start"], answer["end"], answer["cpu"],
                )
            )  # fmt: skip
        if "cause" in answer:
            return Reward.failed(self._name, answer["cause"], reason=answer["reason"])
        for waiter, outcome in zip(waiters, answer["outcomes"], strict=True):
            waiter.give(self._reward(outcome))
        return None

    def _reward(self, outcome: Outcome) -> Reward:
        raw = outcome.get("raw", "")
        if "cause" in outcome:
            reason = outcome["reason"]
            return Reward.failed(self._name, outcome["cause"], reason=reason, raw=raw)
        value = outcome["value"]
        if value is None:
            return Reward.abstained(self._name, raw=raw)
        return Reward.scored(self._name, value, raw=raw or repr(value))

    @staticmethod
    def _give_up(waiters: Sequence[Waiter], reward: Reward) -> None:
        for waiter in waiters:
            waiter.give(reward)


def _reader(answers: asyncio.StreamReader | None) -> asyncio.StreamReader:
    if answers is None:
        raise WorkerFailed("worker_died", "the worker is not started")
    return answers


def _environment() -> dict[str, str]:
    """This process's environment, with its import path: what it can import, the worker can."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
