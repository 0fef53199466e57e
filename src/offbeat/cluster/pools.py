"""Resource pools on Ray: one placement group a role, on disjoint devices, created first.

A device is a GPU where there are GPUs, else a slot of the custom resource `offbeat_slot`. A pool
is passed explicitly to whoever starts actors on it; there is no "whatever is free".
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from offbeat.cluster.plan import PoolPlan, check_fits
from offbeat.errors import UserError

SLOT = "offbeat_slot"


@dataclass(frozen=True, slots=True)
class ResourcePool:
    """Devices of one role: bundle i holds all devices of replica i, on one node."""

    plan: PoolPlan
    kind: str
    group: PlacementGroup

    def options(self, replica: int, *, threads: int = 1) -> dict[str, Any]:
        """Ray actor options that put a replica on its bundle."""
        count = self.plan.devices_per_replica
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


def process_env(threads: int, *, gpu: bool) -> dict[str, str]:
    """Environment of an actor's process: its threads, and no GPU for those that hold none."""
    env = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return env if gpu else env | {"CUDA_VISIBLE_DEVICES": ""}


def create_pools(
    plans: Sequence[PoolPlan], kind: str, *, deadline_seconds: float
) -> dict[str, ResourcePool]:
    """Reserves all pools, checked against the cluster first.

    Raises `UserError`: what is needed, what there is, which setting to change, or at the deadline
    which pool could not be had. Nothing stays reserved then.
    """
    check_cluster(plans, kind)
    resource = "GPU" if kind == "cuda" else SLOT
    pools: dict[str, ResourcePool] = {}
    give_up = time.monotonic() + deadline_seconds
    try:
        for plan in plans:
            bundles = [{resource: float(plan.devices_per_replica)} for _ in range(plan.replicas)]
            group = placement_group(bundles, strategy="PACK")
            pools[plan.name] = ResourcePool(plan, kind, group)
        for name, pool in pools.items():
            if not pool.group.wait(timeout_seconds=max(give_up - time.monotonic(), 0.1)):
                raise UserError(
                    f"pool {name} needs {pool.plan.replicas} x {pool.plan.devices_per_replica} "
                    f"{resource} and did not get them within "
                    f"cluster.placement_deadline_seconds = {deadline_seconds:.0f}; "
                    f"free now: {_free(resource):g}. End other runs, or make the pool smaller"
                )
    except BaseException:
        remove_pools(pools)
        raise
    return pools


def remove_pools(pools: dict[str, ResourcePool]) -> None:
    """Gives all devices back."""
    for pool in pools.values():
        remove_placement_group(pool.group)


def check_cluster(plans: Sequence[PoolPlan], kind: str) -> None:
    """Refuses, before anything starts, what the cluster can never place."""
    resource = "GPU" if kind == "cuda" else SLOT
    total = int(ray.cluster_resources().get(resource, 0))
    needed = sum(plan.devices for plan in plans)
    if kind == "cpu" and total < needed and os.environ.get("RAY_ADDRESS"):
        raise UserError(
            f"the Ray cluster has {total} {SLOT}, the run needs {needed}: start its nodes with "
            f"ray start --resources='{{\"{SLOT}\": {needed}}}' (add --head on the first)"
        )
    check_fits(plans, total, kind)
    widest = max(plans, key=lambda plan: plan.devices_per_replica)
    largest = max(
        (int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]),
        default=0,
    )
    if widest.devices_per_replica > largest:
        raise UserError(
            f"pool {widest.name} wants {widest.devices_per_replica} devices on one node, the "
            f"largest node has {largest}: lower its devices_per_replica"
        )


def _free(resource: str) -> float:
    return float(ray.available_resources().get(resource, 0.0))
