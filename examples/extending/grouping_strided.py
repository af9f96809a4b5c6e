"""A grouping of heads at equal distances. Its place: search_spaces/grouping/strided.py."""

from __future__ import annotations

import numpy as np

from search_spaces.axes import GROUPING
from search_spaces.grouping.problem import Grouping, GroupingProblem
from search_spaces.partitions import canonical


@GROUPING.part("strided", source="an example of CONTRIBUTING.md")
def strided(problem: GroupingProblem, generator: np.random.Generator) -> Grouping:
    """Head h is in group h mod G. Nothing is scored and nothing drawn."""
    groups = [range(first, problem.num_heads, problem.groups) for first in range(problem.groups)]
    return Grouping(canonical(groups), None)
