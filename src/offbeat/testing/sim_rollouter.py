"""The real rollouter, its books and its reward loop as a process that can die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from offbeat.errors import RunFailed
from offbeat.ledger import Counts, Flag, Row
from offbeat.records import Batch, Completion, GenerateRequest, Manifest, PolicyVersion, Span
from offbeat.reward.anchors import AnchorReport
from offbeat.reward.loop import RewardLoop, SourceStats
from offbeat.rollout.books import Books
from offbeat.rollout.parts import Tally
from offbeat.rollout.rollouter import Rollouter
from offbeat.testing.memory_store import MemoryStore
from offbeat.testing.sim_engine import SimEngine, replaced
from offbeat.testing.sim_rewards import SimSource
from offbeat.testing.sim_world import Process, World
from offbeat.weights.sync import SyncReport

T = TypeVar("T")
BALANCED_EVERY = 8  # puts, between two looks at the counts, beside those of every step


class SimRollouter:
    """The rollouter as the loop sees it; `begin` starts the process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.process = Process(world, "rollouter")
        self.sources: list[SimSource] = []
        self._store: MemoryStore | None = None
        self._books: Books | None = None
        self._puts = 0

    async def begin(self, version: int, done: int | None = None, *, resumed: bool) -> None:
        """As `RolloutSide.build`, over the engines that live and replacements of the others."""
        world = self.world
        self.process, self._books = Process(world, "rollouter"), None
        self._store = store = MemoryStore(world.tables, world.commit_seconds, self._seen)
        books = Books(store, world.config.train, world.prompts.prompt, self._read)
        restored = None
        if done is None:
            await asyncio.wrap_future(store.put_meta("lineage", str(world.lineage)))
        if resumed:
            restored = books.restore(version, done)
        self._books = books
        sources = {name: SimSource(world, name) for name in world.config.active_rewards}
        self.sources = list(sources.values())
        for index, engine in enumerate(world.engines):
            if engine.death is not None:
                world.engines[index] = SimEngine(world, index, -1)
        world.core = core = Rollouter(
            world.config,
            prompts=world.prompts,
            engines=list(world.engines),
            rewards=await RewardLoop.create(sources, world.config.active_rewards),
            books=books,
            version=PolicyVersion(world.lineage, 0),
            total_steps=world.shape.steps,
            replace=lambda index: replaced(world, index),
            restored=restored,
        )
        self.process.serve(core.run())
        await core.running.wait()

    def kill(self) -> None:
        """The process ends, and what was not committed is lost."""
        self.process.kill()
        if self._store is not None:
            self._store.crash()
        self.world.promises.crashed(self.world.tables.groups)

    def end(self) -> None:
        """Ends it well: what is booked is committed."""
        if self._store is not None and self.process.alive:
            self._store.close()

    async def restart(self, version: int, done: int) -> None:
        """See `RollouterRole.restart`."""
        self.kill()
        await asyncio.sleep(self.world.rng.uniform(0.2, 1.0))
        await self.begin(version, done, resumed=True)

    async def batch(self, step: int) -> Batch:
        """See `RollouterRole.batch`."""
        return await self._ask("batch", lambda core: core.batch(step), twice=0.02)

    async def trained(self, step: int, flags: Mapping[int, Flag]) -> Counts:
        """See `RollouterRole.trained`."""
        counts = await self._ask("trained", lambda core: core.trained(step, flags), twice=0.02)
        self._balance()
        return counts

    async def published(self, manifest: Manifest) -> int:
        """See `RollouterRole.published`."""
        return await self._ask("published", lambda core: core.published(manifest))

    async def checkpointed(self, step: int) -> None:
        """See `RollouterRole.checkpointed`."""
        await self._ask("checkpointed", lambda core: core.checkpointed(step), twice=0.05)

    async def validate(self) -> tuple[int, dict[str, float]]:
        """See `RollouterRole.validate`."""
        return await self._ask("validate", lambda core: core.validate())

    async def held_out(self) -> list[GenerateRequest]:
        """See `RollouterRole.held_out`."""
        return await self._ask("held_out", lambda core: core.held_out())

    async def assess(self, answers: Sequence[Completion]) -> dict[str, float]:
        """See `RollouterRole.assess`."""
        return await self._ask("assess", lambda core: core.assess(answers))

    async def counts(self) -> Counts:
        """See `RollouterRole.counts`."""
        return await self._ask("counts", lambda core: core.counts())

    async def finish(self) -> Counts:
        """See `Rollouter.finish`."""
        return await self._ask("finish", lambda core: core.finish(), twice=0.05)

    async def reward_stats(self) -> Mapping[str, SourceStats]:
        """See `RollouterRole.reward_stats`."""
        return await self._ask("stats", lambda core: core.reward_stats())

    async def notices(self) -> list[str]:
        """See `RollouterRole.notices`."""
        return await self._ask("notices", lambda core: core.notices())

    async def looks(self, wait_seconds: float = 0.0) -> list[AnchorReport]:
        """See `RollouterRole.looks`."""
        return await self._ask("looks", lambda core: core.looks(wait_seconds))

    async def drain(self) -> tuple[list[Span], list[SyncReport], Tally]:
        """See `RollouterRole.drain`."""
        return await self._ask("drain", lambda core: core.drain())

    async def next_step(self) -> int:
        """See `RollouterRole.next_step`."""
        return await self._ask("next_step", lambda core: core.next_step())

    async def redo(self, version: int) -> None:
        """See `RollouterRole.redo`."""
        await self._ask("redo", lambda core: core.redo(version))

    async def new_lineage(self) -> int:
        """See `RollouterRole.new_lineage`."""
        return await self._ask("new_lineage", lambda core: core.new_lineage())

    async def copy_ledger(self, path: Path) -> None:
        """See `RollouterRole.copy_ledger`."""
        await self._ask("copy_ledger", lambda core: core.copy_ledger(path))

    async def ping(self) -> None:
        """See `RollouterRole.ping`."""
        await self._ask("ping", lambda core: core.ping())

    async def stop(self) -> None:
        """See `RollouterRole.stop`."""
        await self._ask("stop", lambda core: core.stop())

    async def _ask(
        self, what: str, work: Callable[[Rollouter], Coroutine[Any, Any, T]], twice: float = 0.0
    ) -> T:
        core = self.world.core
        if core is None:
            raise RunFailed("the rollouter has not begun")
        process = self.process
        try:
            return await process.ask(what, lambda: work(core), twice)
        finally:
            if not process.alive and process is self.process:
                self.kill()

    def _seen(self, rows: list[Row]) -> None:
        """Every put of the books comes by here."""
        self.world.promises.put(rows)
        self._puts += 1
        if self._puts % BALANCED_EVERY == 0:
            self._balance()

    def _balance(self) -> None:
        books = self._books
        if books is not None and self.process.alive:
            buffer = books.buffer
            self.world.promises.balance(books.ledger.counts(), buffer.live(), buffer.max_live)

    async def _read(self, work: Callable[..., T], /, *args: Any) -> T:
        """What `Books` reads takes a while, and no thread."""
        await asyncio.sleep(self.world.rng.uniform(0.001, 0.02))
        return work(*args)
