"""Exact grouping as a part.

The subset programme, and above its limit the search by merging and annealing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from search_spaces.axes import GROUPING
from search_spaces.grouping.estimated import by_estimates
from search_spaces.grouping.merge_anneal import merge_anneal
from search_spaces.grouping.problem import EQUAL_SIZES, Grouping, GroupingProblem
from search_spaces.grouping.subsets import EXACT_HEADS, shared_exact_partition
from search_spaces.partitions import largest_group

AFFORDABLE = 1e13
"""Multiply-adds for the prices of one exact grouping, at most: two or three minutes of one core."""


@GROUPING.part(
    "exact",
    source="ours: subset dynamic programme on an additive group cost",
    knobs=(replace(EQUAL_SIZES, searched=True),),
    needs=("objective", "group_cost"),
)
def exact(
    problem: GroupingProblem, generator: np.random.Generator, *, equal_sizes: bool = True
) -> Grouping:
    """Return the cheapest of all partitions.

    Above 16 heads, or where the groups of wide heads to be priced would take longer than all else:
    merging and annealing on the same cost, or on its estimates if it has any; no longer proven
    best.
    """
    cost = problem.need_cost()
    heads = problem.num_heads
    groups = problem.groups
    largest = largest_group(heads, groups, equal_sizes)
    sizes = [largest] if equal_sizes and heads % groups == 0 else range(2, largest + 1)
    if heads > EXACT_HEADS or cost.effort(heads, sizes) > AFFORDABLE:
        if cost.estimates:
            return by_estimates(problem, generator, equal_sizes=equal_sizes)
        return merge_anneal(problem, generator, equal_sizes=equal_sizes)
    return shared_exact_partition(cost, heads, groups, equal_sizes=equal_sizes)
