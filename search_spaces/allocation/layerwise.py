"""Exact allocation with one head count a layer, the same for keys and values: where a runtime takes no other."""

from __future__ import annotations

from search_spaces.allocation.knapsack import KNOBS, best_measured, considered
from search_spaces.allocation.problem import AllocationProblem, Counts
from search_spaces.axes import ALLOCATION


@ALLOCATION.part(
    "layerwise",
    source="ours: multiple-choice knapsack over layers, keys and values alike",
    knobs=KNOBS,
    needs=("model", "measure"),
)
def layerwise(problem: AllocationProblem, *, counts: str = "any", finalists: int = 3, **measuring: int) -> Counts:
    """Least measured loss among plans of little summed increase over layers.

    Raises ValueError for an odd number of heads.
    """
    if problem.curve is None:
        raise ValueError("allocation=layerwise needs measured error curves: a model and token sequences")
    if problem.total % 2:
        raise ValueError(
            f"no choice of head counts gives keys and values alike {problem.total} heads in all; choose an even number"
        )
    allowed = considered(problem, counts)
    curves = [problem.curve(layer, "both", allowed) for layer in range(problem.num_layers)]
    return best_measured(
        problem, curves, problem.total // 2, finalists, lambda plan: tuple((count, count) for count in plan)
    )
