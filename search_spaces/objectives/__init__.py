"""What a grouping optimises: one file a part.

A part is `f(site: Site, **knobs) -> Objective`. "whole_partition" in `needs` marks an objective that only scores whole
partitions; the others are additive over groups (`GroupCost`).
"""

from search_spaces.axes import OBJECTIVE
from search_spaces.costs import GroupCost, Objective, PairCost

__all__ = ["OBJECTIVE", "GroupCost", "Objective", "PairCost"]
