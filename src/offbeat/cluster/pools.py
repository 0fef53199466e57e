"""Resource pools on Ray: one placement group a role, on disjoint devices, created first.

A device is a GPU where there are GPUs, else a slot of the custom resource `offbeat_slot`. A pool
is passed explicitly to whoever starts actors on it; there is no "whatever is free". Roles that
share devices (reward sources with one `pool`, all roles of a run on a single device) share a
placement group, and each actor takes its part of its bundle's device.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from offbeat import faults
from offbeat.cluster.plan import PoolPlan, check_packs, place_on, reserved, sizes
from offbeat.errors import UserError

SLOT = "offbeat_slot"
NODE_LABEL = "ray.io/node-id"
RESERVE_SECONDS = 10.0
"""How long Ray may take for a placement on devices that were free a moment ago."""


@dataclass(frozen=True, slots=True)
class ResourcePool:
    """Devices of one role: bundle i holds all devices of replica i, on one node, or the one
    device that replica i of every role within the same pool has a share of."""

    plan: PoolPlan
    kind: str
    group: PlacementGroup

    def bundle(self, replica: int) -> tuple[str, int]:
        """Identifies a replica's devices: those of equal ones share them."""
        return self.plan.home, replica

    def options(self, replica: int, *, threads: int = 1) -> dict[str, Any]:
        """Ray actor options that put a replica on its bundle."""
        plan = self.plan
        count = plan.devices_per_replica if plan.within is None else _countable(plan.share)
        on_gpu = self.kind == "cuda"
        return {
            "num_cpus": 0,
            "num_gpus": count if on_gpu else 0,
            "resources": {} if on_gpu else {SLOT: count},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=replica
            ),
            "runtime_env": {"env_vars": process_env(threads, gpu=on_gpu)},
        }


def _countable(share: float) -> float:
    """A share as Ray counts it: in ten-thousandths, rounded down so that all fit on the device."""
    return math.floor(share * 1e4 + 1e-6) / 1e4


def process_env(threads: int, *, gpu: bool) -> dict[str, str]:
    """Environment of an actor's process: its threads, and no GPU for those that hold none."""
    env = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    } | faults.environment()
    return env if gpu else env | {"CUDA_VISIBLE_DEVICES": ""}


def create_pools(
    plans: Sequence[PoolPlan], kind: str, *, deadline_seconds: float
) -> dict[str, ResourcePool]:
    """Reserves all pools or none, checked against the cluster first; returns them by role.

    Raises `UserError`: what is needed, what there is, which setting to change, or at the deadline
    that the devices could not be had. Nothing stays reserved then, and nothing is held while
    others' devices are waited for, so that two runs never wait for each other.
    """
    check_cluster(plans, kind)
    resource = _resource(kind)
    give_up = time.monotonic() + deadline_seconds
    while (groups := _reserve(plans, resource, give_up)) is None:
        if time.monotonic() >= give_up:
            raise UserError(
                f"the pools need {sizes(reserved(plans))} {resource} and did not get them within "
                f"cluster.placement_deadline_seconds = {deadline_seconds:.0f}; free now: "
                f"{sum(_free(resource).values())}. End other runs, or make a pool smaller"
            )
        time.sleep(random.uniform(0.1, 0.5))  # two runs that hold one another up do not keep pace
    return {plan.name: ResourcePool(plan, kind, groups[plan.home]) for plan in plans}


def _reserve(
    plans: Sequence[PoolPlan], resource: str, give_up: float
) -> dict[str, PlacementGroup] | None:
    """A placement group for each pool, where `place_on` puts its replicas; None if not to be had.

    Each bundle is bound to its node: left to itself, Ray spreads groups over the emptiest nodes,
    where a wide replica may then find no room.
    """
    free = _free(resource)
    placement = place_on(plans, list(free.values()))
    if placement is None:
        return None
    nodes = list(free)
    groups: dict[str, PlacementGroup] = {}
    until = min(give_up, time.monotonic() + RESERVE_SECONDS)
    done = False
    try:
        for plan in reserved(plans):
            groups[plan.name] = placement_group(
                [{resource: float(plan.devices_per_replica)} for _ in range(plan.replicas)],
                strategy="PACK",
                bundle_label_selector=[
                    {NODE_LABEL: nodes[spot.node]} for spot in placement[plan.name]
                ],
            )
        done = all(
            group.wait(timeout_seconds=max(until - time.monotonic(), 0.1))
            for group in groups.values()
        )
    finally:
        if not done:
            _remove(groups.values())
    return groups if done else None


def remove_pools(pools: dict[str, ResourcePool]) -> None:
    """Gives all devices back."""
    _remove({pool.group.id: pool.group for pool in pools.values()}.values())


def _remove(groups: Iterable[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)


def check_cluster(plans: Sequence[PoolPlan], kind: str) -> None:
    """Refuses, before anything starts, what the cluster can never place."""
    resource = _resource(kind)
    nodes = [int(n["Resources"].get(resource, 0)) for n in ray.nodes() if n["Alive"]]
    needed = sum(plan.devices for plan in reserved(plans))
    if kind == "cpu" and sum(nodes) < needed and os.environ.get("RAY_ADDRESS"):
        raise UserError(
            f"the Ray cluster has {sum(nodes)} {SLOT}, the run needs {needed}: start its nodes "
            f"with ray start --resources='{{\"{SLOT}\": {needed}}}' (add --head on the first)"
        )
    check_packs(plans, nodes, kind)


def _resource(kind: str) -> str:
    return "GPU" if kind == "cuda" else SLOT


def _free(resource: str) -> dict[str, int]:
    """Whole free devices by node id, as far as Ray has heard."""
    found = available_resources_per_node()
    return {node: int(found[node].get(resource, 0) + 1e-6) for node in sorted(found)}
