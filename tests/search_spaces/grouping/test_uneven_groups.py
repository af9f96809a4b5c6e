"""Group sizes that do not divide the heads: full groups, and the rest in one smaller (AsymGQA, Table 1)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_contexts import random_context

from search_spaces.grouping.neighbour import neighbour_partition
from search_spaces.grouping.steps import Walk
from search_spaces.partitions import full_sizes, group_sizes
from search_spaces.planning.budgets import check_budget
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import recipe

UNEVEN = {"grouping.equal_sizes": False}


@pytest.mark.parametrize(
    ("heads", "groups", "sizes"),
    [
        (32, 6, [6, 6, 6, 6, 6, 2]),  # Table 1, size 6
        (32, 11, [3] * 10 + [2]),  # Table 1, size 3
        (32, 16, [2] * 16),
        (32, 8, [4] * 8),
        (8, 3, [3, 3, 2]),
        (8, 5, [2, 2, 2, 1, 1]),  # no size of 8 heads gives five groups
        (7, 7, [1] * 7),
        (7, 1, [7]),
    ],
)
def test_sizes_by_hand(heads: int, groups: int, sizes: list[int]) -> None:
    assert full_sizes(heads, groups) == sizes


@given(heads=st.integers(1, 128), size=st.integers(1, 128))
def test_every_size_is_met_by_the_groups_that_it_gives(heads: int, size: int) -> None:
    """Slow reference: cut off `size` heads until fewer remain."""
    expected, remaining = [], heads
    while remaining > 0:
        expected.append(min(size, remaining))
        remaining -= size
    groups = len(expected)
    if -(-heads // groups) == size or groups == 1:  # the least size that gives so many groups is the one that is used
        assert full_sizes(heads, groups) == expected
    assert sum(full_sizes(heads, groups)) == heads and min(full_sizes(heads, groups)) >= 1
    if heads % groups == 0:
        assert full_sizes(heads, groups) == group_sizes(heads, groups)


def test_neighbours_in_groups_of_six() -> None:
    assert neighbour_partition(32, 6) == tuple(tuple(range(i, min(i + 6, 32))) for i in range(0, 32, 6))


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_walk_starts_at_full_groups(symmetric: bool) -> None:
    walk = Walk(32, 6, np.random.default_rng(0), preserve=1.0, reset=0.0, symmetric=symmetric)
    for _ in range(20):  # every move keeps the sizes
        assert sorted(map(len, walk.propose_next(np.eye(32)))) == [2, 6, 6, 6, 6, 6]
        walk.tell(0.0)


@pytest.mark.parametrize("walk", [False, True])
@pytest.mark.parametrize(("kept", "sizes"), [(3, [3, 3, 2]), (5, [2, 2, 2, 1, 1])])
def test_plans_of_these_sizes(walk: bool, kept: int, sizes: list[int]) -> None:
    """`gqa` and the symmetric walk at 3 and 5 of 8 heads; not for a family whose groups must be of one size."""
    context = random_context(8, 8, 2)
    changes = {"grouping": "walk_symmetric", "objective": "pairs"} if walk else {}
    name = "asymgqa" if walk else "gqa"
    with pytest.raises(ValueError, match="admissible ratios are 0.125, 0.25, 0.5, 1"):
        check_budget(recipe(name, **changes, together=True), kept / 8, replace(context.geometry, pads_queries=False))
    plan, free = (
        make_plan(recipe(name, **changes, **more), kept / 8, context, np.random.default_rng(0)) for more in ({}, UNEVEN)
    )
    assert plan == free
    for layer in plan.layers:
        for groups in (layer.key_groups, layer.value_groups):
            assert sorted(map(len, groups), reverse=True) == sizes
        assert not layer.is_uniform_gqa
        assert walk or layer.key_map == layer.value_map


def test_equal_counts_stay_plain_gqa() -> None:
    """A request for uneven groups that turn out even is the plan that `gqa` makes."""
    context = random_context(8, 8, 2)
    plans = [make_plan(recipe("gqa", **more), 0.25, context, np.random.default_rng(0)) for more in ({}, UNEVEN)]
    assert plans[0] == plans[1] and all(layer.is_uniform_gqa for layer in plans[0].layers)
