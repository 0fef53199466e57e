"""Which pool gets how many devices: pure, without Ray and torch, so that `check` can print it.

Pools are disjoint. External judges and functions have none: they use no device of the run.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from offbeat.config import Config
from offbeat.errors import UserError

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Devices of one role: `replicas` bundles of `devices_per_replica` devices each.

    `settings` are those that change the pool's size.
    """

    name: str
    role: str
    replicas: int
    devices_per_replica: int
    settings: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Devices of the whole pool."""
        return self.replicas * self.devices_per_replica


def plan_pools(config: Config) -> list[PoolPlan]:
    """The pools of a run: rollout, train, and one for each reward model that it stands up.

    The trainer's replicas are its ranks, one device each.
    """
    rollout = config.rollout
    sizes = ("rollout.replicas", "rollout.devices_per_replica")
    plans = [
        PoolPlan("rollout", "rollout", rollout.replicas, rollout.devices_per_replica, sizes),
        PoolPlan("train", "train", config.train.devices, 1, ("train.devices",)),
    ]
    for name, source in config.active_rewards.items():
        if source.has_pool:
            key = f"reward.{name}"
            sizes = (f"{key}.replicas", f"{key}.devices_per_replica")
            replicas, devices = source.replicas, source.devices_per_replica
            plans.append(PoolPlan(f"reward/{name}", source.kind, replicas, devices, sizes))
    return plans


def device_kind(config: Config) -> Kind:
    """The kind of devices: as configured; `auto` is cuda where an NVIDIA device is seen."""
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if cuda_devices() else "cpu"


def cuda_devices() -> int:
    """NVIDIA devices of this machine, counted without torch."""
    nodes = sum(node.name[6:].isdigit() for node in Path("/dev").glob("nvidia[0-9]*"))
    if nodes or shutil.which("nvidia-smi") is None:
        return nodes
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def available_devices(config: Config, kind: Kind) -> int:
    """Devices that a cluster started here would have: slots on a CPU, GPUs otherwise."""
    return config.cluster.slots if kind == "cpu" else cuda_devices()


def resource_map(plans: Sequence[PoolPlan], kind: str, config: Config | None = None) -> str:
    """The pools as a table with the devices that each replica gets, counted through.

    With the configuration, sources that have no pool are listed with the reason.
    """
    noun = _noun(kind)
    rows = [("pool", "replicas", f"{noun}s each", f"{noun}s", "which")]
    first = 0
    for plan in plans:
        which = []
        for _ in range(plan.replicas):
            last = first + plan.devices_per_replica - 1
            which.append(f"{first}" if last == first else f"{first}-{last}")
            first = last + 1
        each = str(plan.devices_per_replica)
        rows.append((plan.name, str(plan.replicas), each, str(plan.devices), " ".join(which)))
    rows.append(("all", "", "", str(first), ""))
    for name, source in ({} if config is None else config.active_rewards).items():
        if not source.has_pool:
            why = (
                f"function, {source.workers} CPU process{'es' if source.workers > 1 else ''}"
                if source.kind == "function"
                else f"external judge at {source.base_url}"
            )
            rows.append((f"reward/{name}", "-", "-", "no pool", why))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def check_fits(plans: Sequence[PoolPlan], available: int, kind: str) -> None:
    """Raises `UserError` when the pools need more devices than there are."""
    needed = sum(plan.devices for plan in plans)
    if needed <= available:
        return
    noun = _noun(kind)
    parts = ", ".join(f"{plan.name} {plan.devices}" for plan in plans)
    sizes = ", ".join(setting for plan in plans for setting in plan.settings)
    more = f"raise cluster.slots to {needed}" if kind == "cpu" else "add GPUs"
    raise UserError(
        f"the pools need {needed} {noun}s ({parts}) and there {'is' if available == 1 else 'are'} "
        f"{available}; {more}, or lower one of {sizes}"
    )


def _noun(kind: str) -> str:
    return "slot" if kind == "cpu" else "GPU"
