"""Which learning rate a step is trained with, where it was changed while a run was resumed.

The rule: a batch that was recorded under one rate is trained again with that rate; batches that are
recorded after the change have the new one. The ledger keeps the list (`meta`, key `rates`). Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

META_KEY = "rates"


@dataclass(frozen=True, slots=True)
class Rate:
    """Steps before `until` (None: all that come) have the peak `learning_rate`, and a schedule that
    ends after `total_steps`."""

    until: int | None
    learning_rate: float
    total_steps: int


def rate_of(rates: Sequence[Rate], step: int) -> Rate | None:
    """The rate of a step; None: none of them says."""
    return next((rate for rate in rates if rate.until is None or step < rate.until), None)


def ended(rates: Sequence[Rate], step: int) -> tuple[Rate, ...]:
    """The rates of steps before `step` alone, equal neighbours as one."""
    found: list[Rate] = []
    begin = 0
    for rate in rates:
        if begin >= step:
            break
        until = step if rate.until is None else min(rate.until, step)
        if until <= begin:
            continue
        rate = replace(rate, until=until)
        if found and replace(found[-1], until=until) == rate:
            found.pop()
        found.append(rate)
        begin = until
    return tuple(found)


def pack_rates(rates: Sequence[Rate]) -> str:
    """As text; floats come back bit for bit."""
    return json.dumps([asdict(rate) for rate in rates])


def unpack_rates(text: str) -> tuple[Rate, ...]:
    """The inverse."""
    return tuple(Rate(**values) for values in json.loads(text))
