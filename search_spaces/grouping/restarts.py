"""Swaps that only improve, from many random starts (named simulated annealing in its paper)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attention.axes import Knob
from search_spaces.axes import GROUPING
from search_spaces.costs import GroupCost, Members, as_cost
from search_spaces.grouping.problem import EQUAL_SIZES, Grouping, GroupingProblem
from search_spaces.grouping.swaps import best_of_runs


def anneal_restarts(
    cost: GroupCost | np.ndarray | Callable[[Members], float],
    num_heads: int,
    groups: int,
    *,
    generator: np.random.Generator,
    moves: int = 1000,
    restarts: int = 10,
) -> Grouping:
    """A partition of low total cost (paper 001, sec. 3.4, Alg. 2): the best of `restarts` runs of `moves` swaps.

    `cost` as in `anneal`. A swap is kept only if it lowers the cost. Silent: the paper names neither number of moves
    nor of runs. Raises ValueError for an impossible number of groups.
    """
    if moves < 0 or restarts < 1:
        raise ValueError(f"moves must be at least 0 and restarts at least 1, got {moves} and {restarts}")
    return best_of_runs(as_cost(cost), num_heads, groups, [[0.0] * moves] * restarts, generator)


@GROUPING.part(
    "anneal_restarts",
    source="Jin 2024 (paper 001), sec. 3.4, Alg. 2",
    knobs=(
        Knob("moves", "int", "swaps tried in each run", low=0, high=1_000_000),
        Knob("restarts", "int", "runs, of which the best counts", low=1, high=10_000),
        EQUAL_SIZES,
    ),
    needs=("objective", "group_cost"),
    passes_to=anneal_restarts,
)
def anneal_restarts_part(
    problem: GroupingProblem, generator: np.random.Generator, *, equal_sizes: bool = True, **knobs: Any
) -> Grouping:
    """Improving swaps from random starts. Without `equal_sizes` sizes may differ by one."""
    if equal_sizes:
        problem.check_equal()
    return anneal_restarts(problem.need_cost(), problem.num_heads, problem.groups, generator=generator, **knobs)
