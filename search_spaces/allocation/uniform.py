"""Every layer the same, keys and values the same."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from attention.ratios import ROUNDING
from search_spaces.allocation.problem import AllocationProblem, Counts
from search_spaces.axes import ALLOCATION


def uniform(
    num_layers: int,
    stored: int,
    kv_ratio: float | Fraction,
    *,
    admissible: Sequence[int] | None = None,
) -> Counts:
    """Keep `kv_ratio * stored` key and value heads in each layer (Ainslie 2023).

    Args:
        stored: KV heads per layer of the checkpoint.
        admissible: The head counts that the grouping can make; by default the divisors of `stored`.

    Raises:
        ValueError: Naming ratio, heads and the admissible ratios for any other ratio.
    """
    if admissible is None:
        admissible = [g for g in range(1, stored + 1) if stored % g == 0]
    exact = float(kv_ratio) * stored
    count = round(exact)
    if abs(exact - count) > ROUNDING * stored or count not in admissible:
        ratios = ", ".join(f"{units_kept / stored:.8g}" for units_kept in sorted(admissible))
        raise ValueError(
            f"kv_ratio {float(kv_ratio):.4g} of {stored} heads is {exact:.4g} heads per layer, "
            f"which this grouping cannot make; the admissible ratios are {ratios}"
        )
    return ((count, count),) * num_layers


@ALLOCATION.part("uniform", source="Ainslie 2023, sec. 2.2")
def uniform_part(problem: AllocationProblem) -> Counts:
    """Every layer and side the same."""
    return uniform(
        problem.num_layers, problem.stored, problem.kv_ratio, admissible=problem.admissible
    )


@ALLOCATION.part("single", source="Shazeer 2019, multi-query attention")
def single(problem: AllocationProblem) -> Counts:
    """Allocate one head per layer and side; the error of any other budget names the right one."""
    return uniform(problem.num_layers, problem.stored, problem.kv_ratio, admissible=(1,))
