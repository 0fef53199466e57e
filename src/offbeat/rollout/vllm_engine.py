"""`VllmEngine`: a replica on vLLM, which computes in processes of its own.

```
 this process                              vLLM's core and its workers
 generate ─ one vLLM request a sample ──►  scheduler, KV blocks shared by prefix
 Completion · Progress ◄─── tokens ──────  continuous batching
 load ─ stage ─────────────────────────►   workers read the version beside decoding
      ─ pause · update · finish · resume►  weights change between two steps
```

A sample is a request of its own in vLLM, so that each ends, is resumed and is cancelled alone; a
group's prompt is computed once, since its full KV blocks are found by their prefix. No update can
leave an old prefix behind: with `on_update="recompute"` the pause drops every block, those of
running samples too; with "keep_kv" running samples keep theirs, and a block is found only by
requests that were given to vLLM under the same version (a sample that has no token yet is given
to it again).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from offbeat.errors import OffbeatError, RequestRefused, RunFailed
from offbeat.faults import apoint
from offbeat.records import (
    Completion,
    EngineHealth,
    GenerateRequest,
    Manifest,
    PolicyVersion,
    Progress,
    Sampling,
    Span,
)
from offbeat.rollout.stop_strings import StopStrings
from offbeat.rollout.vllm_sample import Sample, Spans, check, first_line, samples_of
from offbeat.rollout.vllm_spans import StepMeter
from offbeat.rollout.vllm_start import STOP_SECONDS, Started, start_on_thread

T = TypeVar("T")
Item = Completion | Progress | BaseException
DEATH_POLL_SECONDS = 0.2
LONGEST_STAGE_POLL = 0.05


class VllmEngine:
    """One replica that generates (policy or judge) on vLLM. See `TransformersEngine` for the rest.

    `devices` is the tensor-parallel size, `memory_share` vLLM's share of each GPU's memory;
    `engine_args` are further arguments of vLLM's engine, by their names there.
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
        on_update: Literal["recompute", "keep_kv"] = "recompute",
        threads: int = 1,
        version: PolicyVersion = PolicyVersion(0, 0),  # noqa: B008 - frozen
        devices: int = 1,
        memory_share: float = 0.9,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._name = f"{role}/{replica}"
        self._settings: dict[str, Any] = {
            "model_path": model_path,
            "tokenizer_path": tokenizer_path,
            "role": role,
            "replica": replica,
            "seats": seats,
            "max_context": max_context,
            "seed": seed,
            "dtype": dtype,
            "device": device,
            "threads": threads,
            "devices": devices,
            "memory_share": memory_share,
            "engine_args": dict(engine_args or {}),
        }
        self._seats = seats
        self._recompute = on_update == "recompute"
        self._version = version
        self._meter = StepMeter(role, replica, wall_is_cpu=device == "cuda")
        self._started: Started | None = None
        self._stops: StopStrings
        self._stopping = False
        self._error: BaseException | None = None
        self._running: dict[Sample, asyncio.Task[None]] = {}
        self._numbers = count()
        self._loading = asyncio.Lock()
        self._swapping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts vLLM's processes; returns when requests are taken."""
        if self._started is not None:
            raise RunFailed(f"{self._name} was started before")
        started = await start_on_thread(meter=self._meter, **self._settings)
        self._started = started
        self._stops = StopStrings(started.decode)
        self._meter.busy = lambda: bool(self._running)
        self._meter.version = self._version.step
        llm = started.llm
        try:
            await self._call(llm.update_weight_version(str(self._version.step)))
            # Asked for now, so that giving a request to vLLM never waits for it.
            await self._call(llm.get_supported_tasks())
            workers = await self._call(llm.collective_rpc("process_id"))
            await self._call(self._warm_up(started))
        except BaseException:
            await asyncio.to_thread(llm.shutdown, STOP_SECONDS)
            raise
        # The core's own time is left out: while it waits for its workers it spins.
        self._meter.clock.processes = sorted(set(workers))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion | Progress]:
        """Yields each of the request's completions as it ends, and its `Progress` between them.

        Raises `RequestRefused` for a request that cannot be run; all others go on. Closing the
        iterator early cancels what still runs. A sample with a `structure` begins anew when it is
        resumed. Raises `RunFailed` when vLLM's core has died.
        """
        started = self._alive()
        check(
            request,
            context=started.context,
            vocabulary=started.vocabulary,
            eos=started.eos,
            stops=self._stops,
        )
        arrived: asyncio.Queue[Item] = asyncio.Queue()
        samples = samples_of(request, started.eos, started.decode, self._stops)
        tasks = []
        for sample in samples:
            task = asyncio.create_task(self._follow(sample, arrived.put_nowait))
            self._running[sample] = task
            tasks.append(task)
        left = len(tasks)
        try:
            while left:
                item = await arrived.get()
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, Completion):
                    left -= 1
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for sample in samples:
                self._running.pop(sample, None)

    async def load(self, manifest: Manifest) -> PolicyVersion:
        """Swaps weights between two steps; returns when the next token is the new version's.

        The version is read and verified in the workers beside decoding. A failure there leaves the
        engine as it was; one while the weights are put in ends it, since they are no version then.
        """
        started = self._alive()
        started.check(manifest)
        await apoint("engine.load")
        await self._loading.acquire()
        try:
            await self._stage(started, manifest)
        except Exception as error:  # boundary: whatever the core answers with
            self._loading.release()
            if isinstance(error, OffbeatError):
                raise
            raise RunFailed(
                f"{self._name} cannot load version {manifest.version}: {first_line(error)}"
            ) from error
        except BaseException:
            self._loading.release()
            raise
        # Once generation is paused the load goes to its end, whoever still waits for it.
        self._swapping = asyncio.create_task(self._swap(started, manifest))
        self._swapping.add_done_callback(lambda _: self._loading.release())
        await asyncio.shield(self._swapping)
        await apoint("engine.loaded")
        return manifest.version

    async def health(self) -> EngineHealth:
        """The version, and how many samples run and wait; raises what ended the engine."""
        self._alive()
        live = len(self._running)
        running = min(live, self._seats)
        return EngineHealth(self._version, running, live - running, self._seats)

    async def drain_spans(self) -> list[Span]:
        """Compute spans since the last call; "pause" is how long a load held generation up."""
        return self._meter.drain()

    async def stop(self) -> None:
        """Ends running samples as "aborted" and vLLM's processes."""
        started = self._started
        if started is None or self._stopping:
            return
        self._stopping = True
        tasks = list(self._running.values())
        if self._error is None and not started.llm.errored:
            await started.llm.abort([sample.name for sample in self._running if sample.name])
        else:
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if started.llm.output_handler is not None:
            started.llm.output_handler.cancel()  # it would report the end as a failure
        await asyncio.to_thread(started.llm.shutdown, STOP_SECONDS)

    def _alive(self) -> Started:
        if self._error is not None:
            raise self._error
        if self._started is None or self._stopping:
            raise RunFailed(f"{self._name} is not running")
        if self._started.llm.errored:
            raise self._died()
        return self._started

    def _died(self) -> BaseException:
        if self._error is None:
            self._error = RunFailed(f"{self._name}: vLLM's core process died")
        return self._error

    async def _call(self, work: Awaitable[T]) -> T:
        """Waits for an answer of the core, but not for that of a dead one."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=DEATH_POLL_SECONDS)
                if not task.done() and self._started is not None and self._started.llm.errored:
                    raise self._died()
            return task.result()
        finally:
            task.cancel()

    async def _warm_up(self, started: Started) -> None:
        """Draws three tokens: the first batch takes seconds, which no request's deadline counts."""
        request = GenerateRequest("warm-up", np.ones(1, np.int32), 1, Sampling(1))
        for sampling in (Sampling(1, 0.0), Sampling(1, 1.0), Sampling(1, 0.0, watch=(1,))):
            (sample,) = samples_of(
                replace(request, sampling=sampling), None, started.decode, self._stops
            )
            await self._run(started, sample, lambda _: None)

    # ---- a sample ----

    async def _follow(self, sample: Sample, put: Callable[[Item], None]) -> None:
        """Sees one sample through; whatever ends it is told by `put`."""
        try:
            spans: Spans = ()
            if sample.peeks:
                peek = sample.peek()
                await self._run(self._alive(), peek, lambda _: None)
                sample.watched = peek.watched
            while sample.reason is None and not self._stopping:
                sample.renewed = False
                spans = await self._run(self._alive(), sample, put)
                if not sample.renewed:
                    break
            self._running.pop(sample, None)
            put(sample.completion(spans, self._version.step))
        except OffbeatError as error:
            put(error)
        except asyncio.CancelledError:  # by the engine's end, if the owner still waits
            put(self._error or RunFailed(f"{self._name} is not running"))
            raise
        except Exception as error:  # boundary: whatever vLLM raises, the request's owner is told
            put(self._explain(sample, error))

    async def _run(self, started: Started, sample: Sample, put: Callable[[Item], None]) -> Spans:
        """One request of vLLM: gives it the sample, takes its tokens; returns their versions."""
        from vllm.inputs.engine import tokens_input

        llm = started.llm
        sample.name = f"{sample.request.request_id}/{sample.index}/{next(self._numbers)}"
        prompt = tokens_input(sample.prompt(), cache_salt=str(self._version))
        if self._running:
            self._meter.work_came()
        stopped = False
        async for output in llm.generate(prompt, sample.params(), sample.name):
            (part,) = output.outputs
            sample.add(part.token_ids, part.logprobs)
            if part.finish_reason is not None:
                return _versions(sample, part)
            if sample.reason is not None and not stopped:
                stopped = True
                await llm.abort(sample.name)  # its last output, with the versions, comes at once
            if sample.due and (so_far := _versions_so_far(llm, sample.name)) is not None:
                put(sample.progress(so_far))
        raise RunFailed(f"{self._name}: vLLM ended {sample.name} without a word")

    def _explain(self, sample: Sample, error: Exception) -> BaseException:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        started = self._started
        if isinstance(error, EngineDeadError) or started is None or started.llm.errored:
            return self._died()
        if isinstance(error, (VLLMClientError, ValueError)):
            return RequestRefused(f"{sample.request.request_id}: {first_line(error)}")
        return RunFailed(f"{self._name}: {sample.request.request_id}: {first_line(error)}")

    # ---- a load ----

    async def _stage(self, started: Started, manifest: Manifest) -> None:
        """Has every worker read the version; returns when all have it."""
        from offbeat.weights.vllm_transfer import pack

        llm = started.llm
        await self._call(llm.collective_rpc("stage_manifest", args=(pack(manifest),)))
        pause = 0.001
        while True:
            states = await self._call(llm.collective_rpc("manifest_staged"))
            wrong = next((state for state in states if state), None)
            if wrong is not None:
                raise RunFailed(f"{self._name} cannot load version {manifest.version}: {wrong}")
            if all(state is not None for state in states):
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_STAGE_POLL)

    async def _swap(self, started: Started, manifest: Manifest) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm, meter = started.llm, self._meter
        paused = meter.begin()
        try:
            await self._call(llm.pause_generation(mode="keep", clear_cache=self._recompute))
            begun = meter.begin()
            await self._call(llm.start_weight_update())
            update = WeightTransferUpdateRequest(update_info={"version": str(manifest.version)})
            await self._call(llm.update_weights(update))
            await self._call(llm.finish_weight_update(str(manifest.version.step)))
            self._version = manifest.version
            meter.version = manifest.version.step
            meter.loaded(begun)
            if not self._recompute:
                await self._renew(llm)
            await self._call(llm.resume_generation())
            meter.paused(paused)
        except BaseException as error:  # boundary: whatever vLLM raises
            # Half a version may lie in the model: nothing may be generated with it.
            if self._error is None:
                self._error = RunFailed(
                    f"{self._name} failed to load version {manifest.version}: {first_line(error)}"
                )
            for task in self._running.values():
                task.cancel()  # vLLM tells nobody whose request it drops
            await asyncio.to_thread(llm.shutdown, STOP_SECONDS)
            raise self._error from error

    async def _renew(self, llm: Any) -> None:
        """Gives samples without a token to vLLM again: their prompts may lie in old blocks."""
        for sample in list(self._running):
            if sample.name and sample.fresh and sample.reason is None:
                if _versions_so_far(llm, sample.name) != []:
                    continue  # its first token is on its way
                sample.renewed = True
                await llm.abort(sample.name)


def _versions(sample: Sample, part: Any) -> Spans:
    """The versions of a vLLM request's tokens, once it has ended."""
    if part.finish_reason not in ("stop", "length", "abort"):
        raise RunFailed(f"{sample.request.request_id}: vLLM ended it with {part.finish_reason}")
    return [(span.version, span.start) for span in part.weight_versions or ()]


def _versions_so_far(llm: Any, name: str) -> Spans | None:
    """The same of a running one, from vLLM's own record; None if it has none.

    Outputs carry the versions only at the end, and a token that is read after an update may have
    been made before it: only vLLM's output processor knows.
    """
    processor = llm.output_processor
    for internal in processor.external_req_ids.get(name, ()):
        state = processor.request_states.get(internal)
        if state is not None:
            return list(state.weight_version_starts)
    return None
