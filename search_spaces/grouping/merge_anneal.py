"""Merging, then annealing from there, on an additive group cost.

For more heads than the exact programme takes.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from attention.axes import Knob
from search_spaces.axes import GROUPING
from search_spaces.costs import GroupCost, Members, exchanged
from search_spaces.grouping.merge import improved, merge
from search_spaces.grouping.problem import EQUAL_SIZES, Grouping, GroupingProblem
from search_spaces.grouping.unions import regrouped
from search_spaces.partitions import canonical, random_partition

_STEPS = 4000  # of annealing
_ROUNDS = 8  # or more, where a round would have more steps than ROUND
ROUND = 500
COLDEST = 0.02  # last temperature, relative to the first: below it hardly a step is accepted
# Groups that are priced after merging, at most: where a cost is dear this is what takes the time.
PRICES = 6000
SHARE = 0.75  # of the remaining prices, for one local search
PROBES = 64  # random steps from which the first temperature is taken


def _annealed(
    cost: GroupCost,
    groups: list[Members],
    may_move: bool,
    steps: int,
    generator: np.random.Generator,
    limit: int,
) -> list[Members]:
    """Return the best partition visited. Ends early when `limit` groups have been priced."""
    changes = [_step(cost, groups, may_move, generator)[0] for _ in range(PROBES)]
    first = float(np.mean(np.abs(changes)))
    if first == 0:
        return groups
    best = list(groups)
    total = 0.0
    least = 0.0
    for index in range(steps):
        if cost.priced >= limit:
            break
        temperature = first * COLDEST ** (index / steps)
        increase, i, j, new_i, new_j = _step(cost, groups, may_move, generator)
        if increase < 0 or math.exp(-increase / temperature) > generator.random():
            groups[i] = new_i
            groups[j] = new_j
            total += increase
            if total < least:
                best = list(groups)
                least = total
    return best


def _step(
    cost: GroupCost, groups: list[Members], may_move: bool, generator: np.random.Generator
) -> tuple[float, int, int, Members, Members]:
    """Return a random swap or move between two groups.

    (increase of the cost, i, j, new group i, new group j).
    """
    i, j = (int(g) for g in generator.choice(len(groups), size=2, replace=False))
    a = groups[i][int(generator.integers(len(groups[i])))]
    if may_move and len(groups[i]) > 1 and generator.random() < 0.5:
        left = tuple(h for h in groups[i] if h != a)
        grown = tuple(sorted((*groups[j], a)))
        increase = cost.cost(left) + cost.cost(grown) - cost.cost(groups[i]) - cost.cost(groups[j])
        return increase, i, j, left, grown
    b = groups[j][int(generator.integers(len(groups[j])))]
    increase = cost.swap_change(groups[i], groups[j], a, b)
    return increase, i, j, exchanged(groups[i], a, b), exchanged(groups[j], b, a)


@GROUPING.part(
    "merge_anneal",
    source="ours: hierarchical merging, then annealing on an additive group cost",
    knobs=(
        replace(EQUAL_SIZES, searched=True),
        Knob(
            "steps", "int", "annealing steps after merging, over all rounds", low=0, high=10_000_000
        ),
    ),
    needs=("objective", "group_cost"),
)
def merge_anneal(
    problem: GroupingProblem,
    generator: np.random.Generator,
    *,
    equal_sizes: bool = True,
    steps: int = _STEPS,
) -> Grouping:
    """Merge pairs (`merge`), then anneal in rounds with local search; return the best partition.

    Steps are swaps, and moves too if sizes may differ. The temperature starts at the mean change of
    cost over random steps, so that the unit of the cost does not matter, and falls geometrically;
    it starts again in each round, alternately from the best partition and from a random one. Local
    search ends with exact re-partitions of a few groups at a time
    (`search_spaces.grouping.unions`). At most `PRICES` groups are priced in addition to those of
    the plain local searches at both ends.
    """
    return annealed_rounds(problem, generator, equal_sizes=equal_sizes, steps=steps)


def annealed_rounds(
    problem: GroupingProblem,
    generator: np.random.Generator,
    *,
    equal_sizes: bool,
    steps: int = _STEPS,
    prices: int = PRICES,
) -> Grouping:
    """Run `merge_anneal` with another number of prices."""
    cost = problem.need_cost().afresh()
    groups = problem.groups
    start = merge(replace(problem, objective=cost), generator, equal_sizes=equal_sizes)
    if groups in (1, problem.num_heads) or not steps:
        return start
    limit = cost.priced + prices

    def settled(groups: list[Members]) -> list[Members]:
        prices = int(SHARE * (limit - cost.priced))
        return regrouped(cost, groups, equal_sizes=equal_sizes, generator=generator, prices=prices)

    best = settled(list(start.partition))
    rounds = max(_ROUNDS, steps // ROUND)
    for turn in range(rounds):
        if cost.priced >= limit:
            break
        begin = (
            list(random_partition(problem.num_heads, groups, generator)) if turn % 2 else list(best)
        )
        share = steps * (turn + 1) // rounds - steps * turn // rounds
        annealed = _annealed(cost, begin, not equal_sizes, share, generator, limit)
        best = min(best, settled(annealed), key=lambda groups: -cost.score(canonical(groups)))
    # Unions that were too large to be tried: the best single steps there.
    partition = canonical(improved(cost, best, not equal_sizes, 100))
    return Grouping(partition, cost.score(partition))
