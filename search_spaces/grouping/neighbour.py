"""Neighbour grouping, the baseline of every comparison: consecutive heads share."""

from __future__ import annotations

import numpy as np

from search_spaces.axes import GROUPING
from search_spaces.grouping.problem import EQUAL_SIZES, Grouping, GroupingProblem
from search_spaces.partitions import Partition, cut_into, full_sizes


def neighbour_partition(num_heads: int, groups: int) -> Partition:
    """Heads [0..m-1], [m..2m-1], ....

    Where m does not divide the heads, the last group is smaller (`full_sizes`).
    """
    return cut_into(range(num_heads), full_sizes(num_heads, groups))


@GROUPING.part("neighbour", source="Ainslie 2023, sec. 2.2", knobs=(EQUAL_SIZES,))
def neighbour(
    problem: GroupingProblem, generator: np.random.Generator, *, equal_sizes: bool = True
) -> Grouping:
    """Consecutive heads; nothing is scored and nothing drawn.

    The last group may be smaller, as in Table 1 of Chen 2024 (AsymGQA): 6 groups of 32 heads are 6,
    6, 6, 6, 6, 2.
    """
    return Grouping(neighbour_partition(problem.num_heads, problem.groups), None)
