"""The accept / reset / preserve walk over groupings, symmetric (sizes kept) and asymmetric.

Legend: n heads, a the head that moves, b one of the k heads most similar to it in other groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from attention.axes import Knob
from search_spaces.axes import GROUPING
from search_spaces.grouping.problem import Grouping, GroupingProblem
from search_spaces.partitions import Partition, canonical, random_partition


class WalkStep(NamedTuple):
    """One iteration: the partition tried, its score, the best score so far, whether the walk went there, whether the
    walk was reset before it."""

    partition: Partition
    score: float
    best: float
    accepted: bool
    reset: bool


def propose(
    partition: Partition,
    similarity: np.ndarray,
    *,
    preserve: float,
    neighbours: int,
    generator: np.random.Generator,
    symmetric: bool = False,
) -> Partition:
    """One move of the walk (paper 003, App. A, Alg. 1 and 2). At least two groups.

    A random head a goes to the group of b, one of its `neighbours` most similar heads outside its own group. In return
    a random member of that group, possibly b itself, takes the place of a: always if `symmetric`, else with
    probability `preserve`, and always when a is alone, since a group may not vanish. (The paper's text has a larger
    `preserve` unbalance more, its pseudo-code less; this follows the pseudo-code.)
    """
    owner = {head: index for index, group in enumerate(partition) for head in group}
    a = int(generator.integers(len(owner)))
    home = owner[a]
    outside = [h for h in range(len(owner)) if owner[h] != home]
    # Ties go to the lower head: the order must not depend on the machine's sort.
    nearest = sorted(outside, key=lambda h: (-similarity[a, h], h))[:neighbours]
    b = nearest[int(generator.integers(len(nearest)))]
    target = owner[b]
    keeps_sizes = generator.random() < preserve
    groups = [list(group) for group in partition]
    if symmetric or keeps_sizes or len(groups[home]) == 1:
        back = groups[target][int(generator.integers(len(groups[target])))]
        groups[target].remove(back)
        groups[home].append(back)
    groups[home].remove(a)
    groups[target].append(a)
    return canonical(groups)


def asym_walk(
    similarity: np.ndarray,
    score: Callable[[Partition], float],
    groups: int,
    *,
    iterations: int = 10,
    accept: float = 0.1,
    reset: float = 0.1,
    preserve: float = 0.2,
    neighbours: int = 3,
    generator: np.random.Generator,
    symmetric: bool = False,
) -> Grouping:
    """Search a partition of high score (paper 003, App. A, Alg. 1 and 2, with the defects named in `propose` mended).

    `similarity` `[n, n]`, higher is closer; `score(partition)`, higher is better, any sign (the best starts at none).
    The walk starts, and restarts with probability `reset` before an iteration, at random groups of equal size (sizes
    differ by one where `groups` does not divide n), also when asymmetric. It moves to what it tried if that beats the
    best, or with probability `accept`. Returns (best partition, best score, trace of `WalkStep`).

    Raises ValueError for an impossible number of groups or a score that is not a number.
    """
    similarity = np.asarray(similarity, dtype=np.float64)
    count = len(similarity)
    if iterations < 1 or neighbours < 1:
        raise ValueError(f"iterations and neighbours must be at least 1, got {iterations} and {neighbours}")
    current = random_partition(count, groups, generator)
    if groups == 1 or groups == count:  # there is nothing to choose
        return Grouping(current, float(score(current)))
    best: Partition | None = None
    best_score = -np.inf
    trace = []
    for _ in range(iterations):
        was_reset = generator.random() < reset
        if was_reset:
            current = random_partition(count, groups, generator)
        tried = propose(
            current, similarity, preserve=preserve, neighbours=neighbours, generator=generator, symmetric=symmetric
        )
        value = float(score(tried))
        if np.isnan(value):
            raise ValueError(f"the score of {tried} is not a number; check the model and the data it was measured on")
        better = best is None or value > best_score
        accepted = generator.random() < accept or better
        if better:
            best, best_score = tried, value
        if accepted:
            current = tried
        trace.append(WalkStep(tried, value, best_score, accepted, was_reset))
    assert best is not None
    return Grouping(best, best_score, tuple(trace))


_KNOBS = (
    Knob("iterations", "int", 10, "moves tried a layer and side", low=1, high=100_000),
    Knob("accept", "float", 0.1, "probability of moving to what is not better", low=0.0, high=1.0),
    Knob("reset", "float", 0.1, "probability of starting over before a move", low=0.0, high=1.0),
    Knob("neighbours", "int", 3, "most similar heads that a move chooses from", low=1, high=1024),
)
_PRESERVE = Knob(
    "preserve", "float", 0.2, "probability that a move keeps the group sizes", low=0.0, high=1.0, searched=True
)


def _walk(problem: GroupingProblem, generator: np.random.Generator, symmetric: bool, knobs: dict[str, Any]) -> Grouping:
    score = problem.need_objective().score
    return asym_walk(
        problem.need_similarity(), score, problem.groups, generator=generator, symmetric=symmetric, **knobs
    )


@GROUPING.part(
    "walk_symmetric",
    source="Chen 2024 (paper 003), sec. 2.1, Alg. 1",
    knobs=_KNOBS,
    needs=("similarity", "objective", "equal_groups"),
)
def walk_symmetric(problem: GroupingProblem, generator: np.random.Generator, **knobs: Any) -> Grouping:
    """The walk by swaps: group sizes are kept."""
    return _walk(problem, generator, True, knobs)


@GROUPING.part(
    "walk_asymmetric",
    source="Chen 2024 (paper 003), sec. 2.1, Alg. 2",
    knobs=(*_KNOBS, _PRESERVE),
    needs=("similarity", "objective"),
)
def walk_asymmetric(problem: GroupingProblem, generator: np.random.Generator, **knobs: Any) -> Grouping:
    """The walk with groups of any size."""
    return _walk(problem, generator, False, knobs)
