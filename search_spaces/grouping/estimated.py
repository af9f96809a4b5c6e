"""Grouping by estimates of a cost that is expensive, each closer than the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from search_spaces.costs import GroupCost, Members
from search_spaces.grouping.merge import changes_of
from search_spaces.grouping.merge_anneal import annealed_rounds
from search_spaces.grouping.problem import Grouping, GroupingProblem
from search_spaces.partitions import canonical

_PRICES = 300  # groups that annealing on the first estimate prices
TRIED = 24  # changes per step that the closer estimate prices
_MOST_STEPS = 60
NOTABLE = 1e-3  # least relative decrease of the cost by a step: estimates are not more exact

_Groups = list[Members]


def by_estimates(
    problem: GroupingProblem, generator: np.random.Generator, *, equal_sizes: bool
) -> Grouping:
    """Merge and anneal on the first of the cost's `estimates`, then refine with each further one.

    A further one prices the swaps and moves that the one before ranks best. The score is by the
    last of them: the cost itself would take longer than the search.
    """
    cost = problem.need_cost()
    guide, *closer = (estimate() for estimate in cost.estimates)
    start = annealed_rounds(
        replace(problem, objective=guide), generator, equal_sizes=equal_sizes, prices=_PRICES
    )
    groups = list(start.partition)
    for estimate in closer:
        groups = screened(estimate, guide, groups, may_move=not equal_sizes)
        guide = estimate
    partition = canonical(groups)
    return Grouping(partition, guide.score(partition))


def screened(cost: GroupCost, guide: GroupCost, groups: _Groups, *, may_move: bool) -> _Groups:
    """Return `groups` after the best changes by `cost`, among those that `guide` ranks first.

    It ends when none of the `TRIED` first ones helps.
    """
    groups = list(groups)
    for _ in range(_MOST_STEPS):
        first = sorted(changes_of(guide, groups, may_move))[:TRIED]
        increases = _increases(cost, groups, first)
        if not first or min(increases) >= NOTABLE * cost.score(canonical(groups)):
            break
        _, i, j, new_i, new_j = first[int(np.argmin(increases))]
        groups[i] = new_i
        groups[j] = new_j
    return groups


def _increases(
    cost: GroupCost, groups: _Groups, changes: Sequence[tuple[float, int, int, Members, Members]]
) -> list[float]:
    def change(groups: Sequence[Members], by: Sequence[Members]) -> float:
        return sum(cost.costs(by)) - sum(cost.costs(groups))

    return [change((groups[i], groups[j]), (new_i, new_j)) for _, i, j, new_i, new_j in changes]
