"""The best partition for an additive group cost, for every number of groups, by subsets.

Legend: n heads, G groups, c[S] cost of the subset S as a group, f[S, G] least cost of S in G
groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from search_spaces.costs import GroupCost, Members, as_cost
from search_spaces.grouping.problem import Grouping
from search_spaces.partitions import canonical, check_groups, largest_group

EXACT_HEADS = 16


def exact_partition(
    cost: GroupCost | np.ndarray | Callable[[Members], float],
    num_heads: int,
    *,
    equal_sizes: bool = False,
    groups: Sequence[int] | None = None,
) -> dict[int, Grouping]:
    r"""Return the cheapest partition of `num_heads` heads into G groups, for each G in `groups`.

    f[S, G] = min over the groups T of S that hold its first head, of c[T] + f[S \ T, G - 1]: O(3^n)
    in all. Ties go to the group of lowest bit mask. The score is minus the cost.

    Args:
        cost: As in `anneal`: of one group, or a matrix of pair costs.
        num_heads: n.
        equal_sizes: Whether no group of a partition is larger than it must be, so that all have one
            size where G divides the heads.
        groups: By default all numbers that can be; with `equal_sizes` those that divide the heads.

    Raises:
        ValueError: Above 16 heads, or for a G that cannot be.
    """
    if not 1 <= num_heads <= EXACT_HEADS:
        raise ValueError(
            f"exact grouping takes 1 to {EXACT_HEADS} heads, got {num_heads}; "
            "use merge_anneal above"
        )
    usual = [g for g in range(1, num_heads + 1) if not equal_sizes or num_heads % g == 0]
    requested_sizes = usual if groups is None else list(groups)
    for count in requested_sizes:
        check_groups(num_heads, count)
    group_cost = as_cost(cost)
    if not equal_sizes:
        # No group of a partition into G non-empty groups has more than n - G + 1 members.
        largest = largest_group(num_heads, min(requested_sizes), equal_sizes)
        programme = Programme(
            group_cost.table(num_heads, range(1, largest + 1)), num_heads, max(requested_sizes)
        )
        return {g: programme.best(g) for g in requested_sizes}
    results: dict[int, Grouping] = {}
    for g in requested_sizes:
        largest = largest_group(num_heads, g, equal_sizes)
        size = largest if num_heads % g == 0 else None
        table = group_cost.table(num_heads, range(1, largest + 1) if size is None else [size])
        results[g] = Programme(table, num_heads, g, size=size).best(g)
    return results


def shared_exact_partition(
    cost: GroupCost, num_heads: int, groups: int, *, equal_sizes: bool
) -> Grouping:
    """Return `exact_partition` for one number of groups, sharing the work with all other numbers.

    The filled programme stays with the cost: `2^n (n + 1) / 2` numbers.

    Raises:
        ValueError: As `exact_partition`.
    """
    largest = largest_group(num_heads, groups, equal_sizes)
    size = largest if equal_sizes else None
    programme = cost.programmes.get((num_heads, size))
    if programme is None or programme.largest < largest:
        if equal_sizes or not 1 <= num_heads <= EXACT_HEADS or not 1 <= groups <= num_heads:
            return exact_partition(cost, num_heads, equal_sizes=equal_sizes, groups=[groups])[
                groups
            ]
        table = cost.table(num_heads, range(1, largest + 1))
        programme = cost.programmes[num_heads, size] = Programme(
            table, num_heads, num_heads, largest=largest
        )
    return programme.best(groups)


class Programme:
    """The least cost of all subsets that are left when groups are taken, each with its first head.

    All subsets but the whole lack head 0, which halves their number.

    Args:
        table: `[2^n]`, c by bit mask, infinite where not requested.
        most: Most groups; with `size` all groups have it.
    """

    def __init__(
        self,
        table: np.ndarray,
        num_heads: int,
        most: int,
        *,
        size: int | None = None,
        largest: int | None = None,
    ) -> None:
        self.full = (1 << num_heads) - 1
        self.size = size
        self.largest = largest or num_heads
        count = np.bitwise_count(np.arange(1 << num_heads, dtype=np.uint32))
        self.table = table if size is None else np.where(count == size, table, np.inf)
        # Row mask >> 1 of a mask without head 0.
        self.least = np.full((1 << (num_heads - 1), most + 1), np.inf)
        self.least[0, 0] = 0.0
        for mask in range(2, self.full + 1, 2):
            if size is None or mask.bit_count() % size == 0:
                self.least[mask >> 1, 1:] = self._tried(mask).min(axis=0)
        self.totals = self._tried(self.full).min(axis=0)

    def best(self, groups: int) -> Grouping:
        """Return the cheapest partition into so many groups; its score is minus the cost."""
        partition: list[list[int]] = []
        mask = self.full
        for left in range(groups, 0, -1):
            options = _first_groups(mask, self.size)
            rest = self.least[(mask ^ options) >> 1, left - 1]
            best = int(options[np.argmin(self.table[options] + rest)])
            partition.append([h for h in range(mask.bit_length()) if best >> h & 1])
            mask ^= best
        return Grouping(canonical(partition), -float(self.totals[groups - 1]))

    def _tried(self, mask: int) -> np.ndarray:
        """Return the least cost of `mask` in 1, 2, ... groups for each first group.

        `[options, most]`.
        """
        options = _first_groups(mask, self.size)
        return self.table[options, None] + self.least[(mask ^ options) >> 1, :-1]


def _first_groups(mask: int, size: int | None) -> np.ndarray:
    """All subsets of `mask` that hold its lowest bit (of `size` members), ascending."""
    rest = mask & (mask - 1)
    subsets = np.zeros(1, dtype=np.int64)
    for bit in (1 << head for head in range(mask.bit_length()) if rest >> head & 1):
        subsets = np.concatenate([subsets, subsets | bit])
        if size is not None:
            subsets = subsets[np.bitwise_count(subsets) < size]
    if size is not None:
        subsets = subsets[np.bitwise_count(subsets) == size - 1]
    return subsets | (mask ^ rest)
