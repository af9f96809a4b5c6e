"""Partitions of heads into groups: the value that every grouping returns.

A partition is a tuple of groups, a group a tuple of head indices. Canonical: members ascend, groups
are sorted by their first member. Equal partitions are therefore equal tuples, in any process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

Partition = tuple[tuple[int, ...], ...]
Sizes = Callable[[int, int], Sequence[int]]
"""From heads and groups to the sizes of the groups."""


def canonical(groups: Iterable[Iterable[int]]) -> Partition:
    """Members ascending, groups by first member; empty groups are dropped."""
    return tuple(sorted(tuple(sorted(int(h) for h in group)) for group in groups if group))


def largest_group(num_heads: int, groups: int, equal_sizes: bool) -> int:
    """Return the number of members of the largest group allowed.

    With `equal_sizes` it is the least that so many groups can have.
    """
    return -(-num_heads // groups) if equal_sizes else num_heads - groups + 1


def check_groups(num_heads: int, groups: int) -> None:
    """Raise ValueError unless `num_heads` heads can form `groups` non-empty groups."""
    if not 1 <= groups <= num_heads:
        raise ValueError(f"{num_heads} heads can form 1 to {num_heads} groups, got {groups}")


def group_sizes(num_heads: int, groups: int) -> list[int]:
    """Sizes that differ by at most one, larger ones first: 7 heads in 3 groups are [3, 2, 2]."""
    check_groups(num_heads, groups)
    small, more = divmod(num_heads, groups)
    return [small + 1] * more + [small] * (groups - more)


def full_sizes(num_heads: int, groups: int) -> list[int]:
    """Return sizes of as many full groups as fit, and of one smaller group for the rest.

    AsymGQA, Alg. 1: `P[i : i + m]`, and Table 1. 32 heads in 6 groups are [6, 6, 6, 6, 6, 2], in 11
    groups ten of 3 and one of 2. Where no size m gives so many groups (8 heads in 5), sizes differ
    by at most one, as in `group_sizes`.
    """
    check_groups(num_heads, groups)
    size = -(-num_heads // groups)
    rest = num_heads - size * (groups - 1)
    return [size] * (groups - 1) + [rest] if rest > 0 else group_sizes(num_heads, groups)


def cut_into(order: Sequence[int], sizes: Sequence[int]) -> Partition:
    """Consecutive pieces of `order`, of these sizes."""
    pieces: list[Sequence[int]] = []
    start = 0
    for size in sizes:
        pieces.append(order[start : start + size])
        start += size
    return canonical(pieces)


def random_partition(
    num_heads: int, groups: int, generator: np.random.Generator, sizes: Sizes = group_sizes
) -> Partition:
    """Return a uniformly drawn partition into groups of (nearly) equal or given `sizes`."""
    return cut_into([int(h) for h in generator.permutation(num_heads)], sizes(num_heads, groups))


def expand_units(partition: Partition, units: Sequence[Sequence[int]]) -> Partition:
    """Return a partition of units (stored KV heads) as the partition of their query heads."""
    return canonical([h for unit in group for h in units[unit]] for group in partition)
