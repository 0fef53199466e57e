"""Which pool gets how many devices, and on which nodes: pure, without Ray and torch.

`check` prints it, `pools.py` reserves it. Pools are disjoint, and a replica's devices lie on one
node. With `cluster.single_device` one device is all there is, and every role takes a share of it.
External judges and functions have no pool: they use no device of the run.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from offbeat.config import Config
from offbeat.errors import UserError

Kind = Literal["cpu", "cuda"]
SHARED = "shared"
"""The pool of a run on a single device."""
TRIES = 20_000
"""Fillings of nodes that `place` tries beyond the first before it gives up."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Devices of one role: `replicas` bundles of `devices_per_replica` devices each.

    `settings` are those that change the pool's size. `shared`: the role has only a share of the
    one device that all shared roles have together.
    """

    name: str
    role: str
    replicas: int
    devices_per_replica: int
    settings: tuple[str, ...] = ()
    shared: bool = False

    @property
    def devices(self) -> int:
        """Devices of the whole pool."""
        return self.replicas * self.devices_per_replica


@dataclass(frozen=True, slots=True)
class Spot:
    """The devices of one replica: `count` of them from number `first` on, all on one node."""

    node: int
    first: int
    count: int

    def __str__(self) -> str:
        last = self.first + self.count - 1
        return f"node{self.node}:{self.first}" + (f"-{last}" if self.count > 1 else "")


Placement = Mapping[str, Sequence[Spot]]
"""By pool: a spot for each replica."""


def plan_pools(config: Config) -> list[PoolPlan]:
    """The pools of a run: rollout, train, and one for each reward model that it stands up.

    The trainer's replicas are its ranks, one device each.
    """
    rollout, shared = config.rollout, config.cluster.single_device
    settings = ("rollout.replicas", "rollout.devices_per_replica")
    each = rollout.devices_per_replica
    plans = [
        PoolPlan("rollout", "rollout", rollout.replicas, each, settings, shared),
        PoolPlan("train", "train", config.train.devices, 1, ("train.devices",), shared),
    ]
    for name, source in config.active_rewards.items():
        if source.has_pool:
            key = f"reward.{name}"
            settings = (f"{key}.replicas", f"{key}.devices_per_replica")
            replicas, each = source.replicas, source.devices_per_replica
            plans.append(PoolPlan(f"reward/{name}", source.kind, replicas, each, settings, shared))
    return plans


def reserved(plans: Sequence[PoolPlan]) -> list[PoolPlan]:
    """The plans as devices are reserved for them: those that share are one pool, one device."""
    found = [plan for plan in plans if not plan.shared]
    if len(found) < len(plans):
        found.append(PoolPlan(SHARED, SHARED, 1, 1))
    return found


def sizes(plans: Sequence[PoolPlan]) -> str:
    """Pools in words: rollout 2 x 4, train 1 x 1."""
    return ", ".join(f"{p.name} {p.replicas} x {p.devices_per_replica}" for p in plans)


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


def resource_map(
    plans: Sequence[PoolPlan],
    kind: str,
    config: Config | None = None,
    placement: Placement | None = None,
) -> str:
    """The pools as a table with the devices that each replica gets, counted through.

    With a placement the devices are told by node. With the configuration, sources that have no
    pool are listed with the reason.
    """
    noun = _noun(kind)
    rows = [("pool", "replicas", f"{noun}s each", f"{noun}s", "which")]
    first = 0
    for plan in reserved(plans):
        spots = [] if placement is None else list(placement[plan.name])
        for _ in range(plan.replicas if placement is None else 0):
            spots.append(Spot(0, first, plan.devices_per_replica))
            first += plan.devices_per_replica
        which = [str(s) if placement is not None else str(s).partition(":")[2] for s in spots]
        if plan.name == SHARED:
            sharing = [plan.name for plan in plans if plan.shared]
            which.append(f"for {', '.join(sharing)} in turn")
        each = str(plan.devices_per_replica)
        rows.append((plan.name, str(plan.replicas), each, str(plan.devices), " ".join(which)))
    rows.append(("all", "", "", str(sum(plan.devices for plan in reserved(plans))), ""))
    for name, source in ({} if config is None else config.active_rewards).items():
        if not source.has_pool:
            why = (
                f"function, {source.workers} CPU process{'es' if source.workers > 1 else ''}"
                if source.kind == "function"
                else f"external judge at {', '.join(source.base_urls)}"
            )
            rows.append((f"reward/{name}", "-", "-", "no pool", why))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def place(plans: Sequence[PoolPlan], nodes: int, per_node: int) -> Placement | None:
    """Where each replica lies on `nodes` nodes of `per_node` free devices each.

    Spots are disjoint, each on one node; None where there is no such placement, or none that the
    search finds: it finds every one that first-fit-decreasing does, and far more.
    """
    return place_on(plans, [per_node] * nodes)


def place_on(plans: Sequence[PoolPlan], free: Sequence[int]) -> Placement | None:
    """As `place`, on nodes with these numbers of free devices."""
    plans = reserved(plans)
    widths = sorted({plan.devices_per_replica for plan in plans}, reverse=True)
    counts = [sum(p.replicas for p in plans if p.devices_per_replica == width) for width in widths]
    fillings = _pack(widths, tuple(counts), free)
    if fillings is None:
        return None
    spots: dict[int, list[Spot]] = {width: [] for width in widths}
    for node, filling in enumerate(fillings):
        first = 0
        for width, count in zip(widths, filling, strict=True):
            for _ in range(count):
                spots[width].append(Spot(node, first, width))
                first += width
    taken = {width: iter(found) for width, found in spots.items()}
    return {
        plan.name: tuple(next(taken[plan.devices_per_replica]) for _ in range(plan.replicas))
        for plan in plans
    }


Counts = tuple[int, ...]
"""Replicas of each width."""


def _pack(widths: Sequence[int], counts: Counts, free: Sequence[int]) -> list[Counts] | None:
    """How many replicas of each width a node gets, for the nodes that are needed.

    Node by node, depth first, fullest with the widest first: the first path is that of
    first-fit-decreasing. Only fillings to which nothing can be added are tried, which loses no
    solution. What is known to lead nowhere is not tried again.
    """
    left, filled = [counts], list[Counts]()
    ways: list[Iterator[Counts]] = []
    dead: set[tuple[int, Counts]] = set()
    tries = len(free) + TRIES
    while any(left[-1]):
        node = len(filled)
        if len(ways) == node:
            open_ = node < len(free) and (node, left[-1]) not in dead
            ways.append(_fillings(free[node], widths, left[-1]) if open_ else iter(()))
        filling = next(ways[-1], None)
        tries -= 1
        if tries < 0:
            return None
        if filling is not None:
            filled.append(filling)
            left.append(tuple(n - m for n, m in zip(left[-1], filling, strict=True)))
            continue
        dead.add((node, left[-1]))
        ways.pop()
        if not filled:
            return None
        filled.pop()
        left.pop()
    return filled


def _fillings(room: int, widths: Sequence[int], counts: Counts) -> Iterator[Counts]:
    """Every way to fill `room` devices so that no further replica fits, the widest first."""
    if not widths:
        yield ()
        return
    most = min(counts[0], room // widths[0])
    for taken in range(most, -1, -1):
        for rest in _fillings(room - taken * widths[0], widths[1:], counts[1:]):
            over = room - taken * widths[0]
            over -= sum(n * width for n, width in zip(rest, widths[1:], strict=True))
            if taken == counts[0] or over < widths[0]:
                yield (taken, *rest)


def check_fits(plans: Sequence[PoolPlan], available: int, kind: str) -> None:
    """Raises `UserError` when the pools need more devices than there are."""
    plans = reserved(plans)
    needed = sum(plan.devices for plan in plans)
    if needed <= available:
        return
    noun = _noun(kind)
    parts = ", ".join(f"{plan.name} {plan.devices}" for plan in plans)
    more = f"raise cluster.slots to {needed}" if kind == "cpu" else "add GPUs"
    lower = ", ".join(setting for plan in plans for setting in plan.settings)
    raise UserError(
        f"the pools need {needed} {noun}{'' if needed == 1 else 's'} ({parts}) and there "
        f"{'is' if available == 1 else 'are'} {available}; {more}"
        + (f", or lower one of {lower}" if lower else "")
    )


def check_packs(plans: Sequence[PoolPlan], free: Sequence[int], kind: str) -> Placement:
    """Where every replica lies on nodes with `free` devices each.

    Raises `UserError`: too few devices, a replica wider than every node, or devices enough and
    yet no node for some replica.
    """
    check_fits(plans, sum(free), kind)
    noun, largest = _noun(kind), max(free, default=0)
    widest = max(reserved(plans), key=lambda plan: plan.devices_per_replica)
    if widest.devices_per_replica > largest:
        raise UserError(
            f"pool {widest.name} wants {widest.devices_per_replica} {noun}s on one node for each "
            f"replica, and the largest node has {largest}; lower {widest.settings[-1]}"
        )
    placement = place_on(plans, free)
    if placement is None:
        pools = reserved(plans)
        needed = sum(plan.devices for plan in pools)
        raise UserError(
            f"the pools need {needed} {noun}s ({sizes(pools)}) and there are {sum(free)}, but a "
            f"replica's {noun}s lie on one node, and on {_shape(free)} not every replica finds a "
            "node; change one of " + ", ".join(setting for p in pools for setting in p.settings)
        )
    return placement


def _shape(free: Sequence[int]) -> str:
    """Nodes in words: 2 nodes of 8; nodes of 8, 4 and 4."""
    if len(set(free)) == 1:
        return f"{len(free)} node{'s' if len(free) > 1 else ''} of {free[0]}"
    return "nodes of " + ", ".join(map(str, free))


def _noun(kind: str) -> str:
    return "slot" if kind == "cpu" else "GPU"
