"""Which servers of a pool are out, and their way back.

Invariant: before a failed connection, a timeout or a 5xx counts against a call, its server was
asked for its health (`check`, once for all calls that fail together). A server that is out is asked
again with growing pauses until it is well; then one call tries it, and its success lets the others
follow, few at first: a server that has just started takes no more, and a text that brings it down
takes few others with it. `down_since` is set exactly while no server's breaker is closed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from offbeat.errors import UserError
from offbeat.reward.endpoints import Endpoint, Unwell

HEALTH_LIMIT_SECONDS = 5.0
"""Between two looks at a server that is out, at most."""

log = logging.getLogger(__name__)


class Health:
    """Watches the servers of one source; `on_change` is called when calls may go on."""

    def __init__(
        self,
        source: str,
        endpoints: Sequence[Endpoint],
        *,
        pause_seconds: float,
        on_change: Callable[[], None],
    ) -> None:
        """`pause_seconds` is the first pause before a server that is out is asked again."""
        self._source, self._endpoints = source, endpoints
        self._pause, self._on_change = pause_seconds, on_change
        self._stopped = True
        self.down_since: float | None = None
        """Since when (the event loop's time) no server is well."""

    async def start(self, retries: int) -> dict[str, dict[str, Any]]:
        """Asks all servers; returns the models that all of them list, by name, with what they say.

        One that does not answer is said and asked again later, as long as another one answers;
        raises `UserError` if none does.
        """
        self._stopped, self.down_since = False, None
        found = await asyncio.gather(*(self._first(e, retries) for e in self._endpoints))
        listed = [models for models in found if models]
        if all(models is None for models in found):
            raise UserError(self._nobody())
        for endpoint, models in zip(self._endpoints, found, strict=True):
            endpoint.health_pause = self._pause
            if models is None:
                endpoint.breaker.open(_now())
        self.note()
        return {
            name: _common([models[name] for models in listed])
            for name in (listed[0] if listed else ())
            if all(name in models for models in listed)
        }

    async def stop(self) -> None:
        """Ends what is under way."""
        self._stopped, self.down_since = True, None
        tasks = [t for e in self._endpoints for t in (e.checking, e.healing) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def check(self, endpoint: Endpoint) -> None:
        """After a failed call: takes the server out if it does not say that it is well."""
        if self._stopped or endpoint.breaker.state != "closed":
            return
        if endpoint.checking is None:
            endpoint.checking = asyncio.create_task(
                self._ask(endpoint), name=f"reward/{self._source}/health"
            )
        await asyncio.wait([endpoint.checking])

    def trust(self) -> None:
        """No call waits: a server that seems well, and waits for one to try it, is well."""
        for endpoint in self._endpoints:
            if endpoint.breaker.state == "half_open" and endpoint.breaker.passes:
                endpoint.breaker.close(_now())
                self.note()

    def note(self) -> None:
        """After whatever a breaker was told: says what changed, heals, and lets calls go on."""
        if self._stopped:
            return
        now = _now()
        up = any(endpoint.breaker.state == "closed" for endpoint in self._endpoints)
        for endpoint in self._endpoints:
            breaker, where = endpoint.breaker, f"reward/{self._source}: {endpoint.address}"
            if breaker.state == "closed" and endpoint.out_since is not None:
                log.warning("%s is back after %.0f s", where, now - endpoint.out_since)
                endpoint.out_since, endpoint.health_pause = None, self._pause
                endpoint.adaptive.restart(now)
            elif breaker.since is not None and endpoint.out_since is None:
                then = "its calls go to the others" if up else "calls wait until one is back"
                log.warning("%s is out (%s); %s", where, endpoint.problem, then)
                endpoint.out_since = breaker.since
            if breaker.state == "open" and endpoint.healing is None:
                endpoint.healing = asyncio.create_task(
                    self._heal(endpoint), name=f"reward/{self._source}/heal"
                )
        if up:
            self.down_since = None
        elif self.down_since is None:
            self.down_since = now
        self._on_change()

    async def _first(self, endpoint: Endpoint, retries: int) -> dict[str, dict[str, Any]] | None:
        """The models of a server; None, and its problem noted, if it answers no try."""
        pause = self._pause
        for attempt in range(1 + retries):
            if attempt:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(HEALTH_LIMIT_SECONDS, 2 * pause)
            try:
                return await endpoint.probe()
            except Unwell as unwell:
                endpoint.problem = str(unwell)
        return None

    def _nobody(self) -> str:
        key = f"reward.{self._source}.base_url"
        told = "; ".join(f"{e.address} {e.problem}" for e in self._endpoints)
        if len(self._endpoints) == 1:
            return f"{key}: {told}; start the server or mend the address"
        return f"{key}: no server answers: {told}; start one of them or mend the addresses"

    async def _ask(self, endpoint: Endpoint) -> None:
        try:
            if not await self._well(endpoint):
                endpoint.breaker.open(_now())
        finally:
            endpoint.checking = None
        self.note()

    async def _heal(self, endpoint: Endpoint) -> None:
        """Asks a server that is out until it is well; then a call may try."""
        try:
            well = False
            while not well:
                await asyncio.sleep(endpoint.health_pause * random.uniform(0.5, 1.0))
                endpoint.health_pause = min(HEALTH_LIMIT_SECONDS, 2 * endpoint.health_pause)
                well = await self._well(endpoint)
        finally:
            endpoint.healing = None
        endpoint.breaker.half_open()
        self.note()

    async def _well(self, endpoint: Endpoint) -> bool:
        """Whether a server answers; its problem is noted if it does not."""
        try:
            await endpoint.probe()
        except UserError:
            return True  # it refuses the key, so it is there
        except Exception as error:  # boundary: whatever it is, it is not well
            endpoint.problem = str(error) or type(error).__name__
            return False
        return True


def _common(described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What several servers say of a model; where they differ, all that they say."""
    names = dict.fromkeys(name for said in described for name in said)
    common = {}
    for name in names:
        values = [said.get(name) for said in described]
        common[name] = values[0] if all(value == values[0] for value in values) else values
    return common


def _now() -> float:
    return asyncio.get_running_loop().time()
