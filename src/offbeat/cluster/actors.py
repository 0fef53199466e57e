"""The roles as Ray actors; `rollouter_actor.py` has the rollouter's.

The driver creates and owns every actor, so they die with it (a replacement is owned by the
rollouter, which the driver owns). Actors are named `<run id>/<role>/<replica>`. Token arrays go
from engines to the trainer through the object store; the rollouter and the driver hold references.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from offbeat.cluster.build import answer, make_engine, make_scorer, make_trainer
from offbeat.cluster.leftovers import RUN_TAG, TAG, end_leftovers
from offbeat.cluster.logs import log_to
from offbeat.cluster.pools import ResourcePool
from offbeat.cluster.specs import EngineSpec, RunSpec, ScorerSpec, log_folder
from offbeat.config import Config
from offbeat.errors import OffbeatError, RoleDied
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
from offbeat.reward.parity import RowCheck
from offbeat.reward.source import Logit

if TYPE_CHECKING:
    from offbeat.train.step import StepResult

NAMESPACE = "offbeat"
HEALTH = {"health": 2}


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


async def of_role(role: str, reference: Any) -> Any:
    """The same for a role that can be started again: `RoleDied` if its process has ended, or was
    broken by what nobody raised on purpose."""
    try:
        return await result(reference)
    except RayActorError as error:
        raise RoleDied(role, f"the {role}'s process has ended ({type(error).__name__})") from error
    except RayTaskError as error:
        cause = " ".join(str(error.cause).split())[:300]
        raise RoleDied(role, f"the {role} failed: {type(error.cause).__name__}: {cause}") from error


class EngineActor:
    """A generating replica in a process of its own."""

    def __init__(self, spec: EngineSpec) -> None:
        log_to(spec.logs, f"{spec.role}-{spec.replica}")
        self._spec = spec
        self._engine = make_engine(spec)
        self._keep_payloads = spec.role == "rollout"
        self._requests: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        await asyncio.to_thread(end_leftovers)
        await self._engine.start()

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Payload | Completion | Progress, None]:
        """Streams two objects a completion or snapshot: its token arrays, then the note of them.

        Tokens to resume from come as references into the object store and are read here.
        """
        resume = [
            (index, await tokens if isinstance(tokens, ray.ObjectRef) else tokens)
            for index, tokens in request.resume
        ]
        request = changed(request, resume=tuple(resume))
        with self._known():
            async with contextlib.aclosing(self._engine.generate(request)) as notes:
                async for note in notes:
                    if self._keep_payloads:
                        yield note.ref
                    yield changed(note, ref=None)

    @contextlib.contextmanager
    def _known(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            yield
        finally:
            self._requests.discard(task)

    async def abandon(self) -> None:
        """Ends the requests of a caller that died: their seats are free at once."""
        for task in self._requests:
            task.cancel()

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

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Completion | Progress, None]:
        stream = self.handle.generate.options(num_returns="streaming").remote(request)
        ended = False
        payload: Any = None
        try:
            async for reference in stream:
                if self._payloads and payload is None:
                    payload = reference
                    continue
                note: Completion | Progress = await result(reference)
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
        await asyncio.to_thread(end_leftovers)
        await self._scorer.start()

    async def logits(self, items: Sequence[ScoreItem]) -> list[Logit]:
        return await self._scorer.logits(items)

    async def check_rows(self, items: Sequence[ScoreItem], *, reference: bool) -> RowCheck:
        return await self._scorer.check_rows(items, reference=reference)

    @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
    async def health(self) -> None:
        await self._scorer.health()

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

    async def logits(self, items: Sequence[ScoreItem]) -> list[Logit]:
        logits: list[Logit] = await result(self.handle.logits.remote(list(items)))
        return logits

    async def check_rows(self, items: Sequence[ScoreItem], *, reference: bool) -> RowCheck:
        asked = self.handle.check_rows.remote(list(items), reference=reference)
        check: RowCheck = await result(asked)
        return check

    async def health(self) -> None:
        await result(self.handle.health.remote())

    async def drain_spans(self) -> list[Span]:
        spans: list[Span] = await result(self.handle.drain_spans.remote())
        return spans

    async def stop(self) -> None:
        await result(self.handle.stop.remote())


class TrainerActor:
    """One rank of the trainer; its calls come one after another."""

    def __init__(self, config: Config, run: RunSpec) -> None:
        log_to(log_folder(config), "train-0")
        import offbeat.train.trainer  # noqa: F401 - takes seconds, while the other roles start

        self._config = config
        self._run = run

    def setup(self, total_steps: int, checkpoint: Path | None) -> PolicyVersion:
        self._trainer = make_trainer(self._config, self._run, total_steps)
        return self._trainer.setup(checkpoint)

    def step(self, batch: Batch) -> StepResult:
        payloads = [
            _arrays([sample.completion.ref for sample in group.samples]) for group in batch.groups
        ]
        return self._trainer.step(batch, payloads)

    @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
    def ping(self) -> None:
        """Answers while the process lives, also beside a step."""

    def publish(self) -> Manifest:
        return self._trainer.publish()

    def save(self, path: Path, extra: dict[str, Any], files: dict[str, Path]) -> None:
        self._trainer.save(path, extra, files)

    def answer(self, requests: Sequence[GenerateRequest]) -> tuple[PolicyVersion, list[Completion]]:
        return answer(self._trainer, requests)

    def drain_spans(self) -> list[Span]:
        return self._trainer.drain_spans()

    def close(self) -> None:
        self._trainer.close()


class RayTrainer:
    """The trainer's ranks as the loop sees them; `again` starts another actor of a lineage."""

    def __init__(self, handle: ActorHandle, again: Callable[[int], ActorHandle]) -> None:
        self.handle = handle
        self._again = again
        self.total_steps = 0  # known once prompts are read

    async def restart(self, lineage: int, checkpoint: Path | None) -> PolicyVersion:
        ray.kill(self.handle)
        self.handle = self._again(lineage)
        return await self.setup(checkpoint)

    async def setup(self, checkpoint: Path | None) -> PolicyVersion:
        call = self.handle.setup.remote(self.total_steps, checkpoint)
        version: PolicyVersion = await of_role("trainer", call)
        return version

    async def ping(self) -> None:
        await of_role("trainer", self.handle.ping.remote())

    async def step(self, batch: Batch) -> StepResult:
        try:
            done: StepResult = await of_role("trainer", self.handle.step.remote(batch))
        except RoleDied as died:
            if isinstance(died.__cause__, RayTaskError) and isinstance(
                died.__cause__.cause, ObjectLostError
            ):  # what the rollouter owned went with it; nothing is computed
                raise RoleDied(
                    "rollouter", "the rollouter ended, and its objects with it"
                ) from died
            raise
        return done

    async def publish(self) -> Manifest:
        manifest: Manifest = await of_role("trainer", self.handle.publish.remote())
        return manifest

    async def answer(
        self, requests: Sequence[GenerateRequest]
    ) -> tuple[PolicyVersion, list[Completion]]:
        found: tuple[PolicyVersion, list[Completion]] = await of_role(
            "trainer", self.handle.answer.remote(list(requests))
        )
        return found

    async def save(self, path: Path, extra: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        await of_role("trainer", self.handle.save.remote(path, dict(extra), dict(files)))

    async def drain_spans(self) -> list[Span]:
        spans: list[Span] = await of_role("trainer", self.handle.drain_spans.remote())
        return spans


def _arrays(refs: list[Any]) -> list[Payload]:
    """A group's tokens: behind references, or themselves where they come from the ledger."""
    behind = any(isinstance(ref, ray.ObjectRef) for ref in refs)
    payloads: list[Payload] = ray.get(refs) if behind else refs
    return payloads


def start_engine(
    spec: EngineSpec, pool: ResourcePool, run: RunSpec, *, named: bool = True
) -> ActorHandle:
    """An engine actor on its bundle of `pool`."""
    options = _options(pool, run, spec.role, spec.replica, spec.threads, named=named)
    return remote(EngineActor, health=True).options(max_concurrency=1000, **options).remote(spec)


def start_scorer(
    spec: ScorerSpec, pool: ResourcePool, run: RunSpec, *, named: bool = True
) -> ActorHandle:
    """A scorer actor on its bundle of `pool`."""
    role, threads = f"reward/{spec.name}", spec.section.threads
    options = _options(pool, run, role, spec.replica, threads, named=named)
    return remote(ScorerActor, health=True).options(**options).remote(spec)


def _options(
    pool: ResourcePool, run: RunSpec, role: str, replica: int, threads: int, *, named: bool
) -> dict[str, Any]:
    """A replacement has no name: its predecessor's may be taken still."""
    options = pool.options(replica, threads=threads)
    name = f"{run.run_id}/{role}/{replica}"
    tagged(options, run, name)
    return options | ({"name": name, "namespace": NAMESPACE} if named else {})


def tagged(options: dict[str, Any], run: RunSpec, name: str) -> None:
    """Puts the names by which leftovers are found into an actor's environment."""
    options["runtime_env"]["env_vars"] |= {TAG: name}
    if run.directory is not None:
        options["runtime_env"]["env_vars"] |= {RUN_TAG: str(run.directory)}


async def start_again(
    handles: list[ActorHandle], index: int, start: Callable[[], ActorHandle]
) -> ActorHandle:
    """Kills replica `index` and starts another on its bundle; leaves none if that fails."""
    ray.kill(handles[index])
    handles[index] = fresh = start()
    try:
        await result(fresh.start.remote())
    except BaseException:
        ray.kill(fresh)
        raise
    return fresh
