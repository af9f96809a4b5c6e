"""Partitions of heads into groups: the value that every grouping returns.

A partition is a tuple of groups, a group a tuple of head indices. Canonical: members ascend, groups are sorted by
their first member. Equal partitions are therefore equal tuples, in any process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Partition = tuple[tuple[int, ...], ...]


def canonical(groups: Iterable[Iterable[int]]) -> Partition:
    """Members ascending, groups by first member; empty groups are dropped."""
    return tuple(sorted(tuple(sorted(int(h) for h in group)) for group in groups if group))


def check_groups(num_heads: int, groups: int) -> None:
    """Raise ValueError unless `num_heads` heads can form `groups` non-empty groups."""
    if not 1 <= groups <= num_heads:
        raise ValueError(f"{num_heads} heads can form 1 to {num_heads} groups, got {groups}")


def group_sizes(num_heads: int, groups: int) -> list[int]:
    """Sizes that differ by at most one, larger ones first: 7 heads in 3 groups are [3, 2, 2]."""
    check_groups(num_heads, groups)
    small, more = divmod(num_heads, groups)
    return [small + 1] * more + [small] * (groups - more)


def cut(order: Sequence[int], groups: int) -> Partition:
    """Consecutive pieces of `order`, of sizes that differ by at most one."""
    pieces, start = [], 0
    for size in group_sizes(len(order), groups):
        pieces.append(order[start : start + size])
        start += size
    return canonical(pieces)


def random_partition(num_heads: int, groups: int, generator: np.random.Generator) -> Partition:
    """A uniformly drawn partition into groups of (nearly) equal size."""
    return cut([int(h) for h in generator.permutation(num_heads)], groups)


def expand(partition: Partition, units: Sequence[Sequence[int]]) -> Partition:
    """A partition of units (stored KV heads) as the partition of the query heads that read them."""
    return canonical([h for unit in group for h in units[unit]] for group in partition)
