"""Placement: disjoint, each replica on one node, within capacity, and found where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.cluster.plan import (
    PoolPlan,
    Spot,
    check_fits,
    check_memory,
    check_packs,
    place,
    place_on,
    plan_pools,
    reserved,
    resource_map,
)
from offbeat.config_file import load_config
from offbeat.errors import UserError

Pools = list[tuple[int, int]]
"""Replicas and devices per replica of each pool."""


def plans(pools: Pools) -> list[PoolPlan]:
    return [
        PoolPlan(f"p{place}", "rollout", replicas, width, (f"p{place}.replicas", f"p{place}.width"))
        for place, (replicas, width) in enumerate(pools)
    ]


def first_fit_decreasing(pools: Pools, free: Sequence[int]) -> bool:
    left = list(free)
    for width in sorted((w for n, w in pools for _ in range(n)), reverse=True):
        node = next((i for i, room in enumerate(left) if room >= width), None)
        if node is None:
            return False
        left[node] -= width
    return True


def possible(pools: Pools, free: Sequence[int]) -> bool:
    """Tries every node for every replica."""
    widths = [w for n, w in pools for _ in range(n)]
    for nodes in product(range(len(free)), repeat=len(widths)):
        load = [0] * len(free)
        for node, width in zip(nodes, widths, strict=True):
            load[node] += width
        if all(used <= room for used, room in zip(load, free, strict=True)):
            return True
    return False


def holds(pools: Pools, free: Sequence[int]) -> bool:
    """Whether there is a placement; checks that it is one."""
    found = place_on(plans(pools), free)
    if found is None:
        return False
    assert [len(found[f"p{i}"]) for i in range(len(pools))] == [n for n, _ in pools]
    taken: set[tuple[int, int]] = set()
    for i, (_, width) in enumerate(pools):
        for spot in found[f"p{i}"]:
            assert spot.count == width
            assert 0 <= spot.node < len(free)
            assert spot.first >= 0
            assert spot.first + spot.count <= free[spot.node]
            devices = {(spot.node, spot.first + k) for k in range(width)}
            assert not devices & taken
            taken |= devices
    return True


pool = st.tuples(st.integers(1, 6), st.integers(1, 9))


@settings(max_examples=400, deadline=None)
@given(st.lists(pool, min_size=1, max_size=5), st.lists(st.integers(0, 12), min_size=1, max_size=9))
def test_every_placement_is_one_and_first_fit_finds_none_that_is_missed(
    pools: Pools, free: list[int]
) -> None:
    assert holds(pools, free) or not first_fit_decreasing(pools, free)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(1, 6)), min_size=1, max_size=3),
    st.lists(st.integers(0, 8), min_size=1, max_size=3),
)
@example([(1, 4), (2, 3), (3, 2)], [8, 8])  # 4 2 2 | 3 3 2, which first-fit-decreasing misses
def test_on_few_nodes_a_placement_is_found_exactly_where_there_is_one(
    pools: Pools, free: list[int]
) -> None:
    assert holds(pools, free) == possible(pools, free)


def test_large_clusters_are_placed_at_once() -> None:
    assert holds([(4000, 1), (700, 4), (1, 1), (200, 8)], [8] * 1051)
    assert not holds([(999, 5), (999, 4)], [8] * 1000)  # 9 do not fit on 8, and 1,998 not on 1,000


def test_how_replicas_are_told() -> None:
    found = place(plans([(2, 1), (1, 4)]), 2, 4)
    assert found == {"p0": (Spot(1, 0, 1), Spot(1, 1, 1)), "p1": (Spot(0, 0, 4),)}
    assert [str(spot) for spot in (*found["p1"], *found["p0"])] == [
        "node0:0-3",
        "node1:0",
        "node1:1",
    ]
    assert place(plans([(2, 3)]), 1, 5) is None


@pytest.mark.parametrize(
    ("pools", "free", "words"),
    [
        ([(3, 3)], [4, 4], ["need 9 GPUs", "p0 9", "are 8", "add GPUs", "p0.replicas"]),
        ([(1, 5), (1, 1)], [4, 4], ["p0 wants 5 GPUs on one node", "has 4", "p0.width"]),
        ([(3, 3)], [5, 4], ["need 9 GPUs (p0 3 x 3)", "are 9", "nodes of 5, 4", "p0.width"]),
        ([(1, 1)], [], ["need 1 GPU ", "are 0"]),
    ],
)
def test_refusals_say_what_is_needed_and_what_there_is(
    pools: Pools, free: list[int], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        check_packs(plans(pools), free, "cuda")
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


# ---- pools that several reward sources share ----

Project = Callable[..., Path]
SMALL = {
    "reward__judge__pool": "small", "reward__judge__device_share": 0.6,
    "reward__judge__replicas": 2,
    "reward__scorer__pool": "small", "reward__scorer__device_share": 0.4,
}  # fmt: skip


def test_sources_of_one_pool_share_its_devices(project: Project) -> None:
    config = load_config(project(("rule", "judge", "scorer"), **SMALL))
    plans = plan_pools(config)
    assert [(plan.name, plan.home) for plan in plans[2:]] == [
        ("reward/judge", "reward/small"),
        ("reward/scorer", "reward/small"),
    ]
    (pool,) = reserved(plans)[2:]
    assert (pool.name, pool.replicas, pool.devices_per_replica) == ("reward/small", 2, 1)
    assert set(place_on(plans, [4]) or ()) == {"rollout", "train", "reward/small"}
    assert place_on(plans, [3]) is None
    table = {line.split()[0]: line.split()[1:] for line in resource_map(plans, "cpu").splitlines()}
    assert table["reward/small"] == ["2", "1", "2", "2", "3"]
    assert table["reward/judge"] == ["2", "0.6", "1.2", "2", "3"]
    assert table["reward/scorer"] == ["1", "0.4", "0.4", "2"]
    assert table["all"] == ["4"]
    found = check_packs(plans, [2, 2], "cuda")
    where = [str(spot) for spot in found["reward/small"]]
    lines = resource_map(plans, "cuda", placement=found).splitlines()
    assert [line.split()[1:] for line in lines if "scorer" in line] == [
        ["1", "0.4", "0.4", where[0]]
    ]
    with pytest.raises(UserError, match=r"reward/small 2.*reward\.judge\.replicas"):
        check_fits(plans, 3, "cpu")


def test_a_single_device_is_one_pool_of_all_roles(project: Project) -> None:
    more = {"cluster__single_device": True, "train__max_staleness": 0}
    plans = plan_pools(load_config(project(("rule", "judge"), **more)))
    assert {plan.home for plan in plans} == {"shared"}
    assert sum(plan.share for plan in plans) == pytest.approx(1)
    (pool,) = reserved(plans)
    assert (pool.name, pool.devices) == ("shared", 1)
    assert "for rollout, train, reward/judge in turn" in resource_map(plans, "cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"reward__scorer__device_share": 0.5},
            ["reward.judge.device_share = 0.6 + reward.scorer.device_share = 0.5 come to 1.1",
             'pool "small"', "lower them"],
        ),
        ({"reward__scorer__pool": "judge"}, ['reward.scorer.pool = "judge"', "no source has"]),
        ({"reward__scorer__pool": "rule"}, ['reward.scorer.pool = "rule"', "no source has"]),
        ({"reward__scorer__pool": "a/b"}, ["reward.scorer.pool", "letters"]),
        (
            {"reward__judge__devices_per_replica": 2, "reward__judge__engine": "vllm"},
            ["reward.judge.devices_per_replica = 2", "a share of one device", "set it to 1"],
        ),
        ({"reward__rule__pool": "small"}, ["reward.rule.pool", "a function has none"]),
        (
            {"reward__judge__base_url": "http://x/v1"},
            ["reward.judge.pool", "an external judge has none"],
        ),
        (
            {"reward__judge__pool": "smal"},
            ['no other source has pool = "smal"', "another has (small)"],
        ),
        ({"reward__rule__device_share": 0.5}, ["reward.rule.device_share = 0.5", "idle"]),
        (
            {"cluster__single_device": True, "train__max_staleness": 0,
             "reward__judge__replicas": 1},
            ["reward.judge.pool", "cluster.single_device = true", "leave one of the two out"],
        ),
        ({"reward__judge__placement": "colocate"}, ["rollout never pauses", 'placement = "pool"']),
        ({"reward__judge__device_share": 0.001}, ["reward.judge.device_share", "0.01"]),
    ],
)  # fmt: skip
def test_shared_pools_that_cannot_be_are_refused(
    project: Project, changes: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        load_config(project(("rule", "judge", "scorer"), **(SMALL | changes)))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_sources_that_are_left_out_take_no_share(project: Project) -> None:
    path = project(("rule", "judge", "scorer"), **(SMALL | {"reward__scorer__device_share": 0.9}))
    config = load_config(path, ["--use_rewards", "judge"])
    assert [pool.name for pool in reserved(plan_pools(config))][2:] == ["reward/small"]


def test_vllm_takes_no_more_memory_than_its_share(project: Project) -> None:
    more = SMALL | {"reward__judge__engine": "vllm"}
    config = load_config(project(("rule", "judge", "scorer"), **more))
    check_memory(config, "cpu")
    with pytest.raises(UserError) as caught:
        check_memory(config, "cuda")
    assert "reward.judge.memory_share = 0.9 (the default) is more than" in str(caught.value)
    assert "set reward.judge.memory_share to 0.54, at most 0.6" in str(caught.value)
    for share, refused in ((0.6, False), (0.61, True)):
        path = project(("rule", "judge", "scorer"), **more, reward__judge__memory_share=share)
        if refused:
            with pytest.raises(UserError, match=r"memory_share = 0\.61 is more"):
                check_memory(load_config(path), "cuda")
        else:
            check_memory(load_config(path), "cuda")
