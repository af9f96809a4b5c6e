"""Hierarchical merging on an additive group cost, then local search.

For more heads than the exact programme takes.

Legend: n heads, G groups, c(S) cost of the group S.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np

from attention.axes import Knob
from search_spaces.axes import GROUPING
from search_spaces.costs import GroupCost, Members, exchanged
from search_spaces.grouping.problem import EQUAL_SIZES, Grouping, GroupingProblem
from search_spaces.partitions import canonical, largest_group

_Groups = list[Members]


def _merged(cost: GroupCost, num_heads: int, count: int, largest: int) -> _Groups:
    """Merge the pair whose union raises the cost least, while it has at most `largest` members."""
    groups: _Groups = [(h,) for h in range(num_heads)]
    while len(groups) > count:
        pairs = [(a, b) for a, b in combinations(groups, 2) if len(a) + len(b) <= largest]
        # e.g. sizes 3, 3, 2 under a limit of 4: open the smallest group and place its heads one by
        # one.
        if not pairs:
            groups = _dissolved(cost, groups, largest)
            continue
        a, b = min(
            pairs, key=lambda p: (cost.cost(_union(*p)) - cost.cost(p[0]) - cost.cost(p[1]), p)
        )
        groups = [group for group in groups if group not in (a, b)] + [_union(a, b)]
    return groups


def _dissolved(cost: GroupCost, groups: _Groups, largest: int) -> _Groups:
    smallest = min(groups, key=lambda group: (len(group), group))
    rest = [group for group in groups if group != smallest]
    for head in smallest:
        room = [group for group in rest if len(group) < largest]
        best = min(
            room, key=lambda group: (cost.cost(_union(group, (head,))) - cost.cost(group), group)
        )
        rest = [_union(group, (head,)) if group == best else group for group in rest]
    return rest


def _union(a: Members, b: Members) -> Members:
    return tuple(sorted(a + b))


def improved(cost: GroupCost, groups: _Groups, may_move: bool, max_passes: int) -> _Groups:
    """Make the best swap (or move) between two groups until none lowers the cost; return `groups`.

    They are changed in place.
    """
    for _ in range(max_passes):
        changes = list(changes_of(cost, groups, may_move))
        if not changes:
            break
        change, i, j, new_i, new_j = min(changes)
        if change >= -1e-12 * max(1.0, abs(cost.score(canonical(groups)))):
            break
        groups[i] = new_i
        groups[j] = new_j
    return groups


def changes_of(
    cost: GroupCost, groups: _Groups, may_move: bool
) -> Iterator[tuple[float, int, int, Members, Members]]:
    """Every swap (and every move) between two groups.

    (increase of the cost, i, j, new group i, new group j).
    """
    for i, j in combinations(range(len(groups)), 2):
        for a in groups[i]:
            for b in groups[j]:
                increase = cost.swap_change(groups[i], groups[j], a, b)
                yield increase, i, j, exchanged(groups[i], a, b), exchanged(groups[j], b, a)
        if may_move:
            for source, target in ((i, j), (j, i)):
                for head in groups[source] if len(groups[source]) > 1 else ():
                    left = tuple(h for h in groups[source] if h != head)
                    grown = _union(groups[target], (head,))
                    before = cost.cost(groups[source]) + cost.cost(groups[target])
                    yield cost.cost(left) + cost.cost(grown) - before, source, target, left, grown


@GROUPING.part(
    "merge",
    source="ours: hierarchical merging and local search on an additive group cost",
    knobs=(
        replace(EQUAL_SIZES, searched=True),
        Knob("max_passes", "int", "improving moves at most", low=0, high=100_000),
    ),
    needs=("objective", "group_cost"),
)
def merge(
    problem: GroupingProblem,
    generator: np.random.Generator,
    *,
    equal_sizes: bool = True,
    max_passes: int = 100,
) -> Grouping:
    """Without chance: merge the cheapest pair until G groups remain, then improve.

    Improving takes the best single move (not with `equal_sizes`) or swap of two groups until none
    lowers the cost, `max_passes` times at most.
    """
    cost = problem.need_cost()
    heads = problem.num_heads
    groups = problem.groups
    merged = _merged(cost, heads, groups, largest_group(heads, groups, equal_sizes))
    partition = canonical(improved(cost, merged, not equal_sizes, max_passes))
    return Grouping(partition, cost.score(partition))
