"""The axes that this package adds to the joint space.

Their parts live in the packages named here, one file each.
"""

from __future__ import annotations

from attention.axes import Axis

SIMILARITY = Axis("similarity", "search_spaces.similarity")
OBJECTIVE = Axis("objective", "search_spaces.objectives")
GROUPING = Axis("grouping", "search_spaces.grouping")
ALLOCATION = Axis("allocation", "search_spaces.allocation")
SHARING = Axis("sharing", "search_spaces.sharing")
COMPOSITION = Axis("composition", "search_spaces.composition")
RELAXATION = Axis("relaxation", "search_spaces.relaxation")
RECOVERY = Axis("recovery", "search_spaces.recovery")
