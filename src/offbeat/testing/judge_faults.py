"""What a fake judge does instead of answering: scripted, every so often, or at random by a seed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

GARBAGE = b"<html><body>It works!</body></html>"
"""A body that is no answer: not even JSON."""
BABBLE = "I would rather not put a number on this."
"""A well-formed answer without any verdict in it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What one chat completion meets instead of a plain answer.

    `delay` seconds come first, on top of the server's own. Then `hang` never answers (until the
    server stops), `reset` breaks the connection, `body` is sent as is, else `reply` is the text of
    an ordinary answer (default: the server's), or for a status of 400 and more an error object.

    How it is sent: `drip` seconds between one byte of the body and the next; with `cut` the
    connection ends half-way through the body; `size` pads it with spaces to so many bytes.
    `Fault()` is no fault.
    """

    status: int = 200
    delay: float = 0.0
    body: bytes | None = None
    reply: str | None = None
    finish_reason: str = "stop"
    headers: Mapping[str, str] = field(default_factory=dict)
    hang: bool = False
    reset: bool = False
    drip: float = 0.0
    cut: bool = False
    size: int = 0
    content_type: str = "application/json"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Fault:
        """A fault from its JSON object; raises `ValueError` for a name that there is not."""
        known = {item.name for item in fields(cls)}
        odd = sorted(set(values) - known)
        if odd:
            raise ValueError(f"a fault has no {odd[0]!r}; it has: {', '.join(sorted(known))}")
        body = values.get("body")
        return cls(**{**values, "body": body.encode() if isinstance(body, str) else body})


def read_script(path: Path) -> list[Fault]:
    """The faults of a JSON file: a list of objects, {} for a call without a fault."""
    return [Fault.of(values) for values in json.loads(path.read_text(encoding="utf-8"))]


@dataclass(frozen=True, slots=True)
class Mix:
    """Faults at random: each name is the share of calls that meet it; the rest is answered.

    `garbage` is a body that is no JSON, `babble` an answer without a verdict, `cut` a body that
    ends half-way. The n-th call meets the same fault in every server with the same `seed`.
    """

    seed: int = 0
    garbage: float = 0.0
    babble: float = 0.0
    hang: float = 0.0
    reset: float = 0.0
    cut: float = 0.0
    drip: float = 0.0
    status_400: float = 0.0
    status_429: float = 0.0
    status_500: float = 0.0
    status_503: float = 0.0

    def __post_init__(self) -> None:
        shares = [share for name, share in asdict(self).items() if name != "seed"]
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise ValueError(f"the shares of a Mix are 0 to 1 and sum to 1 at most: {self}")

    def fault(self, call: int) -> Fault:
        """What call number `call` (from 0) meets."""
        drawn = random.Random(f"{self.seed}/{call}").random()
        for share, fault in (
            (self.garbage, Fault(body=GARBAGE, content_type="text/html")),
            (self.babble, Fault(reply=BABBLE)),
            (self.hang, Fault(hang=True)),
            (self.reset, Fault(reset=True)),
            (self.cut, Fault(cut=True)),
            (self.drip, Fault(drip=0.05)),
            (self.status_400, Fault(400)),
            (self.status_429, Fault(429, headers={"Retry-After": "1"})),
            (self.status_500, Fault(500)),
            (self.status_503, Fault(503)),
        ):
            drawn -= share
            if drawn < 0:
                return fault
        return Fault()


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A latency in seconds, drawn for each call: half are under `median`; `sigma` is the spread.

    With sigma 0.5 one call of twenty takes more than 2.3 medians. The mean is
    median x exp(sigma^2 / 2).
    """

    median: float
    sigma: float = 0.5
    seed: int = 0

    def seconds(self, call: int) -> float:
        """The latency of call number `call` (from 0)."""
        return self.median * math.exp(self.sigma * random.Random(f"{self.seed}/{call}").gauss())
