"""Searching by exchanging two heads of different groups, scored by what changes. Group sizes are kept."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from search_spaces.costs import GroupCost, exchanged
from search_spaces.grouping.problem import Grouping
from search_spaces.partitions import Partition, canonical, random_partition


def swap_search(
    cost: GroupCost, start: Partition, temperatures: Iterable[float], generator: np.random.Generator
) -> tuple[Partition, float]:
    """One exchange a temperature, kept if it lowers the cost or by chance exp(-rise / temperature).

    At temperature 0 only improvements are kept. Returns the best partition visited and its total cost.
    """
    groups = list(start)
    total = best_total = -cost.score(start)
    best = start
    for temperature in temperatures:
        i, j = (int(g) for g in generator.integers(len(groups), size=2))
        if i == j:  # as printed: a draw of twice the same group is a step without a move
            continue
        a = groups[i][int(generator.integers(len(groups[i])))]
        b = groups[j][int(generator.integers(len(groups[j])))]
        rise = cost.swap_change(groups[i], groups[j], a, b)
        chance = math.exp(-rise / temperature) if temperature > 0 and rise > 0 else 0.0
        if rise < 0 or chance > generator.random():
            groups[i], groups[j] = exchanged(groups[i], a, b), exchanged(groups[j], b, a)
            total += rise
            if total < best_total:
                best, best_total = canonical(groups), total
    # Summed afresh: the running total carries the rounding of every step.
    return best, -cost.score(best)


def best_of_runs(
    cost: GroupCost, num_heads: int, groups: int, schedules: Iterable[Iterable[float]], generator: np.random.Generator
) -> Grouping:
    """The best of one `swap_search` for each schedule of temperatures, each from a random partition."""
    runs = []
    for temperatures in schedules:
        start = random_partition(num_heads, groups, generator)
        runs.append(swap_search(cost, start, temperatures, generator))
    best, total = min(runs, key=lambda run: run[1])
    return Grouping(best, -total, tuple(-run[1] for run in runs))
