"""`offbeat check` for the servers of external judges: asks them as a run does when it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from offbeat.cli_cluster import PROBE_SECONDS
from offbeat.config import RewardSourceSection
from offbeat.config_reward import without_user
from offbeat.errors import UserError
from offbeat.reward.pool import read_key


@dataclass(frozen=True, slots=True)
class _Looked:
    """What one server answered: its models, and the HTTP status; or what is wrong with it."""

    address: str
    problem: str = ""
    status: int = 0
    models: tuple[str, ...] = ()


def probe_judges(
    name: str,
    source: RewardSourceSection,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Asks the servers of an external judge for their models.

    Raises `UserError` with the addresses if none answers, if one refuses the key, or if the model
    is not named and not clear. `warn` is told of those that are down while others are up.
    """
    key = read_key(name, source)
    urls = list(dict.fromkeys(source.base_urls))
    with ThreadPoolExecutor(len(urls)) as threads:
        looked = list(threads.map(lambda url: _look(name, url, key), urls))
    up = [one for one in looked if not one.problem]
    if not up:
        told = " and ".join(f"{one.address!r} {one.problem}" for one in looked)
        raise UserError(f"reward.{name}.base_url = {told}; start the judge or correct the address")
    listing = [one.models for one in up if one.models]
    common = [m for m in (listing or [()])[0] if all(m in models for models in listing)]
    if source.model is None and len(common) != 1:
        where = " and ".join(one.address for one in up)
        listed = ", ".join(common[:10]) or "none that it lists"
        raise UserError(
            f"reward.{name}.model is missing; set it to one of the models of {where}: {listed}"
        )
    for one in looked:
        if one.problem:
            warn(
                f"reward/{name}: {one.address} {one.problem}; a run starts without it, and asks "
                "it again until it is there"
            )
        else:
            say(f"reward/{name}: {_said(one, source.model)}")


def _look(name: str, url: str, key: str | None) -> _Looked:
    address = without_user(url)
    where = f"reward.{name}.base_url = {address!r}"
    try:
        if urlsplit(url).scheme not in {"http", "https"}:
            raise httpx.InvalidURL("no http address")
        reply = httpx.get(
            f"{url.rstrip('/')}/models",
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=PROBE_SECONDS,
        )
    except httpx.InvalidURL:
        raise UserError(
            f"{where} is not an http address; write it like http://host:8000/v1"
        ) from None
    except httpx.HTTPError as error:
        return _Looked(address, f"does not answer ({str(error) or type(error).__name__})")
    if reply.status_code in (401, 403):
        raise UserError(
            f"{where} refuses the key (HTTP {reply.status_code}); set reward.{name}.api_key_env "
            "to the variable that holds it"
        )
    if reply.status_code >= 500:
        return _Looked(address, f"answers with HTTP {reply.status_code}")
    return _Looked(address, "", reply.status_code, _models_of(reply))


def _said(one: _Looked, model: str | None) -> str:
    if one.status == 404:
        return f"{one.address} answers (HTTP 404 for /models; such an address mostly ends in /v1)"
    if one.models and model not in (None, *one.models):
        listed: Sequence[str] = one.models[:10]
        return (
            f"{one.address} answers, but does not list the model {model!r}; "
            f"it has: {', '.join(listed)}"
        )
    return f"{one.address} answers (HTTP {one.status})"


def _models_of(reply: httpx.Response) -> tuple[str, ...]:
    """The models that a server lists; none if the answer is no such list."""
    try:
        return tuple(str(model["id"]) for model in reply.json()["data"])
    except (ValueError, LookupError, TypeError):
        return ()
