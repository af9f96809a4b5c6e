"""Exact allocation of a budget over sites with an error curve each: the multiple-choice knapsack.

Legend: sites (2 L: keys and values of each layer), e_s(G) error of site s with G heads, B budget in heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from search_spaces.allocation.problem import AllocationProblem, Counts
from search_spaces.axes import ALLOCATION


def knapsack(curves: Sequence[Mapping[int, float]], budget: int, *, exact: bool = False) -> tuple[int, ...]:
    """One head count a site, of least total error, with at most `budget` heads in all (exactly so many if `exact`).

    `curves[s]`: error for each admissible head count of site s. Exact, by dynamic programming over sites and heads:
    O(sites x counts x budget). Ties go to fewer heads, later sites first. Raises ValueError if no choice meets the
    budget or an error is not finite.
    """
    least = np.full(budget + 1, np.inf)
    least[0] = 0.0
    steps = []
    for site, curve in enumerate(curves):
        options = sorted(curve.items())
        if not options or not all(np.isfinite(error) for _, error in options):
            raise ValueError(f"the error curve of site {site} must be finite and not empty, got {dict(curve)}")
        tried = np.full((len(options), budget + 1), np.inf)
        for row, (count, error) in enumerate(options):
            if count <= budget:
                tried[row, count:] = least[: budget + 1 - count] + error
        steps.append(([count for count, _ in options], tried.argmin(axis=0)))
        least = tried.min(axis=0)
    used = budget if exact else int(least.argmin())
    if not np.isfinite(least[used]):
        lowest, highest = sum(min(curve) for curve in curves), sum(max(curve) for curve in curves)
        raise ValueError(
            f"no choice of head counts gives {'exactly' if exact else 'at most'} {budget} heads; the sites take "
            f"{lowest} to {highest} in steps of their admissible counts"
        )
    chosen = []
    for counts, choice in reversed(steps):
        count = counts[int(choice[used])]
        chosen.append(count)
        used -= count
    return tuple(reversed(chosen))


@ALLOCATION.part(
    "knapsack",
    source="ours: multiple-choice knapsack over keys and values of all layers",
    needs=("model", "measure", "apart"),
)
def knapsack_part(problem: AllocationProblem) -> Counts:
    """Least sum of the measured rises of the loss, over keys and values of all layers together."""
    if problem.curve is None:
        raise ValueError("allocation=knapsack needs measured error curves: a model and token sequences")
    sites = [(layer, side) for layer in range(problem.num_layers) for side in ("key", "value")]
    chosen = knapsack([problem.curve(*site) for site in sites], problem.total, exact=True)
    return tuple(zip(chosen[::2], chosen[1::2], strict=True))
