"""Every layer the same, keys and values the same."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from search_spaces.allocation.problem import AllocationProblem, Counts
from search_spaces.axes import ALLOCATION


def admissible_ratios(num_heads: int, counts: Sequence[int]) -> list[float]:
    """The KV ratios of head counts, ascending."""
    return [count / num_heads for count in sorted(counts)]


def uniform(
    num_layers: int,
    num_heads: int,
    kv_ratio: float | Fraction,
    *,
    admissible: Sequence[int] | None = None,
) -> Counts:
    """`kv_ratio * num_heads` key heads and as many value heads in each layer (Ainslie 2023).

    `admissible`: the head counts that the grouping can make; by default the divisors of `num_heads`, which give groups
    of equal size. Raises ValueError naming ratio, heads and the admissible ratios for any other budget.
    """
    if admissible is None:
        admissible = [g for g in range(1, num_heads + 1) if num_heads % g == 0]
    exact = float(kv_ratio) * num_heads
    count = round(exact)
    if abs(exact - count) > 1e-6 or count not in admissible:
        ratios = ", ".join(f"{ratio:.8g}" for ratio in admissible_ratios(num_heads, admissible))
        raise ValueError(
            f"kv_ratio {float(kv_ratio):.4g} of {num_heads} heads is {exact:.4g} heads a layer, which this grouping "
            f"cannot make; the admissible ratios are {ratios}"
        )
    return ((count, count),) * num_layers


@ALLOCATION.part("uniform", source="Ainslie 2023, sec. 2.2")
def uniform_part(problem: AllocationProblem) -> Counts:
    """Every layer and side the same."""
    return uniform(problem.num_layers, problem.num_heads, problem.kv_ratio, admissible=problem.admissible)
