"""Neighbour grouping, the baseline of every comparison: consecutive heads share."""

from __future__ import annotations

import numpy as np

from search_spaces.axes import GROUPING
from search_spaces.grouping.problem import Grouping, GroupingProblem
from search_spaces.partitions import Partition, cut


def neighbour_partition(num_heads: int, groups: int) -> Partition:
    """Heads [0..m-1], [m..2m-1], ...; the first groups are larger by one where `groups` does not divide the heads."""
    return cut(range(num_heads), groups)


@GROUPING.part("neighbour", source="Ainslie 2023, sec. 2.2", needs=("equal_groups",))
def neighbour(problem: GroupingProblem, generator: np.random.Generator) -> Grouping:
    """Consecutive heads; nothing is scored and nothing drawn."""
    return Grouping(neighbour_partition(problem.num_heads, problem.groups), None)
