"""Simulated engines: heavy-tailed, they die, hang, answer twice, late, and after their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Literal

import numpy as np

from offbeat.errors import RequestRefused
from offbeat.records import (
    Completion,
    EngineHealth,
    GenerateRequest,
    Manifest,
    Payload,
    PolicyVersion,
    Progress,
    Span,
)
from offbeat.rollout.engine import Engine
from offbeat.testing.sim_world import World

LOGPROBS = np.zeros(2, np.float32)
Death = Literal["raises", "hangs", "goes on"]
DEATHS: tuple[Death, ...] = ("raises", "hangs", "goes on")
Due = tuple[float, int, str]  # seconds from the start, index, what comes


class SimEngine:
    """One engine of two tokens a sample: the first is made at once, the last when it ends."""

    def __init__(self, world: World, index: int, acknowledged: int) -> None:
        """`acknowledged`: the step that it may be asked with from the start, -1 for none."""
        self.world, self.index = world, index
        self.held = PolicyVersion(world.lineage, 0)
        self.acknowledged = acknowledged
        self.death: Death | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Nothing is to be loaded."""

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Completion | Progress, None]:
        """See `Engine.generate`."""
        world = self.world
        ordinal, attempt = (int(part) for part in request.request_id.split("."))
        self._asked(request.request_id, ordinal, attempt)
        if world.shape.trouble and (ordinal * 2654435761 + world.seed) % 4096 < 4:
            raise RequestRefused("this prompt is too long")
        if world.chance(0.002):
            asyncio.get_running_loop().call_later(world.sample_seconds(), self.die)
        begun = {index: int(ref.versions[0]) for index, ref in request.resume}
        first = self.held.step
        if attempt and world.chance(0.5):  # of an attempt that was given up
            yield self._completion(f"{ordinal}.{attempt - 1}", 0, ordinal, attempt - 1, first, 2)
        now = 0.0
        for at, index, what in self._plan(request):
            if at > now:
                await asyncio.sleep(at - now)
                now = at
            await self._lives()
            oldest = begun.get(index, first)
            if what == "fails":
                raise ConnectionError("a request has failed")
            if what == "hangs":
                await asyncio.Event().wait()
            if what == "begun":
                ref = Payload(np.array([ordinal], np.int32), LOGPROBS[:1], _versions(oldest))
                yield Progress(request.request_id, index, 1, ref)
            elif what == "aborted":
                yield self._completion(request.request_id, index, ordinal, attempt, oldest, 1)
            else:
                yield self._completion(request.request_id, index, ordinal, attempt, oldest, 2)

    def _plan(self, request: GenerateRequest) -> list[Due]:
        """What comes when."""
        world = self.world
        due: list[Due] = []
        left = [index for index in range(request.n) if index not in request.done]
        for index in left:
            at = world.sample_seconds()
            due.append((at, index, "ended"))
            if request.snapshot_every and world.chance(0.3):
                due.append((at * world.rng.random(), index, "begun"))
            if world.chance(0.05):
                due.append((at + world.rng.choice((0.0, 0.1, 1.0)), index, "ended"))
            if world.chance(0.002):
                due[-1] = (at, index, "aborted")
        due.sort()
        if world.chance(0.02):
            place = world.rng.randrange(len(due) + 1)
            at = due[place - 1][0] if place else 0.0
            due[place:] = [(at, 0, world.rng.choice(("fails", "fails", "hangs", "")))]
            if not due[-1][2]:
                due.pop()  # the stream ends early
        return due

    def _completion(
        self, request_id: str, index: int, ordinal: int, attempt: int, oldest: int, tokens: int
    ) -> Completion:
        ids = np.array([ordinal, attempt], np.int32)[:tokens]
        newest = max(oldest, self.held.step)
        versions = _versions(oldest, newest)[:tokens]
        finish: Literal["stop", "aborted"] = "stop" if tokens == 2 else "aborted"
        payload = Payload(ids, LOGPROBS[:tokens], versions)
        return Completion(request_id, index, "x", tokens, oldest, newest, finish, payload)

    async def load(self, manifest: Manifest) -> PolicyVersion:
        """See `Engine.load`. Loads come one after another, and go on if nobody waits."""
        core = self.world.core
        assert core is not None
        replica = core.replicas[self.index]
        counted = not replica.has_left(self)
        if counted:
            self.world.promises.load_begins(manifest.version)
        try:
            version = await asyncio.shield(self.world.spawn(self._load(manifest)))
        finally:
            if counted:
                self.world.promises.load_ends(manifest.version)
        self.acknowledged = version.step
        return version

    async def _load(self, manifest: Manifest) -> PolicyVersion:
        world = self.world
        async with self._turn:
            await asyncio.sleep(world.rng.uniform(0.01, 0.1))
            await self._lives()
            if world.chance(0.002):
                raise OSError("a file could not be read")
            if world.chance(0.002):  # past its deadline
                await asyncio.sleep(world.rng.uniform(1.0, 8.0))
            self.held = manifest.version
            world.promises.event(f"engine {self.index} holds {self.held}")
            if world.chance(0.002):
                raise ConnectionError("loaded, and the answer is lost")
            return self.held

    async def health(self) -> EngineHealth:
        """See `Engine.health`; now and then a false alarm."""
        if self.death == "hangs":
            await asyncio.Event().wait()
        if self.death is not None or self.world.chance(0.02):
            raise ConnectionError("the engine has ended")
        return EngineHealth(self.held, 0, 0, 64)

    def die(self, how: Death | None = None) -> None:
        """From now on it answers nothing, or as one that does not know that it is dead."""
        if self.death is None:
            self.death = how or self.world.rng.choice(DEATHS)
            self.world.promises.event(f"engine {self.index} dies, {self.death}")

    async def drain_spans(self) -> list[Span]:
        """It tells nothing."""
        return []

    async def stop(self) -> None:
        """Its process ends."""
        self.die("raises")

    async def _lives(self) -> None:
        if self.death == "hangs":
            await asyncio.Event().wait()
        if self.death == "raises":
            raise ConnectionError("the engine has ended")

    def _asked(self, name: str, ordinal: int, attempt: int) -> None:
        world = self.world
        core = world.core
        assert core is not None
        floor, left = core.sync.floor, core.replicas[self.index].has_left(self)
        world.promises.asked(f"engine {self.index}", self.acknowledged, floor, not left)
        kept = world.tables.payloads.get(ordinal)
        world.promises.generated_again(name, None if kept is None else kept.attempt, attempt)


async def replaced(world: World, index: int) -> Engine:
    """Ends engine `index` and starts another, which may take several tries."""
    await world.engines[index].stop()
    await asyncio.sleep(world.rng.uniform(0.2, 2.0))
    if world.chance(0.05):
        raise ConnectionError("no device is free")
    if world.chance(0.01):
        await asyncio.Event().wait()
    world.engines[index] = SimEngine(world, index, -1 if world.resumed else 0)
    return world.engines[index]


def _versions(*steps: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(steps, np.int32)
