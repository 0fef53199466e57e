"""A started run: what the loop is given, wherever the roles live."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.loop import RollouterRole, TrainerRole


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a run that has started."""

    rollouter: RollouterRole
    trainer: TrainerRole
    total_steps: int
    reward_stats: Callable[[], Awaitable[Mapping[str, Any]]]
