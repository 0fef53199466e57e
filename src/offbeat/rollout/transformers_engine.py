"""`TransformersEngine`: continuous batching with stock transformers models, on CPU or CUDA.

```
 loop thread                                   stepping thread (one, owns model and seats)
 generate ──submit──►┐                         ┌─► take commands ─► load? copy, recompute KV
 load ─────manifest─►├── inbox (condition) ────┤        ▲               │
 aclose ───cancel───►┘                         │        └── step: one token of every sample ◄┘
 queues ◄──────── call_soon_threadsafe ────────┴──── completions, acknowledgements, errors
```

Nothing is kept between requests, so no update can leave an old prefix behind. Every token is
recorded with the log-prob of the distribution that drew it and the step of the weights that made
it; with `on_update="recompute"` that log-prob equals teacher forcing under those weights.
If the stepping thread raises, every waiting and later call raises the same error.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from offbeat.errors import RunFailed
from offbeat.faults import apoint
from offbeat.records import (
    Completion,
    EngineHealth,
    GenerateRequest,
    Manifest,
    PolicyVersion,
    Progress,
    Span,
)
from offbeat.rollout.policy_model import PolicyModel
from offbeat.rollout.refusals import check_request
from offbeat.rollout.spans import SpanLog
from offbeat.rollout.stepper import Job, OnUpdate, Stepper, jobs_of

LoadManifest = Callable[[Manifest], Mapping[str, torch.Tensor]]

# New prompt tokens a step: bounds how long a load waits, and the activations' memory.
PREFILL_BUDGET = {"cpu": 512, "cuda": 8192}
# An idle engine waits this long for requests that come in a burst, to prefill them together.
LINGER = 0.002
LONGEST_LINGER = 0.02


@dataclass(frozen=True, slots=True)
class _Submit:
    jobs: list[Job]


@dataclass(frozen=True, slots=True)
class _Cancel:
    jobs: list[Job]


@dataclass(frozen=True, slots=True)
class _Load:
    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    answer: Callable[[PolicyVersion | BaseException], None]


_Command = _Submit | _Cancel | _Load


class TransformersEngine:
    """One replica that generates (policy or judge) with a Llama-like transformers model.

    `seats` samples run at once; a request with more completions takes seats as they free.
    `max_context` bounds prompt + answer, as does the model's own limit. `seed` and `replica`
    together seed the draws. `load_manifest` reads and verifies published weights.
    `version` names the weights that `model_path` holds. A sample ends at the end-of-sequence
    token of the tokenizer in `tokenizer_path` (default: the model's); the model's
    generation_config is not read.
    """

    def __init__(
        self,
        model_path: str,
        *,
        tokenizer_path: str | None = None,
        role: str = "rollout",
        replica: int = 0,
        seats: int = 64,
        max_context: int,
        seed: int = 0,
        dtype: Literal["float32", "bfloat16", "auto"] = "float32",
        device: Literal["cpu", "cuda", "auto"] = "cpu",
        on_update: OnUpdate = "recompute",
        threads: int = 1,
        version: PolicyVersion = PolicyVersion(0, 0),  # noqa: B008 - frozen
        load_manifest: LoadManifest,
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self._model: dict[str, Any] = {
            "model_path": model_path,
            "tokenizer_path": tokenizer_path,
            "dtype": dtype,
            "device": self._device,
            "seats": seats,
            "max_context": max_context,
            "seed": seed,
            "replica": replica,
        }
        self._replica = replica
        self._role = role
        self._seats = seats
        self._threads = threads
        self._on_update: OnUpdate = on_update
        self._first_version = version
        self._load_manifest = load_manifest
        self._spans = SpanLog(role, replica, wall_is_cpu=device == "cuda")
        self._inbox: list[_Command] = []
        self._changed = threading.Condition()
        self._loading = asyncio.Lock()
        self._stopping = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stepper: Stepper | None = None
        self._context = self._vocabulary = 0

    async def start(self) -> None:
        """Loads the model on the stepping thread; returns when requests are taken."""
        if self._thread is not None:
            raise RunFailed(f"{self._name()} was started before")
        torch.set_num_threads(self._threads)
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        self._ended = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(loop, ready), name=self._name(), daemon=True
        )
        self._thread.start()
        await ready

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion | Progress]:
        """Yields each of the request's completions that are not `done` as it ends, in order of
        ending, and copies of the running ones every `snapshot_every` tokens.

        A sample to `resume` is prefilled with its tokens: what it draws is conditioned on them
        under the present weights. Raises `RequestRefused` for a request that cannot be run; all
        others go on. Closing the iterator early frees the seats of what still runs.
        """
        self._refuse(request)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Completion | Progress | BaseException] = asyncio.Queue()

        def deliver(item: Completion | Progress | BaseException) -> None:
            _call(loop, arrived.put_nowait, item)

        jobs = jobs_of(request, deliver)
        self._post(_Submit(jobs))
        left = request.n - len(request.done)
        try:
            while left:
                item = await arrived.get()
                if isinstance(item, BaseException):
                    left = 0
                    raise item
                left -= isinstance(item, Completion)
                yield item
        finally:
            if left:
                self._cancel(jobs)

    async def load(self, manifest: Manifest) -> PolicyVersion:
        """Swaps weights between two steps; returns when the next token is the new version's.

        The tensors are read and verified beside the running steps: generation pauses only for the
        copy and, with `on_update="recompute"`, for computing the running samples' keys and values.
        """
        self._alive()
        async with self._loading:  # one after another: the version that was asked for last stays
            return await self._swap(manifest)

    async def _swap(self, manifest: Manifest) -> PolicyVersion:
        await apoint("engine.load")
        tensors = await asyncio.to_thread(self._load_manifest, manifest)
        loop = asyncio.get_running_loop()
        acknowledged: asyncio.Future[PolicyVersion] = loop.create_future()

        def answer(result: PolicyVersion | BaseException) -> None:
            _call(loop, _settle, acknowledged, result)

        self._post(_Load(manifest, tensors, answer))
        version = await acknowledged
        await apoint("engine.loaded")
        return version

    async def health(self) -> EngineHealth:
        """The version, and how many samples run and wait; raises what ended the engine."""
        stepper = self._alive()
        inbox = tuple(self._inbox)
        queued = sum(job.unseated for c in inbox if isinstance(c, _Submit) for job in c.jobs)
        return EngineHealth(
            version=stepper.version,
            running=len(stepper.rows),
            waiting=stepper.waiting_samples() + queued,
            seats=self._seats,
        )

    async def drain_spans(self) -> list[Span]:
        """Compute spans since the last call; "pause" is how long a load held generation up."""
        return self._spans.drain()

    async def stop(self) -> None:
        """Ends running requests as "aborted", joins the stepping thread, frees the model."""
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify()
        await asyncio.shield(self._ended)
        thread.join()
        self._stepper = None

    def _name(self) -> str:
        return f"{self._role}/{self._replica}"

    def _alive(self) -> Stepper:
        if self._error is not None:
            raise self._error
        if self._stepper is None or self._stopping:
            raise RunFailed(f"{self._name()} is not running")
        return self._stepper

    def _post(self, command: _Command) -> None:
        with self._changed:
            self._alive()
            self._inbox.append(command)
            self._changed.notify()

    def _cancel(self, jobs: list[Job]) -> None:
        """An engine that has ended has nothing to cancel, and is no error here."""
        with self._changed:
            if self._error is None and not self._stopping:
                self._inbox.append(_Cancel(jobs))
                self._changed.notify()

    def _refuse(self, request: GenerateRequest) -> None:
        """Raises for a request that cannot be run, in one sentence with the numbers."""
        stepper, sampling = self._alive(), request.sampling
        stop_ids = stepper.stop_ids(sampling)
        check_request(
            request,
            context=self._context,
            vocabulary=self._vocabulary,
            ends=lambda ids: stepper.reason_to_end(sampling, ids, stop_ids),
        )

    # ---- from here on: the stepping thread ----

    def _run(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
        try:
            with torch.inference_mode():
                stepper = self._build()
                self._stepper = stepper
                _call(loop, _settle, ready, None)
                while self._take(stepper):
                    if not stepper.idle:
                        stepper.step()
                stepper.abort_all()
        except BaseException as error:
            self._fail(error)
            _call(loop, _settle, ready, error)
        finally:
            _call(loop, _settle, self._ended, None)

    def _build(self) -> Stepper:
        torch.set_num_threads(self._threads)
        model = PolicyModel(**self._model)
        self._context, self._vocabulary = model.context, model.vocabulary
        return Stepper(
            model,
            seats=self._seats,
            version=self._first_version,
            on_update=self._on_update,
            prefill_budget=PREFILL_BUDGET[self._device.type],
            spans=self._spans,
        )

    def _take(self, stepper: Stepper) -> bool:
        """Carries out what the loop asked for; waits for it when idle. False: stop."""
        with self._changed:
            if stepper.idle and not self._inbox and not self._stopping:
                self._changed.wait_for(lambda: self._inbox or self._stopping)
                until = time.monotonic() + LONGEST_LINGER
                while self._changed.wait(LINGER) and time.monotonic() < until:
                    pass
            stopping = self._stopping
            # Health reads the inbox without the lock: replace it, never clear it.
            commands, self._inbox = self._inbox, []
            for command in commands:
                if isinstance(command, _Submit):
                    stepper.submit(command.jobs)
        for command in commands:
            if isinstance(command, _Cancel):
                stepper.cancel(command.jobs)
        loads = [command for command in commands if isinstance(command, _Load)]
        if stopping:
            stopped = RunFailed(f"{self._name()} was stopped before it loaded")
            for load in loads:
                load.answer(stopped)
        elif loads:
            self._load(stepper, loads)
        return not stopping

    def _load(self, stepper: Stepper, loads: list[_Load]) -> None:
        good: list[_Load] = []
        for load in loads:
            try:
                stepper.model.check(load.manifest, load.tensors)
            except RunFailed as refused:
                # Nothing was touched: the caller is told, generation goes on.
                load.answer(refused)
            else:
                good.append(load)
        if not good:
            return
        try:
            stepper.load([(load.manifest, load.tensors) for load in good])
        except BaseException as error:
            for load in good:
                load.answer(error)
            raise
        for load in good:
            load.answer(load.manifest.version)

    def _fail(self, error: BaseException) -> None:
        """Nobody may wait for a dead thread: all that wait, and all later calls, get the error."""
        with self._changed:
            self._error = error
            commands, self._inbox = self._inbox, []
        if self._stepper is not None:
            self._stepper.fail_all(error)
        for command in commands:
            if isinstance(command, _Submit):
                for job in command.jobs[:1]:  # they share who is told
                    job.deliver(error)
            elif isinstance(command, _Load):
                command.answer(error)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    """Runs a function on the loop; a closed loop has nobody left to tell."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    """Sets a future's result or error, unless its waiter has gone."""
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
