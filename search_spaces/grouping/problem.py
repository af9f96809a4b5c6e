"""The input and the result of a grouping part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from attention.axes import Knob
from search_spaces.costs import GroupCost, Objective
from search_spaces.partitions import Partition, check_groups

EQUAL_SIZES = Knob(
    "equal_sizes",
    "bool",
    "groups of one size, so that the result is plain GQA, or as near as can be",
)
"""Where the groups do not divide the heads, no group is larger than necessary: engines then need
the fewest zero query heads to pad the groups."""


class Grouping(NamedTuple):
    """The best partition found.

    Attributes:
        partition: The groups of heads.
        score: Higher is better; None if nothing was scored.
        trace: How it was found.
    """

    partition: Partition
    score: float | None
    trace: tuple[Any, ...] = ()


@dataclass(frozen=True)
class GroupingProblem:
    """Put `num_heads` heads into `groups` groups. Raises ValueError if so many groups cannot be.

    `similarity` `[n, n]` and `objective` are there if the part needs them.
    """

    num_heads: int
    groups: int
    similarity: np.ndarray | None = None
    objective: Objective | None = None

    def __post_init__(self) -> None:
        check_groups(self.num_heads, self.groups)

    def need_similarity(self) -> np.ndarray:
        """Return the similarity.

        Raises:
            ValueError: If there is none.
        """
        if self.similarity is None:
            raise ValueError(
                "this grouping is guided by a similarity; choose one on the similarity axis"
            )
        return self.similarity

    def need_objective(self) -> Objective:
        """Return the objective.

        Raises:
            ValueError: If there is none.
        """
        if self.objective is None:
            raise ValueError("this grouping needs an objective; choose one on the objective axis")
        return self.objective

    def need_cost(self) -> GroupCost:
        """Return the objective as an additive cost.

        Raises:
            ValueError: If it scores whole partitions only.
        """
        objective = self.need_objective()
        if not isinstance(objective, GroupCost):
            raise ValueError(
                f"this grouping needs an additive group cost, got {type(objective).__name__}, "
                f"which scores whole "
                "partitions only; choose another objective, or a walk"
            )
        return objective
