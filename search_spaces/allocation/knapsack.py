"""Exact allocation of a budget over sites with an error curve each: the multiple-choice knapsack.

Legend: sites (2 L: keys and values of each layer), e_s(G) error of site s with G heads, B budget in heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attention.axes import Knob
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


KNOBS = (
    Knob(
        "counts",
        "choice",
        "any",
        "head counts that are considered, among those that the grouping can make",
        choices=("any", "powers_of_two", "divisors"),
    ),
    Knob("tokens", "int", 4096, "calibration tokens on which rises of the loss are measured", low=2),
)


def considered(problem: AllocationProblem, counts: str) -> list[int]:
    """The admissible counts of the kind `counts`; all heads may always be kept."""
    kinds = {
        "any": lambda g: True,
        "powers_of_two": lambda g: g & (g - 1) == 0,
        "divisors": lambda g: problem.stored % g == 0,
    }
    return [g for g in problem.admissible if g == problem.stored or kinds[counts](g)]


@ALLOCATION.part(
    "knapsack",
    source="ours: multiple-choice knapsack over keys and values of all layers",
    knobs=KNOBS,
    needs=("model", "measure", "apart"),
)
def knapsack_part(problem: AllocationProblem, *, counts: str = "any", tokens: int = 4096) -> Counts:
    """Least sum of the measured rises of the loss, over keys and values of all layers together."""
    if problem.curve is None:
        raise ValueError("allocation=knapsack needs measured error curves: a model and token sequences")
    allowed = considered(problem, counts)
    sites = [(layer, side) for layer in range(problem.num_layers) for side in ("key", "value")]
    chosen = knapsack([problem.curve(*site, allowed) for site in sites], problem.total, exact=True)
    return tuple(zip(chosen[::2], chosen[1::2], strict=True))
