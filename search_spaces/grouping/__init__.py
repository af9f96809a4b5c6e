"""Ways to partition the heads of one layer into groups: one file a part.

A part is `f(problem: GroupingProblem, generator, **knobs) -> Grouping`. It needs what `needs` says: "similarity" (a
matrix to guide moves), "objective" (a score of whole partitions) or "group_cost" (an additive one). Most have a knob
`equal_sizes`: whether all groups have one size; "equal_groups" marks a part that can do no other.
"""

from search_spaces.axes import GROUPING
from search_spaces.grouping.anneal import anneal
from search_spaces.grouping.merge import merge_and_improve
from search_spaces.grouping.merge_anneal import merge_and_anneal
from search_spaces.grouping.neighbour import neighbour_partition
from search_spaces.grouping.problem import Grouping, GroupingProblem
from search_spaces.grouping.restarts import anneal_restarts
from search_spaces.grouping.steps import Walk, WalkStep, propose
from search_spaces.grouping.subsets import exact_partition
from search_spaces.grouping.walk import asym_walk

__all__ = [
    "GROUPING",
    "Grouping",
    "GroupingProblem",
    "Walk",
    "WalkStep",
    "anneal",
    "anneal_restarts",
    "asym_walk",
    "exact_partition",
    "merge_and_anneal",
    "merge_and_improve",
    "neighbour_partition",
    "propose",
]
