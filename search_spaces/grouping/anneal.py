"""Exchanging two heads of different groups on an additive group cost, by two published schedules.

Simulated annealing, and swaps that only improve, from many random starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from attention.axes import Knob
from search_spaces.axes import GROUPING
from search_spaces.costs import GroupCost, Members, as_cost, exchanged
from search_spaces.grouping.problem import EQUAL_SIZES, Grouping, GroupingProblem
from search_spaces.partitions import Partition, canonical, random_partition


def swap_search(
    cost: GroupCost, start: Partition, temperatures: Iterable[float], generator: np.random.Generator
) -> tuple[Partition, float]:
    """Try one exchange per temperature, accepted if it lowers the cost or by chance.

    The chance is exp(-increase / temperature); at temperature 0 only improvements are accepted.

    Returns:
        The best partition visited and its total cost.
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
        increase = cost.swap_change(groups[i], groups[j], a, b)
        chance = math.exp(-increase / temperature) if temperature > 0 and increase > 0 else 0.0
        if increase < 0 or chance > generator.random():
            groups[i], groups[j] = exchanged(groups[i], a, b), exchanged(groups[j], b, a)
            total += increase
            if total < best_total:
                best = canonical(groups)
                best_total = total
    # Summed afresh: the running total carries the rounding of every step.
    return best, -cost.score(best)


def best_of_runs(
    cost: GroupCost,
    num_heads: int,
    groups: int,
    schedules: Iterable[Iterable[float]],
    generator: np.random.Generator,
) -> Grouping:
    """Return the best result of `swap_search` over schedules of temperatures.

    Each run starts from a random partition.
    """
    runs: list[tuple[Partition, float]] = []
    for temperatures in schedules:
        start = random_partition(num_heads, groups, generator)
        runs.append(swap_search(cost, start, temperatures, generator))
    best, total = min(runs, key=lambda run: run[1])
    return Grouping(best, -total, tuple(-run[1] for run in runs))


def _schedule(start: float, end: float, cooling: float, moves: int) -> Iterator[float]:
    temperature = start
    while temperature > end:
        for _ in range(moves):
            yield temperature
        temperature *= cooling


def typical_increase(
    cost: GroupCost, partition: Partition, generator: np.random.Generator, swaps: int = 100
) -> float:
    """Return the mean increase of random exchanges that raise the cost of a partition; 0 if none.

    Args:
        cost: Of one group.
        partition: Of two or more groups.
        generator: Of the exchanges.
        swaps: How many are drawn.
    """
    increases: list[float] = []
    for _ in range(swaps):
        i, j = (int(g) for g in generator.permutation(len(partition))[:2])
        a, b = (partition[g][int(generator.integers(len(partition[g])))] for g in (i, j))
        increases.append(cost.swap_change(partition[i], partition[j], a, b))
    return float(np.mean([x for x in increases if x > 0] or [0.0]))


def anneal(
    cost: GroupCost | np.ndarray | Callable[[Members], float],
    num_heads: int,
    groups: int,
    *,
    generator: np.random.Generator,
    start_temperature: float = 100.0,
    end_temperature: float = 0.001,
    cooling: float = 0.9,
    moves: int = 1,
    restarts: int = 1,
    scaled: bool = False,
) -> Grouping:
    """Return a partition of low total cost by simulated annealing (DHA, App. B.3, Alg. 4).

    Its schedule is the default: 110 moves. Groups start equal (sizes differ by one where `groups`
    does not divide the heads) and keep their sizes. As printed the algorithm maximises a sum of
    distances and returns its last partition; the text asks for small distances within groups, so
    this minimises, and returns the best partition that it visited.

    Args:
        cost: Of one group (`GroupCost`, function of its members) or of one pair (`[n, n]` matrix, a
            distance).
        num_heads: n.
        groups: Number of groups.
        generator: For all random choices.
        start_temperature: The first temperature.
        end_temperature: The last temperature.
        cooling: Factor between two temperatures.
        moves: Moves at each temperature.
        restarts: Runs, of which the best counts.
        scaled: Whether `start_temperature` is the typical increase of an exchange, with all
            temperatures in proportion. If False, costs far below the temperatures make most of the
            schedule a random walk: at the paper's 100, exchanges of distances below 1 are accepted
            at any cost in the first 44 of its 110 moves.

    Raises:
        ValueError: For an impossible number of groups or schedule.
    """
    cools = 0 < cooling < 1 and 0 < end_temperature < start_temperature
    if not (cools and moves > 0 and restarts > 0):
        raise ValueError(
            "annealing needs 0 < cooling < 1, 0 < end_temperature < start_temperature, moves > 0 "
            f"and restarts > 0, got {cooling}, {end_temperature}, {start_temperature}, {moves}, "
            f"{restarts}"
        )
    group_cost = as_cost(cost)
    unit = 1.0
    if scaled and 1 < groups < num_heads:
        start = random_partition(num_heads, groups, generator)
        unit = typical_increase(group_cost, start, generator) / start_temperature
    schedules = (
        (unit * t for t in _schedule(start_temperature, end_temperature, cooling, moves))
        for _ in range(restarts)
    )
    return best_of_runs(group_cost, num_heads, groups, schedules, generator)


@GROUPING.part(
    "anneal",
    source="Chen 2024 (DHA), App. B.3, Alg. 4",
    knobs=(
        Knob(
            "start_temperature",
            "log_float",
            "temperature of the first move; at the paper's 100 costs below 1 make a random walk of "
            "the first 44 of 110 moves: see scaled",
            low=1e-6,
            high=1e6,
        ),
        Knob("end_temperature", "log_float", "annealing ends below it", low=1e-9, high=1e6),
        Knob("cooling", "float", "factor from one temperature to the next", low=0.01, high=0.999),
        Knob("moves", "int", "swaps tried at each temperature", low=1, high=100_000),
        Knob("restarts", "int", "runs, of which the best counts", low=1, high=10_000),
        Knob(
            "scaled",
            "bool",
            "temperatures in proportion to the costs: start_temperature stands for the mean "
            "increase of a random swap",
        ),
        EQUAL_SIZES,
    ),
    needs=("objective", "group_cost"),
    passes_to=anneal,
)
def anneal_part(
    problem: GroupingProblem,
    generator: np.random.Generator,
    *,
    equal_sizes: bool = True,
    **knobs: Any,
) -> Grouping:
    """Annealing with the paper's schedule. Without `equal_sizes` sizes may differ by one."""
    return anneal(
        problem.need_cost(), problem.num_heads, problem.groups, generator=generator, **knobs
    )


@GROUPING.part(
    "anneal_restarts",
    source="Jin 2024, sec. 3.4, Alg. 2",
    knobs=(
        Knob("moves", "int", "swaps tried in each run", low=0, high=1_000_000),
        Knob("restarts", "int", "runs, of which the best counts", low=1, high=10_000),
        EQUAL_SIZES,
    ),
    needs=("objective", "group_cost"),
)
def anneal_restarts(
    problem: GroupingProblem,
    generator: np.random.Generator,
    *,
    equal_sizes: bool = True,
    moves: int = 1000,
    restarts: int = 10,
) -> Grouping:
    """Return the best of `restarts` runs of `moves` improving swaps, each from a random start.

    Silent: the paper names neither number. Without `equal_sizes` sizes may differ by one.
    """
    schedules = [[0.0] * moves] * restarts
    return best_of_runs(
        problem.need_cost(), problem.num_heads, problem.groups, schedules, generator
    )
