"""A started run: what the loop is given, wherever the roles live."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.roles import RollouterRole, TrainerRole


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a run that has started."""

    rollouter: RollouterRole
    trainer: TrainerRole
    total_steps: int
