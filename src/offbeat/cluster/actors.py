"""The roles as Ray actors: the only code, with `pools.py`, that knows Ray.

The driver creates and owns every actor, so they die with it (a replacement engine is owned by the
rollouter, which the driver owns). Actors are named `<run id>/<role>/<replica>`. Token arrays go
from engines to the trainer through the object store; the rollouter and the driver hold references.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from offbeat.cluster.build import RolloutSide, make_engine, make_scorer, make_trainer
from offbeat.cluster.logs import log_to
from offbeat.cluster.pools import ResourcePool
from offbeat.cluster.specs import EngineSpec, RunSpec, ScorerSpec, log_folder
from offbeat.config import Config
from offbeat.errors import OffbeatError
from offbeat.ledger import Counts, Flag
from offbeat.records import (
    Batch,
    Completion,
    EngineHealth,
    GenerateRequest,
    Manifest,
    Payload,
    PolicyVersion,
    Progress,
    ScoreItem,
    Span,
)
from offbeat.reward.loop import SourceStats
from offbeat.rollout.engine import Engine
from offbeat.rollout.parts import Tally
from offbeat.rollout.rollouter import Rollouter
from offbeat.weights.sync import SyncReport

if TYPE_CHECKING:
    from offbeat.train.step import StepResult

NAMESPACE = "offbeat"
HEALTH = {"health": 2}
STOP_SECONDS = 10.0


def remote(actor: type, *, health: bool = False) -> Any:
    """The Ray class of an actor; `health` gives its health calls threads of their own."""
    return ray.remote(concurrency_groups=HEALTH)(actor) if health else ray.remote(actor)


async def result(reference: Any) -> Any:
    """Awaits a call; what an actor raised on purpose is raised here as it was."""
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, OffbeatError):
            raise error.cause from None
        raise


class EngineActor:
    """A generating replica in a process of its own."""

    def __init__(self, spec: EngineSpec) -> None:
        log_to(spec.logs, f"{spec.role}-{spec.replica}")
        self._spec = spec
        self._engine = make_engine(spec)
        self._keep_payloads = spec.role == "rollout"

    async def start(self) -> None:
        await self._engine.start()

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Payload | Completion | Progress, None]:
        """Streams two objects a completion: its token arrays, then the note of them."""
        async with contextlib.aclosing(self._engine.generate(request)) as completions:
            async for completion in completions:
                if self._keep_payloads:
                    yield completion.ref
                yield changed(completion, ref=None)

    async def load(self, manifest: Manifest) -> PolicyVersion:
        return await self._engine.load(manifest)

    @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
    async def health(self) -> EngineHealth:
        return await self._engine.health()

    async def drain_spans(self) -> list[Span]:
        return await self._engine.drain_spans()

    async def stop(self) -> None:
        await self._engine.stop()


class RayEngine:
    """An `Engine` that lives in an `EngineActor`.

    A payload is an object of its own in the stream, so its reference belongs to the caller and
    outlives the engine; the caller never fetches it.
    """

    def __init__(self, handle: ActorHandle, *, payloads: bool) -> None:
        self.handle = handle
        self._payloads = payloads

    async def start(self) -> None:
        await result(self.handle.start.remote())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        stream = self.handle.generate.options(num_returns="streaming").remote(request)
        ended = False
        payload: Any = None
        try:
            async for reference in stream:
                if self._payloads and payload is None:
                    payload = reference
                    continue
                note: Completion = await result(reference)
                yield changed(note, ref=payload)
                payload = None
            ended = True
            if payload is not None:  # not a payload but what ended the stream: raise it
                await result(payload)
        finally:
            if not ended:
                ray.cancel(stream)

    async def load(self, manifest: Manifest) -> PolicyVersion:
        version: PolicyVersion = await result(self.handle.load.remote(manifest))
        return version

    async def health(self) -> EngineHealth:
        health: EngineHealth = await result(self.handle.health.remote())
        return health

    async def drain_spans(self) -> list[Span]:
        spans: list[Span] = await result(self.handle.drain_spans.remote())
        return spans

    async def stop(self) -> None:
        await result(self.handle.stop.remote())


class ScorerActor:
    """A discriminative replica in a process of its own."""

    def __init__(self, spec: ScorerSpec) -> None:
        log_to(spec.logs, f"reward/{spec.name}-{spec.replica}")
        self._scorer = make_scorer(spec)

    async def start(self) -> None:
        await self._scorer.start()

    async def logits(self, items: Sequence[ScoreItem]) -> list[float | None]:
        return await self._scorer.logits(items)

    async def drain_spans(self) -> list[Span]:
        return await self._scorer.drain_spans()

    async def stop(self) -> None:
        await self._scorer.stop()


class RayScorer:
    """A `Scorer` that lives in a `ScorerActor`."""

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle

    async def start(self) -> None:
        await result(self.handle.start.remote())

    async def logits(self, items: Sequence[ScoreItem]) -> list[float | None]:
        logits: list[float | None] = await result(self.handle.logits.remote(list(items)))
        return logits

    async def drain_spans(self) -> list[Span]:
        spans: list[Span] = await result(self.handle.drain_spans.remote())
        return spans

    async def stop(self) -> None:
        await result(self.handle.stop.remote())


class TrainerActor:
    """One rank of the trainer; its calls come one after another."""

    def __init__(self, config: Config, run: RunSpec) -> None:
        log_to(log_folder(config), "train-0")
        self._config = config
        self._run = run

    def setup(self, total_steps: int) -> PolicyVersion:
        self._trainer = make_trainer(self._config, self._run, total_steps)
        return self._trainer.setup()

    def step(self, batch: Batch) -> StepResult:
        payloads: list[list[Payload]] = [
            ray.get([sample.completion.ref for sample in group.samples]) for group in batch.groups
        ]
        return self._trainer.step(batch, payloads)

    def publish(self) -> Manifest:
        return self._trainer.publish()

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        self._trainer.save(path, extra)

    def drain_spans(self) -> list[Span]:
        return self._trainer.drain_spans()

    def close(self) -> None:
        self._trainer.close()


class RayTrainer:
    """The trainer's ranks as the loop sees them."""

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle

    async def step(self, batch: Batch) -> StepResult:
        done: StepResult = await result(self.handle.step.remote(batch))
        return done

    async def publish(self) -> Manifest:
        manifest: Manifest = await result(self.handle.publish.remote())
        return manifest

    async def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        await result(self.handle.save.remote(path, dict(extra)))

    async def drain_spans(self) -> list[Span]:
        spans: list[Span] = await result(self.handle.drain_spans.remote())
        return spans


class RollouterActor:
    """The rollouter's process: routing, admission, reward loop, buffer and ledger."""

    def __init__(self, config: Config, run: RunSpec) -> None:
        log_to(log_folder(config), "rollouter")
        self._side = RolloutSide(config, run)
        self._run = run
        self._task: asyncio.Task[None] | None = None

    async def start(
        self, judges: dict[str, list[ActorHandle]], scorers: dict[str, list[ActorHandle]]
    ) -> int:
        return await self._side.start(
            {name: [RayEngine(h, payloads=False) for h in found] for name, found in judges.items()},
            {name: [RayScorer(h) for h in handles] for name, handles in scorers.items()},
        )

    async def begin(
        self, handles: list[ActorHandle], pool: ResourcePool, specs: list[EngineSpec],
        total_steps: int, ledger: Path,
    ) -> None:  # fmt: skip
        handles = list(handles)

        async def replace(index: int) -> Engine:
            ray.kill(handles[index])
            fresh = start_engine(specs[index], pool, self._run, name=None)
            handles[index] = fresh
            engine = RayEngine(fresh, payloads=True)
            await engine.start()
            return engine

        engines = [RayEngine(handle, payloads=True) for handle in handles]
        core = self._side.build(engines, total_steps, replace, ledger)
        gc.collect()
        gc.freeze()  # prompts and modules stay: a full collection over them would hold the loop up
        self._task = asyncio.create_task(core.run())
        await core.running.wait()

    @property
    def _core(self) -> Rollouter:
        if self._side.core is None:
            raise OffbeatError("the rollouter has not begun")
        return self._side.core

    @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
    async def ping(self) -> str:
        return self._run.run_id

    async def batch(self, step: int) -> Batch:
        return await self._core.batch(step)

    async def trained(self, step: int, flags: Mapping[int, Flag]) -> Counts:
        return await self._core.trained(step, flags)

    async def published(self, manifest: Manifest) -> int:
        return await self._core.published(manifest)

    async def checkpointed(self, step: int) -> None:
        await self._core.checkpointed(step)

    async def validate(self) -> tuple[int, dict[str, float]]:
        return await self._core.validate()

    async def counts(self) -> Counts:
        return await self._core.counts()

    async def drain(self) -> tuple[list[Span], list[SyncReport], Tally]:
        return await self._core.drain()

    async def reward_stats(self) -> Mapping[str, SourceStats]:
        return await self._core.reward_stats()

    async def stop(self) -> None:
        if self._task is not None and self._side.core is not None:
            await self._side.core.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await asyncio.gather(self._task, return_exceptions=True)
        await self._side.close()


class RayRollouter:
    """The rollouter as the loop sees it."""

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle

    async def batch(self, step: int) -> Batch:
        batch: Batch = await result(self.handle.batch.remote(step))
        return batch

    async def trained(self, step: int, flags: Mapping[int, Flag]) -> Counts:
        counts: Counts = await result(self.handle.trained.remote(step, dict(flags)))
        return counts

    async def published(self, manifest: Manifest) -> int:
        floor: int = await result(self.handle.published.remote(manifest))
        return floor

    async def checkpointed(self, step: int) -> None:
        await result(self.handle.checkpointed.remote(step))

    async def validate(self) -> tuple[int, dict[str, float]]:
        found: tuple[int, dict[str, float]] = await result(self.handle.validate.remote())
        return found

    async def counts(self) -> Counts:
        counts: Counts = await result(self.handle.counts.remote())
        return counts

    async def drain(self) -> tuple[list[Span], list[SyncReport], Tally]:
        drained: tuple[list[Span], list[SyncReport], Tally] = await result(
            self.handle.drain.remote()
        )
        return drained

    async def stop(self) -> None:
        await result(self.handle.stop.remote())

    async def reward_stats(self) -> Mapping[str, SourceStats]:
        stats: Mapping[str, SourceStats] = await result(self.handle.reward_stats.remote())
        return stats


def start_engine(
    spec: EngineSpec, pool: ResourcePool, run: RunSpec, *, name: str | None
) -> ActorHandle:
    """An engine actor on its bundle of `pool`."""
    options = pool.options(spec.replica, threads=spec.threads)
    if name is not None:
        options |= {"name": f"{run.run_id}/{name}/{spec.replica}", "namespace": NAMESPACE}
    return remote(EngineActor, health=True).options(max_concurrency=1000, **options).remote(spec)
