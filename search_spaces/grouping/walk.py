"""The accept / reset / preserve walk over groupings, symmetric (sizes kept) and asymmetric.

Legend: n heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attention.axes import Knob
from search_spaces.axes import GROUPING
from search_spaces.grouping.problem import EQUAL_SIZES, Grouping, GroupingProblem
from search_spaces.grouping.steps import Walk
from search_spaces.partitions import Partition


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
    """Search a partition of high score by a random walk (AsymGQA, App. A, Alg. 1 and 2).

    The defects that are named in `propose` are mended. The walk starts, and restarts with
    probability `reset` before an iteration, at random groups of `full_sizes`, also when asymmetric.
    It moves to what it tried if that beats the best, or with probability `accept`. Its trace are
    `WalkStep`s.

    Args:
        similarity: `[n, n]`, higher is closer.
        score: Of a partition; higher is better, any sign.

    Raises:
        ValueError: For an impossible number of groups or a score that is not a number.
    """
    similarity = np.asarray(similarity, dtype=np.float64)
    count = len(similarity)
    if iterations < 1 or neighbours < 1:
        raise ValueError(
            f"iterations and neighbours must be at least 1, got {iterations} and {neighbours}"
        )
    walk = Walk(count, groups, generator, accept, reset, preserve, neighbours, symmetric)
    if groups == 1 or groups == count:  # only one partition is possible
        return Grouping(walk.current, float(score(walk.current)))
    for _ in range(iterations):
        walk.tell(float(score(walk.propose_next(similarity))))
    assert walk.best is not None
    return Grouping(walk.best, walk.best_score, tuple(walk.trace))


_KNOBS = (
    Knob("iterations", "int", "moves tried per layer and side", low=1, high=100_000),
    Knob("accept", "float", "probability of moving to what is not better", low=0.0, high=1.0),
    Knob("reset", "float", "probability of starting over before a move", low=0.0, high=1.0),
    Knob("neighbours", "int", "most similar heads that a move chooses from", low=1, high=1024),
)
_PRESERVE = Knob(
    "preserve",
    "float",
    "probability that a move keeps the group sizes",
    low=0.0,
    high=1.0,
    searched=True,
)


def _walk(
    problem: GroupingProblem, generator: np.random.Generator, symmetric: bool, knobs: dict[str, Any]
) -> Grouping:
    score = problem.need_objective().score
    return asym_walk(
        problem.need_similarity(),
        score,
        problem.groups,
        generator=generator,
        symmetric=symmetric,
        **knobs,
    )


@GROUPING.part(
    "walk_symmetric",
    source="Chen 2024 (AsymGQA), sec. 2.1, Alg. 1",
    knobs=(*_KNOBS, EQUAL_SIZES),
    needs=("similarity", "objective"),
    passes_to=asym_walk,
)
def walk_symmetric(
    problem: GroupingProblem,
    generator: np.random.Generator,
    *,
    equal_sizes: bool = True,
    **knobs: Any,
) -> Grouping:
    """Return the walk by swaps, which keep group sizes.

    Without `equal_sizes` one group may be smaller than the others, as in Table 1 (sizes of 3 and 6
    for 32 heads).
    """
    return _walk(problem, generator, True, knobs)


@GROUPING.part(
    "walk_asymmetric",
    source="Chen 2024 (AsymGQA), sec. 2.1, Alg. 2",
    knobs=(*_KNOBS, _PRESERVE),
    needs=("similarity", "objective"),
    passes_to=asym_walk,
)
def walk_asymmetric(
    problem: GroupingProblem, generator: np.random.Generator, **knobs: Any
) -> Grouping:
    """Return the walk with groups of any size."""
    return _walk(problem, generator, False, knobs)
