"""One OpenAI-compatible server: its connections, one try of a call, and how it is.

An `Endpoint` tries once and says what came of it. Whether and when to try again, and where, is
`pool.EndpointPool`'s.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import ssl
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from offbeat import __version__
from offbeat.errors import OffbeatError, UserError
from offbeat.reward.breaker import AdaptiveLimit, Breaker
from offbeat.reward.connections import transport_to
from offbeat.reward.limiter import shared_limiter

LARGEST_BODY = 1_000_000
"""An answer of more bytes is not a verdict."""
PROBE_SECONDS = 10.0
SHORTEST_PROBE_SECONDS = 2.0
_TOO_LONG = ("context_length_exceeded", "context length", "maximum context", "too long")
_OF_THE_SERVER = frozenset({401, 402, 403, 404, 405, 501})
"""Refusals that another server need not share: its key, its models, its routes."""
_HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
    "User-Agent": f"offbeat/{__version__}",
}


class CallFailed(OffbeatError):
    """A call failed for good: the cause as in `Reward.cause`, and the retries it took."""

    def __init__(self, cause: str, reason: str, retries: int = 0) -> None:
        super().__init__(f"{cause}: {reason}")
        self.cause = cause
        self.reason = reason
        self.retries = retries


class Again(Exception):
    """One try failed in a way that may pass, or that another server need not share.

    `unwell` is what may be an outage: no connection, no answer in time, a broken server; `broke`
    says that it was the connection. `overload` is a server's word that it has too much to do.
    `limited` closes the server until `after` seconds have passed (None: it did not say);
    `elsewhere` is worth another server only.
    """

    def __init__(
        self,
        cause: str,
        reason: str,
        *,
        unwell: bool = False,
        broke: bool = False,
        overload: bool = False,
        limited: bool = False,
        after: float | None = None,
        elsewhere: bool = False,
    ) -> None:
        super().__init__(reason)
        self.cause, self.reason, self.after = cause, reason, after
        self.unwell, self.broke, self.overload = unwell, broke, overload
        self.limited, self.elsewhere = limited, elsewhere


class Unwell(Exception):
    """A server that does not answer, or only says that it is broken: what it did."""


class Endpoint:
    """One server. The pool keeps `breaker`, `adaptive`, `outstanding` and `checking`."""

    def __init__(
        self,
        source: str,
        url: str,
        *,
        deadline_seconds: float,
        concurrency: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Starts nothing. Raises `UserError` if `url` is no address."""
        try:
            httpx.URL(url)
            parts = urlsplit(url)
            usable = parts.scheme in {"http", "https"} and bool(parts.hostname)
        except (httpx.InvalidURL, ValueError):
            usable = False
        if not usable:
            raise UserError(
                f"reward.{source}.base_url = {url!r} is not an http address; "
                "write it like http://host:8000/v1"
            )
        bare = parts.netloc.rpartition("@")[2]
        self.address = urlunsplit((parts.scheme, bare, parts.path, "", "")).rstrip("/")
        self._auth = (httpx.URL(url).username, httpx.URL(url).password)
        self._source, self._given = source, transport
        self._deadline = deadline_seconds
        self._key: str | None = None
        self._transport: httpx.AsyncBaseTransport | None = None
        self._headers = dict(_HEADERS)
        self._urls: dict[str, httpx.URL] = {}  # by path, read once
        self.limiter = shared_limiter(self.address, "")
        self.breaker = Breaker()
        self.adaptive = AdaptiveLimit(concurrency)
        self.outstanding = 0
        self.limited_on_end = 0
        self._limited_at = 0.0
        self.checking: asyncio.Task[None] | None = None
        self.healing: asyncio.Task[None] | None = None
        self.health_pause = 0.0
        """Seconds before its health is asked for again."""
        self.out_since: float | None = None
        self.problem = ""
        """What it did when it failed last."""

    def start(self, key: str | None, tls: ssl.SSLContext) -> None:
        """From here on it may be asked, with this key."""
        self._key = key
        self._transport = self._given or transport_to(httpx.URL(self.address), tls)
        self._headers = dict(_HEADERS)
        if any(self._auth):
            pair = b64encode(":".join(self._auth).encode()).decode()
            self._headers["Authorization"] = f"Basic {pair}"
        elif key:
            self._headers["Authorization"] = f"Bearer {key}"
        self.limiter = shared_limiter(self.address, f"{key}\n{self._auth}")
        self.breaker, self.out_since, self.problem = Breaker(), None, ""

    async def stop(self) -> None:
        """Closes the connections."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.aclose()

    @property
    def seat(self) -> bool:
        """Whether another call may begin, as far as the server's health and its load go."""
        return (
            self.checking is None and self.breaker.passes and self.outstanding < self.adaptive.limit
        )

    def serves(self, now: float) -> bool:
        """Whether it is well and may be asked, now or as soon as it has a seat."""
        return self.breaker.state == "closed" and now >= self.limiter.closed_until

    def limited(
        self, began: float, now: float, after: float | None, pause: Callable[[int], float]
    ) -> None:
        """It refused a call that began at `began` for now: it is left alone for `after` seconds.

        `pause(n)` says for how long where it gave no time, or none at all for the second time on
        end. Calls that are refused together count once.
        """
        if began >= self._limited_at:
            self.limited_on_end += 1
            self._limited_at = now
        if after is None or (after == 0 and self.limited_on_end > 1):
            after = pause(self.limited_on_end - 1)
        self.limiter.close_until(now + after)

    async def probe(self) -> dict[str, dict[str, Any]]:
        """Asks for `/models`; returns what it says of each, by name.

        Raises `Unwell`, or `UserError` where the key is refused.
        Any answer but a refusal of the key or a 5xx will do: not all servers list models.
        """
        deadline = min(PROBE_SECONDS, max(SHORTEST_PROBE_SECONDS, self._deadline))
        try:
            async with asyncio.timeout(deadline):
                status, body, _ = await self._request("GET", "/models")
        except TimeoutError:
            raise Unwell(f"did not answer within {deadline:g} s") from None
        except httpx.HTTPError as error:
            told = self.clean(str(error))
            raise Unwell(f"does not answer ({type(error).__name__}: {told})") from None
        if status in {401, 403}:
            raise UserError(
                f"reward.{self._source}.base_url: {self.address} refuses the key (HTTP {status}); "
                f"set reward.{self._source}.api_key_env to the variable that holds it"
            )
        if status >= 500:
            raise Unwell(f"answers HTTP {status}")
        return _models(body)

    async def attempt(self, path: str, content: bytes) -> Any:
        """The JSON answer to one POST within the deadline; raises `Again` or `CallFailed`."""
        deadline = self._deadline
        try:
            async with asyncio.timeout(deadline):
                status, body, headers = await self._request("POST", path, content)
        except (TimeoutError, httpx.TimeoutException) as error:
            reason = f"{self.address} did not answer within {deadline:g} s"
            raise Again("timeout", reason, unwell=True) from error
        except httpx.HTTPError as error:
            reason = f"{self.address}: {type(error).__name__}: {self.clean(str(error))}"
            if isinstance(error, httpx.DecodingError):
                raise Again("bad_response", reason) from error
            raise Again("unavailable", reason, unwell=True, broke=True) from error
        if status >= 300:
            self._refuse(status, body, headers)
        if len(body) > LARGEST_BODY:
            raise CallFailed("unparseable", f"an answer of more than {LARGEST_BODY} bytes")
        if self._key is not None:  # what a judge says is kept with its sample
            body = body.replace(self._key.encode(), b"***")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Again("bad_response", f"{self.address}: not JSON") from error

    def clean(self, text: str) -> str:
        """Text without the key, should a server echo it."""
        for secret in (self._key, self._auth[1]):
            text = text.replace(secret, "***") if secret else text
        return text

    def _refuse(self, status: int, body: bytes, headers: httpx.Headers) -> None:
        text = self.clean(body[:2000].decode("utf-8", "replace"))
        reason = f"{self.address}: HTTP {status}: {text[:300]}"
        after = retry_after(headers.get("retry-after"))
        if status == 429 or (status == 503 and after is not None):
            raise Again("rate_limited", reason, limited=True, overload=True, after=after)
        if status >= 500 and status not in _OF_THE_SERVER:
            raise Again("unavailable", reason, unwell=True, overload=status == 503)
        if status in {408, 409, 425}:
            raise Again("unavailable", reason)
        if status in {400, 413, 422} and any(mark in text.lower() for mark in _TOO_LONG):
            raise CallFailed("too_long", reason)
        if status in _OF_THE_SERVER:
            raise Again("refused", reason, elsewhere=True)
        raise CallFailed("refused", reason)

    async def _request(
        self, method: str, path: str, content: bytes | None = None
    ) -> tuple[int, bytes, httpx.Headers]:
        """Status, body (of a bit more than `LARGEST_BODY` bytes at most) and headers.

        httpx's client is left out: its share of a call is as large as the connection's.
        """
        transport = self._transport
        if transport is None:
            raise CallFailed("unavailable", f"the client of {self.address} is not started")
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(f"{self.address}{path}")
        request = httpx.Request(method, url, content=content, headers=self._headers)
        response = await transport.handle_async_request(request)
        try:
            return response.status_code, await _read(response), response.headers
        finally:
            await response.aclose()


async def _read(response: httpx.Response) -> bytes:
    """The body, not read on once it is too large."""
    parts, size = [], 0
    async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > LARGEST_BODY:
            break
    return b"".join(parts)


def _models(body: bytes) -> dict[str, dict[str, Any]]:
    try:
        return {str(model["id"]): dict(model) for model in json.loads(body)["data"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


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
