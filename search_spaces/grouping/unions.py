"""Local search whose step is exact.

A few groups at once are dissolved and partitioned anew, the best way there is.

Legend: k groups taken together, m heads in their union.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from search_spaces.costs import GroupCost, Members
from search_spaces.grouping.subsets import exact_partition

_TOGETHER = (2, 3)  # groups taken at once
UNION = 12  # heads in a union at most
WORK = 1 << 14  # subsets of heads looked at in one search

_Groups = list[Members]


def regrouped(
    cost: GroupCost,
    groups: _Groups,
    *,
    equal_sizes: bool,
    generator: np.random.Generator,
    prices: int,
    work: int = WORK,
) -> _Groups:
    """Return `groups` after exact re-partitions of pairs and triples of groups.

    It ends when none helps or the work is spent. The number of groups stays, and their sizes with
    `equal_sizes`. A union of m heads is work of `2^m` subsets, and may be as many groups to price,
    at most `prices` in all. The smallest unions come first, in random order.
    """
    limit = cost.priced + prices
    # Sets of groups that are the best partition of their union.
    settled: set[frozenset[Members]] = set()
    while open_sets := _open(groups, settled):
        generator.shuffle(open_sets)
        for union in sorted(open_sets, key=_size):
            if not set(union) <= set(groups):
                continue  # one of them has changed meanwhile
            subsets = 1 << _size(union)
            work -= subsets
            if work < 0 or cost.priced + subsets > limit:
                return groups
            new = _best(cost, union, equal_sizes)
            before, after = (sum(cost.cost(group) for group in some) for some in (union, new))
            if after < before - 1e-12 * abs(before):
                groups = [group for group in groups if group not in union] + new
                settled.add(frozenset(new))
            else:
                settled.add(frozenset(union))
    return groups


def _size(groups: tuple[Members, ...]) -> int:
    return sum(len(group) for group in groups)


def _open(remaining: _Groups, settled: set[frozenset[Members]]) -> list[tuple[Members, ...]]:
    sets = [groups for k in _TOGETHER for groups in combinations(sorted(remaining), k)]
    return [
        groups
        for groups in sets
        if len(groups) < _size(groups) <= UNION and frozenset(groups) not in settled
    ]


def _best(cost: GroupCost, groups: tuple[Members, ...], equal_sizes: bool) -> _Groups:
    """Return the best partition of the union of `groups` into as many."""
    heads = sorted(head for group in groups for head in group)

    def named(members: Members) -> Members:
        return tuple(heads[index] for index in members)

    group_cost = GroupCost(lambda members: cost.cost(named(members)))
    best = exact_partition(group_cost, len(heads), equal_sizes=equal_sizes, groups=[len(groups)])[
        len(groups)
    ]
    return [named(members) for members in best.partition]
