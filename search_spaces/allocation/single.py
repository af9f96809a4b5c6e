"""One key head and one value head in every layer: multi-query attention."""

from __future__ import annotations

from search_spaces.allocation.problem import AllocationProblem, Counts
from search_spaces.allocation.uniform import uniform
from search_spaces.axes import ALLOCATION


@ALLOCATION.part("single", source="Shazeer 2019, multi-query attention")
def single(problem: AllocationProblem) -> Counts:
    """One head a layer and side; any other budget is refused with the one that fits."""
    return uniform(problem.num_layers, problem.stored, problem.kv_ratio, admissible=(1,))
