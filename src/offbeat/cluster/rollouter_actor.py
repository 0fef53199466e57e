"""The rollouter as a Ray actor, and as the loop sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import ray
from ray.actor import ActorHandle

from offbeat.cluster.actors import RayEngine, of_role, start_engine
from offbeat.cluster.build import RolloutSide
from offbeat.cluster.logs import log_to
from offbeat.cluster.pools import ResourcePool
from offbeat.cluster.ray_rewards import Handles, Replacer, standing_on
from offbeat.cluster.specs import EngineSpec, GoOn, RunSpec, log_folder, policy_engine
from offbeat.config import Config
from offbeat.errors import OffbeatError
from offbeat.ledger import Counts, Flag
from offbeat.records import Batch, Completion, GenerateRequest, Manifest, Payload, Span
from offbeat.reward.anchors import AnchorReport
from offbeat.reward.loop import SourceStats
from offbeat.roles import within
from offbeat.rollout.dedicated import DedicatedEngines
from offbeat.rollout.engine import Engine
from offbeat.rollout.parts import Tally, shorten_collections
from offbeat.rollout.rollouter import Rollouter
from offbeat.weights.sync import SyncReport

STOP_SECONDS = 10.0
FETCH_SECONDS = 60.0


async def fetched(completions: Sequence[Completion]) -> list[Payload]:
    """The token arrays of completions, out of the object store."""
    arrays = asyncio.gather(*(completion.ref for completion in completions))
    return list(await within(FETCH_SECONDS, "the object store's tokens", arrays))


class RollouterActor:
    """The rollouter's process: routing, admission, reward loop, buffer and ledger."""

    def __init__(self, config: Config, run: RunSpec) -> None:
        log_to(log_folder(config), "rollouter")
        self._side = RolloutSide(config, run)
        self._run = run
        self._task: asyncio.Task[None] | None = None
        self._replacer = Replacer()

    async def start(
        self,
        judges: Handles,
        scorers: Handles,
        pools: dict[str, ResourcePool],
    ) -> int:
        config, run = self._side.config, self._run
        return await self._side.start(
            standing_on(config, run, pools, judges, scorers, self._replacer)
        )

    async def begin(
        self, handles: list[ActorHandle], pool: ResourcePool, specs: list[EngineSpec],
        total_steps: int, validators: list[ActorHandle], own: ResourcePool | None,
        go_on: GoOn | None,
    ) -> None:  # fmt: skip
        """`validators` are the engines that only validate, on the pool `own`."""
        handles, validators = list(handles), list(validators)

        async def replace(index: int) -> Engine:
            start = partial(start_engine, specs[index], pool, self._run, named=False)
            return RayEngine(await self._replacer.again(handles, index, pool, start), payloads=True)

        engines = [RayEngine(handle, payloads=True) for handle in handles]
        dedicated = self._dedicated(validators, own)
        core = await self._side.build(engines, total_steps, replace, dedicated, fetched, go_on)
        shorten_collections()
        self._task = asyncio.create_task(core.run())
        await core.running.wait()

    def _dedicated(
        self, handles: list[ActorHandle], pool: ResourcePool | None
    ) -> DedicatedEngines | None:
        if pool is None:
            return None

        async def replace(index: int) -> Engine:
            spec = policy_engine(self._side.config, self._run, index, "validate")
            start = partial(start_engine, spec, pool, self._run, named=False)
            fresh = await self._replacer.again(handles, index, pool, start)
            return RayEngine(fresh, payloads=False)

        return self._side.dedicated([RayEngine(h, payloads=False) for h in handles], replace)

    @property
    def _core(self) -> Rollouter:
        if self._side.core is None:
            raise OffbeatError("the rollouter has not begun")
        return self._side.core

    async def ping(self) -> None:
        """On the loop that does the work: what stands still there is found."""

    async def batch(self, step: int) -> Batch:
        return await self._core.batch(step)

    async def trained(self, step: int, flags: Mapping[int, Flag]) -> Counts:
        return await self._core.trained(step, flags)

    async def published(self, manifest: Manifest) -> int:
        return await self._core.published(manifest)

    async def checkpointed(self, step: int) -> None:
        await self._core.checkpointed(step)

    async def next_step(self) -> int:
        return await self._core.next_step()

    async def redo(self, version: int) -> None:
        await self._core.redo(version)

    async def new_lineage(self) -> int:
        return await self._core.new_lineage()

    async def copy_ledger(self, path: Path) -> None:
        await self._core.copy_ledger(path)

    async def validate(self) -> tuple[int, dict[str, float]]:
        return await self._core.validate()

    async def held_out(self) -> list[GenerateRequest]:
        return await self._core.held_out()

    async def assess(self, answers: Sequence[Completion]) -> dict[str, float]:
        return await self._core.assess(answers)

    async def counts(self) -> Counts:
        return await self._core.counts()

    async def finish(self) -> Counts:
        return await self._core.finish()

    async def drain(self) -> tuple[list[Span], list[SyncReport], Tally]:
        return await self._core.drain()

    async def reward_stats(self) -> Mapping[str, SourceStats]:
        return await self._core.reward_stats()

    async def notices(self) -> list[str]:
        return await self._core.notices()

    async def looks(self, wait_seconds: float = 0.0) -> list[AnchorReport]:
        return await self._core.looks(wait_seconds)

    async def stop(self) -> None:
        if self._task is not None and self._side.core is not None:
            await self._side.core.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await asyncio.gather(self._task, return_exceptions=True)
        await self._side.close()


class RayRollouter:
    """The rollouter as the loop sees it; `again` starts another actor that goes on."""

    def __init__(
        self, handle: ActorHandle, again: Callable[[GoOn], Awaitable[ActorHandle]]
    ) -> None:
        self.handle = handle
        self._again = again

    async def restart(self, version: int, done: int) -> None:
        ray.kill(self.handle)
        self.handle = await self._again(GoOn(version, None, done))

    async def next_step(self) -> int:
        step: int = await of_role("rollouter", self.handle.next_step.remote())
        return step

    async def redo(self, version: int) -> None:
        await of_role("rollouter", self.handle.redo.remote(version))

    async def new_lineage(self) -> int:
        lineage: int = await of_role("rollouter", self.handle.new_lineage.remote())
        return lineage

    async def copy_ledger(self, path: Path) -> None:
        await of_role("rollouter", self.handle.copy_ledger.remote(path))

    async def ping(self) -> None:
        await of_role("rollouter", self.handle.ping.remote())

    async def batch(self, step: int) -> Batch:
        batch: Batch = await of_role("rollouter", self.handle.batch.remote(step))
        return batch

    async def trained(self, step: int, flags: Mapping[int, Flag]) -> Counts:
        counts: Counts = await of_role("rollouter", self.handle.trained.remote(step, dict(flags)))
        return counts

    async def published(self, manifest: Manifest) -> int:
        floor: int = await of_role("rollouter", self.handle.published.remote(manifest))
        return floor

    async def checkpointed(self, step: int) -> None:
        await of_role("rollouter", self.handle.checkpointed.remote(step))

    async def validate(self) -> tuple[int, dict[str, float]]:
        found: tuple[int, dict[str, float]] = await of_role(
            "rollouter", self.handle.validate.remote()
        )
        return found

    async def held_out(self) -> list[GenerateRequest]:
        requests: list[GenerateRequest] = await of_role("rollouter", self.handle.held_out.remote())
        return requests

    async def assess(self, answers: Sequence[Completion]) -> dict[str, float]:
        metrics: dict[str, float] = await of_role(
            "rollouter", self.handle.assess.remote(list(answers))
        )
        return metrics

    async def counts(self) -> Counts:
        counts: Counts = await of_role("rollouter", self.handle.counts.remote())
        return counts

    async def finish(self) -> Counts:
        counts: Counts = await of_role("rollouter", self.handle.finish.remote())
        return counts

    async def drain(self) -> tuple[list[Span], list[SyncReport], Tally]:
        drained: tuple[list[Span], list[SyncReport], Tally] = await of_role(
            "rollouter", self.handle.drain.remote()
        )
        return drained

    async def stop(self) -> None:
        await of_role("rollouter", self.handle.stop.remote())

    async def reward_stats(self) -> Mapping[str, SourceStats]:
        stats: Mapping[str, SourceStats] = await of_role(
            "rollouter", self.handle.reward_stats.remote()
        )
        return stats

    async def notices(self) -> list[str]:
        lines: list[str] = await of_role("rollouter", self.handle.notices.remote())
        return lines

    async def looks(self, wait_seconds: float = 0.0) -> list[AnchorReport]:
        reports: list[AnchorReport] = await of_role(
            "rollouter", self.handle.looks.remote(wait_seconds)
        )
        return reports
