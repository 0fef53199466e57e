"""The client of an external endpoint: the one owner of its retries.

A call is tried 1 + `retries` times. Connection errors, 5xx, unreadable bodies and timeouts are
tried again after a jittered pause. A 429 (or 503 with Retry-After) closes the endpoint to all its
calls until it may be asked again; waiting for that spends no retry, but a patience of
`deadline_seconds` x (1 + `retries`) in all. Each try has the deadline `deadline_seconds`.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from offbeat.config import RewardSourceSection
from offbeat.errors import OffbeatError, UserError

LARGEST_BODY = 1_000_000
"""An answer of more bytes is not a verdict."""

PROBE_SECONDS = 10.0
PAUSE_LIMIT_SECONDS = 8.0
_TOO_LONG = ("context_length_exceeded", "context length", "maximum context", "too long")


class CallFailed(OffbeatError):
    """A call failed for good: the cause as in `Reward.cause`, and the retries it took."""

    def __init__(self, cause: str, reason: str, retries: int = 0) -> None:
        super().__init__(f"{cause}: {reason}")
        self.cause = cause
        self.reason = reason
        self.retries = retries


class _Again(Exception):
    """One try failed in a way that may pass; `after` is the server's own word on when."""

    def __init__(
        self, cause: str, reason: str, after: float | None = None, limited: bool = False
    ) -> None:
        super().__init__(reason)
        self.cause, self.reason, self.after, self.limited = cause, reason, after, limited


class EndpointPool:
    """Calls one OpenAI-compatible server within a limit, with retries, and keeps its peace."""

    def __init__(
        self,
        name: str,
        section: RewardSourceSection,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        pause_seconds: float = 0.5,
    ) -> None:
        """`pause_seconds` is the first pause before a retry; it doubles. Starts nothing."""
        if section.base_url is None:
            raise UserError(f"reward.{name}.base_url is missing; set it, e.g. http://host:8000/v1")
        parts = urlsplit(section.base_urls[0])
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UserError(
                f"reward.{name}.base_url = {section.base_url!r} is not an http address; "
                "write it like http://host:8000/v1"
            )
        bare = parts.netloc.rpartition("@")[2]
        self.address = urlunsplit((parts.scheme, bare, parts.path, "", "")).rstrip("/")
        self._auth = (parts.username, parts.password or "") if parts.username else None
        self._name, self._section, self._transport = name, section, transport
        self._pause = pause_seconds
        self._gate = 0.0
        self._seats = asyncio.Semaphore(section.concurrency)
        self._client: httpx.AsyncClient | None = None
        self._key: str | None = None

    async def start(self) -> list[str]:
        """Opens the client and probes the server; returns its models, raises `UserError`."""
        self._key = self._read_key()
        limit = self._section.concurrency
        self._client = httpx.AsyncClient(
            transport=self._transport,
            auth=self._auth,
            headers={"Authorization": f"Bearer {self._key}"} if self._key else None,
            timeout=self._section.deadline_seconds,
            limits=httpx.Limits(max_connections=limit, max_keepalive_connections=limit),
        )
        try:
            return await self.probe()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Closes the client."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def probe(self) -> list[str]:
        """Asks for `/models` and returns them; raises `UserError` with the address.

        Any answer but a refusal of the key or a 5xx will do: not all servers list models.
        """
        where = f"reward.{self._name}.base_url: {self.address}"
        deadline = min(PROBE_SECONDS, self._section.deadline_seconds)
        problem = ""
        for attempt in range(1 + self._section.retries):
            if attempt:
                await asyncio.sleep(self._jitter(attempt - 1))
            try:
                async with asyncio.timeout(deadline):
                    response = await self._open().get(f"{self.address}/models")
            except TimeoutError:
                problem = f"did not answer within {deadline:g} s"
                continue
            except httpx.HTTPError as error:
                problem = f"does not answer ({type(error).__name__}: {self._clean(str(error))})"
                continue
            if response.status_code in {401, 403}:
                raise UserError(
                    f"{where} refuses the key (HTTP {response.status_code}); "
                    f"set reward.{self._name}.api_key_env to the variable that holds it"
                )
            if response.status_code < 500:
                return _models(response.content)
            problem = f"answers HTTP {response.status_code}"
        raise UserError(f"{where} {problem}; start the server or mend the address")

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[Any, int]:
        """The JSON answer and how many retries it took; raises `CallFailed`."""
        section = self._section
        patience = section.deadline_seconds * (1 + section.retries)
        failures = limits = 0
        async with self._seats:
            while True:
                try:
                    patience -= await self._wait_for_gate(patience, failures + limits)
                    return await self._try(path, body), failures + limits
                except CallFailed as failed:
                    raise CallFailed(failed.cause, failed.reason, failures + limits) from failed
                except _Again as again:
                    if again.limited:
                        self._close_gate(again.after, limits)
                        limits += 1
                        continue
                    if failures == section.retries:
                        raise CallFailed(again.cause, again.reason, failures + limits) from again
                    failures += 1
                    await asyncio.sleep(self._jitter(failures - 1))

    async def _try(self, path: str, body: Mapping[str, Any]) -> Any:
        deadline = self._section.deadline_seconds
        try:
            async with asyncio.timeout(deadline):
                response = await self._open().post(f"{self.address}{path}", json=body)
        except (TimeoutError, httpx.TimeoutException) as error:
            reason = f"{self.address} did not answer within {deadline:g} s"
            raise _Again("timeout", reason) from error
        except httpx.HTTPError as error:
            reason = f"{self.address}: {type(error).__name__}: {self._clean(str(error))}"
            raise _Again("unavailable", reason) from error
        self._check(response)
        if len(response.content) > LARGEST_BODY:
            raise CallFailed("unparseable", f"an answer of {len(response.content)} bytes")
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError) as error:
            raise _Again("bad_response", f"{self.address}: not JSON") from error

    def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if status < 300:
            return
        text = self._clean(response.content[:2000].decode("utf-8", "replace"))
        reason = f"{self.address}: HTTP {status}: {text[:300]}"
        after = retry_after(response.headers.get("retry-after"))
        if status == 429 or (status == 503 and after is not None):
            raise _Again("rate_limited", reason, after, limited=True)
        if status >= 500 or status in {408, 409, 425}:
            raise _Again("unavailable", reason)
        if status in {400, 413, 422} and any(mark in text.lower() for mark in _TOO_LONG):
            raise CallFailed("too_long", reason)
        raise CallFailed("refused", reason)

    def _close_gate(self, after: float | None, times: int) -> None:
        pause = self._jitter(times) if after is None else after
        self._gate = max(self._gate, time.monotonic() + pause)

    async def _wait_for_gate(self, patience: float, retries: int) -> float:
        """Waits until the endpoint may be asked; returns the seconds waited."""
        waited = 0.0
        while (left := self._gate - time.monotonic()) > 0:
            if waited + left > patience:
                reason = f"{self.address} may not be asked for another {left:.1f} s"
                raise CallFailed("rate_limited", reason, retries)
            pause = left + random.uniform(0, min(0.2, 0.1 * left))
            await asyncio.sleep(pause)
            waited += pause
        return waited

    def _jitter(self, times: int) -> float:
        return min(PAUSE_LIMIT_SECONDS, self._pause * 2.0**times) * random.uniform(0.5, 1.0)

    def _read_key(self) -> str | None:
        variable = self._section.api_key_env
        if variable is None:
            return None
        key = os.environ.get(variable, "").strip()
        if not key:
            raise UserError(
                f"reward.{self._name}.api_key_env: the environment variable {variable} is not set"
                "; export it with the server's key"
            )
        return key

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            raise CallFailed("unavailable", f"the client of {self.address} is not started")
        return self._client

    def _clean(self, text: str) -> str:
        """Text without the key, should a server echo it."""
        return text.replace(self._key, "***") if self._key else text


def _models(body: bytes) -> list[str]:
    try:
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def retry_after(header: str | None) -> float | None:
    """Seconds of a Retry-After header, a number or a date; None where it says nothing."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return seconds if 0 <= seconds < float("inf") else 0.0
