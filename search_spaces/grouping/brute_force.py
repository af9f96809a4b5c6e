"""Every partition of a few heads, scored: what walks are compared with.

Legend: n heads, k groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from search_spaces.axes import GROUPING
from search_spaces.grouping.problem import EQUAL_SIZES, Grouping, GroupingProblem
from search_spaces.partitions import Partition, largest_group

MOST = 20_000
"""Partitions to score: 8 heads have 1,701 into four groups, 10 have 42,525 into five."""
_BATCH = 256


def all_partitions(num_heads: int, groups: int, largest: int) -> Iterator[Partition]:
    """Yield every partition of n heads into k groups of at most `largest` members.

    In canonical form, each once.
    """

    def extended(head: int, prefix: list[list[int]]) -> Iterator[Partition]:
        if head == num_heads:
            if len(prefix) == groups:
                yield tuple(map(tuple, prefix))
            return
        if len(prefix) + num_heads - head < groups:
            return
        for group in prefix:
            if len(group) < largest:
                group.append(head)
                yield from extended(head + 1, prefix)
                group.pop()
        if len(prefix) < groups:
            yield from extended(head + 1, [*prefix, [head]])

    yield from extended(0, [])


@GROUPING.part(
    "brute_force",
    source="Chen 2024 (AsymGQA), App. B, Table 2",
    knobs=(EQUAL_SIZES,),
    needs=("objective", "few_heads"),
)
def brute_force(
    problem: GroupingProblem, generator: np.random.Generator, *, equal_sizes: bool = False
) -> Grouping:
    """Return the partition of the highest score among all.

    Raises:
        ValueError: If there are more than `MOST`.
    """
    heads = problem.num_heads
    largest = largest_group(heads, problem.groups, equal_sizes)
    candidates = list(itertools.islice(all_partitions(heads, problem.groups, largest), MOST + 1))
    if len(candidates) > MOST:
        raise ValueError(
            f"brute_force scores all partitions, and {heads} heads have more than {MOST:,} into "
            f"{problem.groups} groups; take another grouping, e.g. walk_asymmetric or exact"
        )
    objective = problem.need_objective()
    scores = [
        score
        for start in range(0, len(candidates), _BATCH)
        for score in objective.scores(candidates[start : start + _BATCH])
    ]
    best = int(np.argmax(scores))
    return Grouping(candidates[best], float(scores[best]))
