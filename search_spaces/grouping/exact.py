"""The best partition for an additive group cost, for every number of groups at once, by a programme over subsets.

Legend: n heads, G groups, c[S] cost of the subset S as a group, f[S, G] least cost of S in G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from search_spaces.axes import GROUPING
from search_spaces.costs import GroupCost, Members, as_cost
from search_spaces.grouping.merge import merge_and_improve
from search_spaces.grouping.problem import EQUAL_SIZES, Grouping, GroupingProblem
from search_spaces.partitions import Partition, canonical

LIMIT = 16


def exact_partition(
    cost: GroupCost | np.ndarray | Callable[[Members], float],
    num_heads: int,
    *,
    equal_sizes: bool = False,
    groups: Sequence[int] | None = None,
) -> dict[int, Grouping]:
    """The cheapest partition of `num_heads` heads into G groups, for each G in `groups` (default: all that can be).

    `cost` as in `anneal`: of one group, or a matrix of pair costs. With `equal_sizes` all groups of a partition have
    one size, and G runs over the divisors. f[S, G] = min over the groups T of S that hold its first head, of
    c[T] + f[S \\ T, G - 1]: O(3^n) in all. Ties go to the group of lowest bit mask. The score is minus the cost.

    Raises ValueError above 16 heads, or for a G that cannot be.
    """
    if not 1 <= num_heads <= LIMIT:
        raise ValueError(
            f"exact grouping takes 1 to {LIMIT} heads, got {num_heads}; use merge_and_improve or anneal above"
        )
    possible = [g for g in range(1, num_heads + 1) if not equal_sizes or num_heads % g == 0]
    wanted = possible if groups is None else list(groups)
    wrong = [g for g in wanted if g not in possible]
    if wrong:
        kind = "groups of equal size" if equal_sizes else "groups"
        raise ValueError(f"{num_heads} heads can form {possible} {kind}, got {wrong[0]}")
    group_cost = as_cost(cost)
    if not equal_sizes:
        # No group of a partition into G non-empty groups has more than n - G + 1 members.
        largest = num_heads - min(wanted) + 1
        table = group_cost.table(num_heads, range(1, largest + 1))
        return {g: p for g, p in _programme(table, num_heads, max(wanted)).items() if g in wanted}
    sizes = {g: num_heads // g for g in wanted}
    table = group_cost.table(num_heads, sorted(set(sizes.values())))
    count = np.bitwise_count(np.arange(1 << num_heads, dtype=np.uint32))
    return {
        g: _programme(np.where(count == size, table, np.inf), num_heads, g, only=g, size=size)[g]
        for g, size in sizes.items()
    }


def _programme(
    table: np.ndarray, num_heads: int, most: int, *, only: int | None = None, size: int | None = None
) -> dict[int, Grouping]:
    """Fill f and read off the partitions for 1..most groups (or for `only`, all groups of `size`)."""
    full = (1 << num_heads) - 1
    least = np.full((full + 1, most + 1), np.inf)
    least[0, 0] = 0.0
    for mask in range(1, full + 1):
        if size is not None and mask.bit_count() % size:
            continue
        groups = _first_groups(mask, size)
        # Column G of the rest is column G + 1 of the whole.
        least[mask, 1:] = (table[groups, None] + least[mask ^ groups, :-1]).min(axis=0)
    wanted = range(1, most + 1) if only is None else (only,)
    return {g: Grouping(_read(least, table, full, g, size), -float(least[full, g])) for g in wanted}


def _first_groups(mask: int, size: int | None) -> np.ndarray:
    """All subsets of `mask` that hold its lowest bit (of `size` members), ascending."""
    rest = mask & (mask - 1)
    subsets = np.zeros(1, dtype=np.int64)
    for bit in _bits(rest):
        subsets = np.concatenate([subsets, subsets | bit])
        if size is not None:
            subsets = subsets[np.bitwise_count(subsets) < size]
    if size is not None:
        subsets = subsets[np.bitwise_count(subsets) == size - 1]
    return subsets | (mask ^ rest)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


def _read(least: np.ndarray, table: np.ndarray, mask: int, groups: int, size: int | None) -> Partition:
    found = []
    for left in range(groups, 0, -1):
        options = _first_groups(mask, size)
        best = int(options[np.argmin(table[options] + least[mask ^ options, left - 1])])
        found.append([h for h in range(mask.bit_length()) if best >> h & 1])
        mask ^= best
    return canonical(found)


@GROUPING.part(
    "exact",
    source="ours: subset dynamic programme on an additive group cost",
    knobs=(replace(EQUAL_SIZES, searched=True),),
    needs=("objective", "group_cost"),
)
def exact(problem: GroupingProblem, generator: np.random.Generator, *, equal_sizes: bool = True) -> Grouping:
    """The cheapest partition. Above 16 heads: merging with local search on the same cost, no longer proven best."""
    cost = problem.need_cost()
    if problem.num_heads > LIMIT:
        return merge_and_improve(cost, problem.num_heads, problem.groups, equal_sizes=equal_sizes)
    return exact_partition(cost, problem.num_heads, equal_sizes=equal_sizes, groups=[problem.groups])[problem.groups]
