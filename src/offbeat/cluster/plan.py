"""Which pool gets how many devices, and on which nodes: pure, without Ray and torch.

`check` prints it, `pools.py` reserves it. Pools are disjoint, and a replica's devices lie on one
node. Reward sources that name the same `pool` share its devices: replica i of each lies on device
i, with its `device_share` of it. With `cluster.single_device` one device is all there is, and
every role takes a share of it. External judges and functions use no device of the run.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from offbeat.cluster.specs import validators
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

    `settings` are those that change the pool's size. `within` is the pool that the role shares
    with others: replica i has the part `share` of that pool's device i.
    """

    name: str
    role: str
    replicas: int
    devices_per_replica: int
    settings: tuple[str, ...] = ()
    within: str | None = None
    share: float = 1.0

    @property
    def devices(self) -> int:
        """Devices of the whole pool."""
        return self.replicas * self.devices_per_replica

    @property
    def home(self) -> str:
        """The pool as devices are reserved for it: its own, or that which it shares."""
        return self.within or self.name


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
Cells = tuple[str, str, str, str, str]
"""A row of the map."""


def plan_pools(config: Config) -> list[PoolPlan]:
    """The pools of a run: rollout, train, one for engines that only validate, and one for each
    reward model that it stands up.

    The trainer's replicas are its ranks, one device each.
    """
    rollout = config.rollout
    settings = ("rollout.replicas", "rollout.devices_per_replica")
    each = rollout.devices_per_replica
    plans = [
        PoolPlan("rollout", "rollout", rollout.replicas, each, settings),
        PoolPlan("train", "train", config.train.devices, 1, ("train.devices",)),
    ]
    if (replicas := validators(config)) > 0:
        settings = ("validate.replicas", "validate.devices_per_replica")
        each = config.validation.devices_per_replica
        plans.append(PoolPlan("validate", "validate", replicas, each, settings))
    for name, source in config.active_rewards.items():
        if source.has_pool:
            key = f"reward.{name}"
            settings = (f"{key}.replicas", f"{key}.devices_per_replica")
            within = None if source.pool is None else f"reward/{source.pool}"
            replicas, each, share = source.replicas, source.devices_per_replica, source.device_share
            pool = PoolPlan(f"reward/{name}", source.kind, replicas, each, settings, within, share)
            plans.append(pool)
    if config.cluster.single_device:
        share = 1 / len(plans)
        plans = [replace(plan, settings=(), within=SHARED, share=share) for plan in plans]
    return plans


def reserved(plans: Sequence[PoolPlan]) -> list[PoolPlan]:
    """The plans as devices are reserved for them: those within one pool are that pool, which has
    as many devices as the largest of them has replicas."""
    found: dict[str, PoolPlan] = {}
    for plan in plans:
        if plan.within is None:
            found[plan.name] = plan
            continue
        known = found.get(plan.within, PoolPlan(plan.within, plan.within, 0, 1))
        found[plan.within] = replace(
            known,
            replicas=max(known.replicas, plan.replicas),
            settings=known.settings + plan.settings[:1],
        )
    return list(found.values())


def check_memory(config: Config, kind: str) -> None:
    """Refuses vLLM that takes more of a shared GPU's memory than its share of the device."""
    if kind == "cpu":
        return  # there vLLM takes what VLLM_CPU_KVCACHE_SPACE says
    for name, source in config.active_rewards.items():
        share, memory = source.device_share, source.memory_share
        if source.pool is None or source.engine != "vllm" or memory <= share:
            continue
        default = "" if "memory_share" in source.model_fields_set else " (the default)"
        raise UserError(
            f"reward.{name}.memory_share = {memory:g}{default} is more than its device_share = "
            f'{share:g} of a GPU of pool "{source.pool}", and would leave the others there too '
            f"little memory; set reward.{name}.memory_share to {share * 0.9:.2g}, "
            f"at most {share:g}"
        )


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
    rows: list[Cells] = [("pool", "replicas", f"{noun}s each", f"{noun}s", "which")]
    first = 0
    for plan in reserved(plans):
        spots = [] if placement is None else list(placement[plan.name])
        for _ in range(plan.replicas if placement is None else 0):
            spots.append(Spot(0, first, plan.devices_per_replica))
            first += plan.devices_per_replica
        which = [str(s) if placement is not None else str(s).partition(":")[2] for s in spots]
        rows += _rows(plan, which, [part for part in plans if part.within == plan.name])
    rows.append(("all", "", "", str(sum(plan.devices for plan in reserved(plans))), ""))
    for name, source in ({} if config is None else config.active_rewards).items():
        if not source.has_pool:
            why = (
                f"function, {source.workers} CPU process{'es' if source.workers > 1 else ''}"
                if source.kind == "function"
                else f"external judge at {', '.join(source.shown_servers)}"
            )
            rows.append((f"reward/{name}", "-", "-", "no pool", why))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _rows(plan: PoolPlan, which: Sequence[str], parts: Sequence[PoolPlan]) -> list[Cells]:
    """A pool's row of the map, and one for each of the roles that share it."""
    on = " ".join(which)
    if plan.name == SHARED:
        on, parts = f"{on} for {', '.join(part.name for part in parts)} in turn", ()
    count, each, devices = plan.replicas, plan.devices_per_replica, plan.devices
    rows = [(plan.name, str(count), str(each), str(devices), on)]
    for part in parts:
        share, of = f"{part.share:g}", f"{part.replicas * part.share:g}"
        on = " ".join(which[: part.replicas])
        rows.append((f"  {part.name}", str(part.replicas), share, of, on))
    return rows


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
