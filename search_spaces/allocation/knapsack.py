"""Exact allocation of a budget over sites with an error curve each: the multiple-choice knapsack.

Legend: sites (2 L: keys and values of each layer), e_s(G) error of site s with G heads, B budget in
heads.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention.axes import Knob
from search_spaces.allocation.problem import AllocationProblem, Counts
from search_spaces.axes import ALLOCATION

BY_CURVES = ("knapsack", "layerwise")
# Times the model's, zeros included, that unequal groups may lead to unless they are requested.
_MOST_QUERY_HEADS = 2
POWERS = range(-12, 7)  # of 2: weights of evenness, relative to the mean error


def knapsack(
    curves: Sequence[Mapping[int, float]], budget: int, *, exact: bool = False
) -> tuple[int, ...]:
    """Return one head count per site, of least total error, with at most `budget` heads in all.

    Exact, by dynamic programming over sites and heads: O(sites x counts x budget). Ties go to fewer
    heads, later sites first.

    Args:
        curves: `curves[s]` is the error for each admissible head count of site s.
        budget: Heads of all sites together.
        exact: Whether all of the budget must be used.

    Raises:
        ValueError: If no choice meets the budget or an error is not finite.
    """
    least = np.full(budget + 1, np.inf)
    least[0] = 0.0
    steps: list[tuple[list[int], NDArray[np.intp]]] = []
    for site, curve in enumerate(curves):
        options = sorted(curve.items())
        if not options or not all(np.isfinite(error) for _, error in options):
            raise ValueError(
                f"the error curve of site {site} must be finite and not empty, got {dict(curve)}"
            )
        tried = np.full((len(options), budget + 1), np.inf)
        for row, (count, error) in enumerate(options):
            if count <= budget:
                tried[row, count:] = least[: budget + 1 - count] + error
        steps.append(([count for count, _ in options], tried.argmin(axis=0)))
        least = tried.min(axis=0)
    used = budget if exact else int(least.argmin())
    if not np.isfinite(least[used]):
        lowest = sum(min(curve) for curve in curves)
        highest = sum(max(curve) for curve in curves)
        raise ValueError(
            f"no choice of head counts gives {'exactly' if exact else 'at most'} {budget} heads; "
            f"the sites take "
            f"{lowest} to {highest} in steps of their admissible counts"
        )
    chosen: list[int] = []
    for counts, choice in reversed(steps):
        count = counts[int(choice[used])]
        chosen.append(count)
        used -= count
    return tuple(reversed(chosen))


def towards_even(
    curves: Sequence[Mapping[int, float]], budget: int, at_most: int
) -> list[tuple[int, ...]]:
    """Return different plans of exactly `budget` heads, from least summed error to most even.

    Errors of single sites add up only roughly: where many come down to one head the model loses
    more than their sum. Each plan minimises the sum of the errors plus w x log(G / even)^2 over the
    sites, even = budget / sites, for a weight w that grows from 0.

    Args:
        curves: As in `knapsack`.
        budget: Heads of all sites together.
        at_most: So many plans stay, first and last included.

    Raises:
        ValueError: As `knapsack`.
    """
    errors = [error for curve in curves for error in curve.values() if error > 0]
    scale = float(np.mean(errors)) if errors else 1.0
    even = budget / len(curves)
    steps: list[tuple[int, ...]] = []
    for weight in (0.0, *(scale * 2.0**power for power in POWERS)):
        fronts = [
            {count: error + weight * math.log(count / even) ** 2 for count, error in c.items()}
            for c in curves
        ]
        plan = knapsack(fronts, budget, exact=True)
        if plan not in steps:
            steps.append(plan)
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(at_most, len(steps))).round().astype(int))
    return [steps[index] for index in chosen]


_KNOBS = (
    Knob(
        "counts",
        "choice",
        "head counts that are considered, among those that the grouping can make; any: those of "
        "equal groups, and "
        "others only where there are few of these; all: every one",
        choices=("any", "powers_of_two", "divisors", "all"),
    ),
    Knob(
        "increases",
        "choice",
        (
            "loss increases of single layers: estimated from the error of their output, or "
            "measured on the whole model"
        ),
        choices=("estimated", "measured"),
    ),
    Knob(
        "tokens",
        "int",
        "calibration tokens on which loss increases are estimated or measured",
        low=2,
    ),
    Knob(
        "fit_steps",
        "int",
        "steps of local fit before an increase is measured, as refinement makes more",
        low=0,
    ),
    Knob(
        "finalists",
        "int",
        "where increases are measured: plans that are refined in short and measured",
        1,
        16,
    ),
    Knob(
        "finalist_steps",
        "int",
        "steps of local fit of a finalist, at most those of the refinement",
        low=1,
    ),
)


def reachable(counts: Sequence[int], sites: int) -> list[int]:
    """All sums of one of `counts` for each of so many sites, ascending."""
    sums = 1  # bit t is set where t can be reached
    for _ in range(sites):
        sums = functools.reduce(lambda reached, count: reached | sums << count, counts, 0)
    return [total for total in range(sums.bit_length()) if sums >> total & 1]


def usual_counts(stored: int, num_heads: int) -> tuple[int, ...]:
    """Return the counts of KV heads that layers of one model have by default, ascending.

    The divisors of `stored`.

    Where no such count is between one head and all (3, 5, 7 stored heads), also counts for which
    the number of query heads, which vLLM requires to be the same in all layers, is at most twice
    the model's `num_heads`, small ones first: unequal groups are padded with zero query heads,
    which cost operations in every layer.
    """
    counts = [g for g in range(1, stored + 1) if stored % g == 0]
    if len(counts) > 2 or stored < 3:
        return tuple(counts)
    for count in range(2, stored):
        tried = [*counts, count]
        step = math.lcm(*tried)
        least = max(g * -(-stored // g) for g in tried) * (num_heads // stored)
        if -(-least // step) * step <= _MOST_QUERY_HEADS * num_heads:
            counts = tried
    return tuple(sorted(counts))


def considered(problem: AllocationProblem, counts: str) -> list[int]:
    """Return the admissible counts of the kind `counts`; all heads are always admissible."""
    kinds: dict[str, Callable[[int], bool]] = {
        "any": lambda g: not problem.usual or g in problem.usual,
        "all": lambda g: True,
        "powers_of_two": lambda g: g & (g - 1) == 0,
        "divisors": lambda g: problem.stored % g == 0,
    }
    return [g for g in problem.admissible if g == problem.stored or kinds[counts](g)]


def best_measured(
    problem: AllocationProblem,
    sides: Sequence[str],
    *,
    counts: str = "any",
    increases: str = "estimated",
    finalists: int = 3,
    tokens: int = 4096,
    fit_steps: int = 60,
    finalist_steps: int = 120,
) -> Counts:
    """Return the plan of least measured loss among `finalists` of `towards_even`.

    If nothing is measured, the answer is the first of them.
    """
    if problem.curves is None:
        raise ValueError("this allocation needs measured error curves: a model and token sequences")
    allowed = considered(problem, counts)
    curves = problem.curves(list(itertools.product(range(problem.num_layers), sides)), allowed)
    each = 2 // len(sides)  # heads that one of a site stands for
    plans: list[Counts] = []
    for plan in towards_even(curves, problem.total // each, finalists):
        heads = [count for count in plan for _ in range(each)]
        plans.append(tuple(zip(heads[::2], heads[1::2], strict=True)))
    if len(plans) == 1 or problem.final is None:
        return plans[0]
    return min(plans, key=problem.final)


@ALLOCATION.part(
    "knapsack",
    source="ours: multiple-choice knapsack over keys and values of all layers",
    knobs=_KNOBS,
    needs=("model", "measure", "apart", "by_layer"),
    passes_to=best_measured,
)
def knapsack_part(problem: AllocationProblem, **knobs: Any) -> Counts:
    """Return the plan of least measured loss among plans of little summed increase."""
    return best_measured(problem, ("key", "value"), **knobs)


@ALLOCATION.part(
    "layerwise",
    source="ours: multiple-choice knapsack over layers, keys and values alike",
    knobs=_KNOBS,
    needs=("model", "measure", "by_layer"),
    passes_to=best_measured,
)
def layerwise(problem: AllocationProblem, **knobs: Any) -> Counts:
    """Return `knapsack` with one count per layer for keys and values, which engines load.

    Raises:
        ValueError: For an odd number of heads.
    """
    if problem.total % 2:
        raise ValueError(
            f"no choice of head counts gives keys and values alike {problem.total} heads in all; "
            f"choose an even number"
        )
    return best_measured(problem, ("both",), **knobs)
