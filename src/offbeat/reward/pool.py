"""The pool of external servers behind one source: the one owner of its calls' retries.

```
 post ──► waiting line ──► least outstanding of the servers that may be asked ──► one try
               ▲                                                                     │
               └── another server, a pause, or the end of the outage ◄── it failed ──┘
```

A server may be asked while its circuit breaker is closed, it has a seat (`AdaptiveLimit`, up to
`concurrency`), and its limiter lets another call go (`Retry-After`, requests and tokens a minute).
A call is tried 1 + `retries` times, each within `deadline_seconds`. Before a timeout or a 5xx
counts as one of them the server's health is asked for: what was an outage is the server's, so the
call waits for a server and spends no retry. Neither does it for a connection that broke, nor for a
429. A server that is out is asked for its health until it is well, then gets one call as a trial.

While no server is well, calls wait, `patience_seconds` from the moment the last one went
(`down_since`), and a little longer, so that whoever watches can end the run before a sample is
lost.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
from collections.abc import Mapping
from typing import Any

import httpx

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.reward.endpoints import Again, CallFailed, Endpoint, retry_after
from offbeat.reward.health import Health
from offbeat.reward.token_cost import estimate, spent
from offbeat.reward.waiting_line import PendingCall, WaitingLine

__all__ = ["CallFailed", "EndpointPool", "retry_after"]

PAUSE_LIMIT_SECONDS = 8.0
OUTAGES_A_CALL = 3
"""A call that meets more outages than this, or broken connections, is likelier what brings servers
down than a victim: what it meets then counts against its retries."""
GRACE_SECONDS = 2.0
GRANTS_A_TURN = 16
"""Calls begun in one turn of the event loop, so that a thousand at once do not stop it."""


class EndpointPool:
    """Calls one or several OpenAI-compatible servers within their limits, and heals."""

    def __init__(
        self,
        name: str,
        section: RewardSourceSection,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        pause_seconds: float = 0.5,
    ) -> None:
        """`pause_seconds` is the first pause before a retry; it doubles. Starts nothing."""
        if not section.base_urls:
            raise UserError(f"reward.{name}.base_url is missing; set it, e.g. http://host:8000/v1")
        self._name, self._section, self._pause = name, section, pause_seconds
        self._endpoints = [
            Endpoint(
                name, url, deadline_seconds=section.deadline_seconds,
                concurrency=section.concurrency, transport=transport,
            )
            for url in dict.fromkeys(section.base_urls)
        ]  # fmt: skip
        self.addresses = tuple(endpoint.address for endpoint in self._endpoints)
        """The servers' addresses, without user and password."""
        self.address = ", ".join(self.addresses)
        self._models: dict[str, dict[str, Any]] = {}
        self._health = Health(
            name, self._endpoints, pause_seconds=pause_seconds, on_change=self._kick
        )
        self._line = WaitingLine()
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = True
        self._counts = dict.fromkeys(
            ("calls", "retries", "rate_limited", "prompt_tokens", "completion_tokens"), 0
        )

    @property
    def down_since(self) -> float | None:
        """Since when (the event loop's time) no server can be asked; None while one can."""
        return self._health.down_since

    def facts(self) -> dict[str, float]:
        """Running numbers for metrics; counts are since the start.

        `limit` is how many calls may be under way at once, over the servers that are up.
        """
        up = [e for e in self._endpoints if e.breaker.state == "closed"]
        return {
            "limit": float(sum(endpoint.adaptive.limit for endpoint in up)),
            "outstanding": float(sum(endpoint.outstanding for endpoint in self._endpoints)),
            "waiting": float(len(self._line)),
            "servers": float(len(self._endpoints)),
            "servers_up": float(len(up)),
            **{name: float(count) for name, count in self._counts.items()},
        }

    # -- start and stop --------------------------------------------------------------------------

    async def start(self) -> list[str]:
        """Asks all servers; returns the models that all of them list.

        One of several that does not answer is said and asked again later; `UserError` if none does.
        """
        key = read_key(self._name, self._section)
        tls = await asyncio.to_thread(httpx.create_ssl_context)
        section = self._section
        self._stopped = False
        for endpoint in self._endpoints:
            endpoint.start(key, tls)
            endpoint.limiter.join(
                self, section.requests_per_minute, section.tokens_per_minute, self._kick, _now()
            )
        try:
            self._models = await self._health.start(section.retries)
        except BaseException:
            await self.stop()
            raise
        return list(self._models)

    async def stop(self) -> None:
        """Ends all that waits or heals, and closes the connections."""
        self._stopped = True
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        self._soon = self._timer = None
        await self._health.stop()
        self._line.fail_all(CallFailed("unavailable", "the source was stopped"))
        for endpoint in self._endpoints:
            endpoint.limiter.leave(self, _now())
            await endpoint.stop()

    def described(self, model: str) -> dict[str, Any]:
        """What the servers say of a model that all of them list; empty for another one.

        What they say differently is a list.
        """
        return dict(self._models.get(model, {}))

    # -- one call --------------------------------------------------------------------------------

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[Any, int]:
        """The JSON answer and how many retries it took; raises `CallFailed`."""
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        call = PendingCall(estimate(body))
        while True:
            endpoint = await self._seat(call)
            began = _now()
            try:
                answer = await endpoint.attempt(path, content)
                self._answered(endpoint, call, began, answer)
                return answer, call.retries
            except Again as again:
                await self._learn(endpoint, call, began, again)
                pause = self._once_more(endpoint, call, began, again)
            except CallFailed as failed:  # the server's last word
                endpoint.breaker.succeeded(call.trial, _now())
                raise CallFailed(failed.cause, failed.reason, call.retries) from failed
            finally:
                endpoint.breaker.let_go(call.trial)
                endpoint.outstanding -= 1
                self._health.note()
            if pause:
                await asyncio.sleep(pause)

    async def _seat(self, call: PendingCall) -> Endpoint:
        """The server to ask, with a seat taken there; waits for one."""
        if self._stopped:
            raise CallFailed("unavailable", "the source is not started", call.retries)
        self._line.add(call)
        self._kick()
        try:
            return await call.turn
        except asyncio.CancelledError:
            if call.turn.done() and not call.turn.cancelled() and not call.turn.exception():
                endpoint = call.turn.result()
                endpoint.breaker.let_go(call.trial)
                endpoint.outstanding -= 1
                endpoint.limiter.unsent(call.cost, _now())
            self._kick()
            raise
        except CallFailed as failed:  # one error may end many calls
            raise CallFailed(failed.cause, failed.reason, call.retries) from failed
        finally:
            self._line.drop(call)

    def _answered(self, endpoint: Endpoint, call: PendingCall, began: float, answer: Any) -> None:
        now = _now()
        endpoint.breaker.succeeded(call.trial, now)
        endpoint.adaptive.succeeded(began, now)
        endpoint.limited_on_end = 0
        prompt, completion = spent(answer, call.cost)
        endpoint.limiter.settle(call.cost, prompt + completion, now)
        self._counts["calls"] += 1
        self._counts["prompt_tokens"] += prompt
        self._counts["completion_tokens"] += completion

    async def _learn(
        self, endpoint: Endpoint, call: PendingCall, began: float, again: Again
    ) -> None:
        """What a failed try says of the server; asks for its health where that is in doubt."""
        now, breaker = _now(), endpoint.breaker
        if again.overload:
            endpoint.adaptive.overloaded(began, now)
        elif again.cause == "timeout":
            endpoint.adaptive.timed_out(began, now)
        if again.limited:
            self._counts["rate_limited"] += 1
            endpoint.limited(began, now, again.after, self._jitter)
            endpoint.limiter.settle(call.cost, 0.0, now)
            breaker.succeeded(call.trial, now)
        elif again.unwell:
            endpoint.problem = again.reason
            await self._health.check(endpoint)
            breaker.failed(call.trial, began, _now())
        elif again.elsewhere:
            endpoint.problem = again.reason
            breaker.failed(call.trial, began, now)
        else:
            breaker.succeeded(call.trial, now)

    def _once_more(
        self, endpoint: Endpoint, call: PendingCall, began: float, again: Again
    ) -> float:
        """The pause before the call is asked again; raises `CallFailed` if it is not."""
        failed = CallFailed(again.cause, again.reason, call.retries)
        pause = 0.0
        if again.limited:
            if call.limited_since is None:
                call.limited_since = began
            if _now() - call.limited_since > self._section.patience_seconds:
                raise failed from again
            call.limits += 1
        elif again.elsewhere and len(self._endpoints) == 1:
            raise failed from again
        elif self._is_excused(endpoint, call, began, again):
            pause = 0.0 if endpoint.breaker.excuses(began) else self._jitter(call.outages)
            call.outages += 1
        elif call.failures < self._section.retries:
            pause = self._jitter(call.failures)
            call.failures += 1
        else:
            raise failed from again
        self._counts["retries"] += 1
        call.avoid = endpoint
        return pause

    def _is_excused(
        self, endpoint: Endpoint, call: PendingCall, began: float, again: Again
    ) -> bool:
        """Whether a failure is the server's or the network's, and not one of the call's tries."""
        outage = again.broke or (again.unwell and endpoint.breaker.excuses(began))
        return outage and call.outages < OUTAGES_A_CALL

    def _jitter(self, times: int) -> float:
        return min(PAUSE_LIMIT_SECONDS, self._pause * 2.0**times) * random.uniform(0.5, 1.0)

    # -- whose turn it is ------------------------------------------------------------------------

    def _kick(self) -> None:
        """Looks at the waiting line in the loop's next turn."""
        if self._soon is None and not self._stopped:
            self._soon = asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Gives seats to calls that wait, some a turn of the loop; else looks when one is free."""
        self._soon, now = None, _now()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._line:
            self._health.trust()
            return
        until = self._give_up(now)
        for _ in range(GRANTS_A_TURN):
            at = self._grant(now)
            if at is not None:
                until = min(until, at)
                break
        else:
            self._kick()
            return
        if until < math.inf:
            self._timer = asyncio.get_running_loop().call_at(until, self._kick)

    def _grant(self, now: float) -> float | None:
        """Gives one seat; if there is none to give, when there will be (infinity: unknown)."""
        free = [endpoint for endpoint in self._endpoints if endpoint.seat]
        until = math.inf
        for call in self._line:
            if not free:
                break
            if call.turn.done():  # it was cancelled in this turn of the loop
                continue
            options = self._options(call, free, now)
            times = [(e.limiter.ready_at(self, call.cost, now), e) for e in options]
            ready = [endpoint for at, endpoint in times if at <= now]
            if ready:
                random.shuffle(ready)
                chosen = min(ready, key=lambda endpoint: endpoint.outstanding)
                chosen.limiter.take(self, call.cost, now)
                chosen.outstanding += 1
                call.trial = chosen.breaker.began()
                self._line.drop(call)
                call.turn.set_result(chosen)
                return None
            until = min([until, *(at for at, _ in times)])
            free = [endpoint for endpoint in free if endpoint not in options]  # its turn is first
        return until

    def _options(self, call: PendingCall, free: list[Endpoint], now: float) -> list[Endpoint]:
        """The servers that may have this call: another one than failed it, if there is one.

        A trial is rather made with a call that has not met an outage yet.
        """
        elsewhere = any(e is not call.avoid and e.serves(now) for e in self._endpoints)
        return [
            endpoint
            for endpoint in free
            if not (elsewhere and endpoint is call.avoid)
            and not (call.outages and self._line.has_fresh and endpoint.breaker.state != "closed")
        ]

    def _give_up(self, now: float) -> float:
        """Fails all that wait if there is nobody to wait for; returns when that will be."""
        patience = self._section.patience_seconds
        down_since = self._health.down_since
        if down_since is not None:
            until = down_since + patience + GRACE_SECONDS
            if now >= until:
                told = "; ".join(f"{e.address}: {e.problem}" for e in self._endpoints)
                reason = f"no server answers for {now - down_since:.0f} s ({told})"
                self._line.fail_all(CallFailed("unavailable", reason))
            return until
        well = [e for e in self._endpoints if e.breaker.state == "closed"]
        opens = min(endpoint.limiter.closed_until for endpoint in well)
        if opens - now > patience:
            reason = f"{self.address} may not be asked for another {opens - now:.0f} s"
            self._line.fail_all(CallFailed("rate_limited", reason))
        return math.inf


def read_key(name: str, section: RewardSourceSection) -> str | None:
    """The servers' key, if the section names a variable; raises `UserError` where it holds none."""
    variable = section.api_key_env
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"reward.{name}.api_key_env: the environment variable {variable} is not set"
            "; export it with the server's key"
        )
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"reward.{name}.api_key_env: the environment variable {variable} holds "
            "characters that no key has; export it again"
        )
    return key


def _now() -> float:
    return asyncio.get_running_loop().time()
