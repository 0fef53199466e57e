"""Placement: disjoint, each replica on one node, within capacity, and found where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.cluster.plan import PoolPlan, Spot, check_packs, place, place_on
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
