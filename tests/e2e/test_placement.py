"""Pools on a real Ray cluster of two nodes: every replica lands where the plan says."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from offbeat.cluster.plan import PoolPlan
from offbeat.cluster.pools import SLOT, ResourcePool, create_pools, remove_pools
from offbeat.errors import UserError

pytestmark = pytest.mark.timeout(300)
PER_NODE = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster

    # The GPUs are Ray's own count: it gives them out on a machine that has none.
    node = {"num_cpus": 1, "num_gpus": 2, "resources": {SLOT: PER_NODE}}
    node["object_store_memory"] = 80 << 20
    started = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    started.add_node(**node)
    started.wait_for_nodes()
    ray.init(address=started.address, log_to_driver=False, namespace="placement")
    yield
    ray.shutdown()
    started.shutdown()


def plan(
    name: str, replicas: int, width: int, within: str | None = None, share: float = 1.0
) -> PoolPlan:
    settings = (f"{name}.replicas", f"{name}.devices_per_replica")
    return PoolPlan(name, name, replicas, width, settings, within, share)


def where(pool: ResourcePool) -> list[str]:
    """The node id of each bundle."""
    return list(placement_group_table(pool.group)["bundles_to_node_id"].values())


def free() -> float:
    return float(ray.available_resources().get(SLOT, 0))


def gone(*, but: int = 0) -> None:
    """Waits until all slots are free again (but so many), as Ray has heard."""
    deadline = time.monotonic() + 20
    while free() != 2 * PER_NODE - but:
        assert time.monotonic() < deadline, free()
        time.sleep(0.1)


def test_widths_that_fit_in_one_way_only_get_their_nodes(cluster: None) -> None:
    """4 + 4 | 3 + 3 + 2 and 4 + 2 + 2 | 3 + 3 + 2: the first fit is not enough for the second."""
    for fours, twos in ((2, 1), (1, 3)):
        gone()
        plans = [plan("two", twos, 2), plan("three", 2, 3), plan("four", fours, 4)]
        pools = create_pools(plans, "cpu", deadline_seconds=30)
        try:
            used: dict[str, int] = {}
            for name, pool in pools.items():
                nodes = where(pool)
                assert len(nodes) == pool.plan.replicas
                for node in nodes:
                    used[node] = used.get(node, 0) + pool.plan.devices_per_replica
                assert name == pool.plan.name
            assert sorted(used.values()) == [PER_NODE, PER_NODE]
        finally:
            remove_pools(pools)


def test_what_cannot_be_placed_is_refused_and_nothing_stays_reserved(cluster: None) -> None:
    gone()
    for plans, words in (
        ([plan("a", 3, 5)], ["2 nodes of 8", "a.devices_per_replica"]),
        ([plan("a", 1, 9)], ["9 slots on one node", "largest node has 8"]),
        ([plan("a", 17, 1)], ["need 17 slots", "there are 16"]),
    ):
        with pytest.raises(UserError) as caught:
            create_pools(plans, "cpu", deadline_seconds=5)
        assert [word for word in words if word not in str(caught.value)] == []
    held = create_pools([plan("a", 2, 6)], "cpu", deadline_seconds=30)
    try:
        with pytest.raises(UserError, match=r"placement_deadline_seconds = 1; free now: 4"):
            create_pools([plan("b", 2, 2), plan("c", 1, 1)], "cpu", deadline_seconds=1)
        time.sleep(1)
        assert free() == 4  # the pools that would have fitted are not held either
    finally:
        remove_pools(held)


def actor(pool: ResourcePool, replica: int) -> Any:
    """An actor of a replica, which says where it is and what it has."""

    class Role:  # in here, so that it travels whole to a process that cannot import the tests
        def gpus(self) -> str:
            return os.environ["CUDA_VISIBLE_DEVICES"]

        def where(self) -> tuple[str, float]:
            context = ray.get_runtime_context()
            return str(context.get_node_id()), context.get_assigned_resources().get(SLOT, 0.0)

    return ray.remote(Role).options(**pool.options(replica)).remote()


def test_roles_that_share_one_device_are_actors_on_it_at_once(cluster: None) -> None:
    gone()
    names = ("rollout", "train", "reward/judge")
    plans = [plan(name, 1, 1, "shared", 1 / 3) for name in names]
    pools = create_pools(plans, "cpu", deadline_seconds=30)
    try:
        assert len({pool.group.id for pool in pools.values()}) == 1
        gone(but=1)
        actors = [actor(pools[name], 0) for name in names]
        nodes = ray.get([found.where.remote() for found in actors], timeout=120)
        assert set(nodes) == {(where(pools["train"])[0], 0.3333)}
        ray.kill(actors[0])  # as an engine that is replaced: its share is free again
        again = actor(pools["rollout"], 0)
        assert ray.get(again.where.remote(), timeout=120) == nodes[0]
    finally:
        remove_pools(pools)
    gone()


def test_reward_sources_of_one_pool_have_their_shares_of_its_devices(cluster: None) -> None:
    """Judges on both devices, a scorer on the first: each replica on its bundle, also again."""
    gone()
    plans = [
        plan("train", 1, 1),
        plan("reward/judge", 2, 1, "reward/small", 0.65),
        plan("reward/scorer", 1, 1, "reward/small", 0.35),
        plan("reward/own", 1, 2),
    ]
    pools = create_pools(plans, "cpu", deadline_seconds=30)
    try:
        gone(but=5)  # train 1, the shared pool 2, the other one 2
        judge, scorer = pools["reward/judge"], pools["reward/scorer"]
        assert judge.group.id == scorer.group.id != pools["reward/own"].group.id
        bundles = where(judge)
        assert len(bundles) == 2
        actors = [actor(judge, 0), actor(judge, 1), actor(scorer, 0)]
        wanted = [(bundles[0], 0.65), (bundles[1], 0.65), (bundles[0], 0.35)]
        assert ray.get([a.where.remote() for a in actors], timeout=120) == wanted
        for place, (pool, replica) in enumerate(((judge, 0), (judge, 1), (scorer, 0))):
            ray.kill(actors[place])  # it comes back where it was, while its neighbours stay
            actors[place] = actor(pool, replica)
            assert ray.get(actors[place].where.remote(), timeout=120) == wanted[place]
        late = actor(scorer, 0)  # the device is full: nothing is put there beyond its shares
        ready, _ = ray.wait([late.where.remote()], timeout=3)
        assert ready == []
        ray.kill(late)
        gone(but=5)
    finally:
        remove_pools(pools)
    gone()


def test_actors_that_share_a_gpu_see_that_one_and_no_other(cluster: None) -> None:
    plans = [
        plan("reward/judge", 2, 1, "reward/small", 0.7),
        plan("reward/scorer", 2, 1, "reward/small", 0.3),
    ]
    pools = create_pools(plans, "cuda", deadline_seconds=30)
    try:
        actors = [actor(pools[p.name], i) for p in plans for i in range(2)]
        judges = ray.get([a.gpus.remote() for a in actors[:2]], timeout=120)
        scorers = ray.get([a.gpus.remote() for a in actors[2:]], timeout=120)
        assert judges == scorers
        assert all(len(seen.split(",")) == 1 for seen in judges)
        assert sorted(judges) == ["0", "1"]  # both lie on one node, which has two
    finally:
        remove_pools(pools)
