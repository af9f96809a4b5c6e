"""Fronts of points: worked examples, and agreement with slow definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from search_spaces import pareto


def dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def slow_ranks(values: list[tuple[float, ...]]) -> list[int]:
    """By the definition: take the points that no other one left dominates, then those of the rest."""
    result, remaining, rank = [-1] * len(values), set(range(len(values))), 0
    while remaining:
        front = {i for i in remaining if not any(dominates(values[j], values[i]) for j in remaining)}
        for i in front:
            result[i] = rank
        remaining, rank = remaining - front, rank + 1
    return result


def test_ranks_worked() -> None:
    """(loss, bytes): 2.0 at 8, 3.0 at 4 and 4.0 at 2 are the front; 3.5 at 4 is dominated by 3.0 at 4 alone."""
    assert pareto.ranks([(2.0, 8), (3.0, 4), (3.5, 4), (4.0, 2), (3.6, 8)]) == [0, 0, 1, 0, 2]
    assert pareto.ranks([(1.0, 1), (1.0, 1), (1.0, 2)]) == [0, 0, 1]  # equal points share a rank
    assert pareto.ranks([(3.0,), (1.0,), (2.0,), (1.0,)]) == [2, 0, 1, 0]
    assert pareto.ranks([]) == []


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
@pytest.mark.parametrize("levels", [3, 1000])
def test_ranks_agree_with_the_definition(objectives: int, levels: int) -> None:
    generator = np.random.default_rng(objectives * 7 + levels)
    for count in range(1, 40):
        values = [tuple(row) for row in generator.integers(levels, size=(count, objectives)).tolist()]
        assert pareto.ranks(values) == slow_ranks(values)


def test_crowding_worked() -> None:
    """Deb 2002: of (0,10) (1,6) (2,5) (10,0), the second has gaps 2/10 and 5/10, the third 9/10 and 6/10."""
    assert pareto.crowding([(0, 10), (1, 6), (2, 5), (10, 0)]) == pytest.approx([math.inf, 0.7, 1.5, math.inf])
    assert pareto.crowding([(1, 1), (1, 1), (1, 1)])[1] == 0.0


def test_epsilon_net_worked() -> None:
    """From (0,10) the farthest is (10,0); then (2,5), which is 0.54 and 0.94 from them, before (1,6): 0.41."""
    points = [(0, 10), (1, 6), (2, 5), (10, 0)]
    assert pareto.epsilon_net(points, 4) == [0, 3, 2, 1]
    assert pareto.epsilon_net(points, 2) == [0, 3]
    assert pareto.epsilon_net([(1, 1), (1, 1)], 2) == [0, 1]


def slow_net(points: list[list[float]], count: int) -> list[int]:
    """The definition, word for word: always the farthest of those left, in shares of the ranges."""
    columns = list(zip(*points, strict=True))
    shares = [[(x - min(c)) / ((max(c) - min(c)) or 1.0) for x, c in zip(p, columns, strict=True)] for p in points]
    chosen = [min(range(len(points)), key=lambda i: shares[i])]
    while len(chosen) < count:
        remaining = [i for i in range(len(points)) if i not in chosen]
        chosen.append(max(remaining, key=lambda i: min(math.dist(shares[i], shares[t]) for t in chosen)))
    return chosen


@pytest.mark.parametrize("count", [1, 2, 5, 8, 9, 20])
def test_epsilon_net_is_as_defined_for_few_points_and_for_many(count: int) -> None:
    generator = np.random.default_rng(5)
    for objectives in (1, 2, 3):
        points = generator.normal(size=(count, objectives)).tolist()
        for kept in range(1, count + 1):
            assert pareto.epsilon_net(points, kept) == slow_net(points, kept)


def test_selection_worked() -> None:
    """Four points on the front, two dominated: three places go to the ends and to the least crowded."""
    points = [(0, 10), (1, 6), (2, 5), (10, 0), (3, 7), (11, 11)]
    assert pareto.select_best(points, 3) == [0, 3, 2]
    assert pareto.select_best(points, 3, ties="epsilon_net") == [0, 3, 2]
    assert pareto.select_best(points, 5)[-1] == 4
    assert set(pareto.select_best(points, 6)) == set(range(6)) and pareto.select_best(points, 6)[-1] == 5
    assert pareto.select_best(points, 0) == []
    with pytest.raises(ValueError, match="ties must be one of crowding, epsilon_net"):
        pareto.select_best(points, 1, ties="random")


@pytest.mark.parametrize("ties", pareto.TIES)
def test_nothing_kept_is_of_a_higher_rank_than_something_left(ties: str) -> None:
    generator = np.random.default_rng(1)
    for count, keep in itertools.product((5, 17, 30), (1, 4, 11)):
        values = generator.normal(size=(count, 2)).tolist()
        kept, rank = pareto.select_best(values, keep, ties), pareto.ranks(values)
        assert len(kept) == len(set(kept)) == min(keep, count)
        remaining = set(range(count)) - set(kept)
        assert not remaining or max(rank[i] for i in kept) <= min(rank[i] for i in remaining)


def test_one_objective_is_a_sort() -> None:
    values = np.random.default_rng(0).normal(size=(20, 1)).tolist()
    for ties in pareto.TIES:
        assert pareto.select_best(values, 7, ties) == np.argsort([v for (v,) in values])[:7].tolist()


def test_hypervolume_worked() -> None:
    """Steps up to (4, 4): (1, 3) gives 3 x 1, (2, 1) gives 2 x 2 more; (3, 3) and (5, 0) give nothing."""
    assert pareto.hypervolume([(1, 3), (2, 1), (3, 3), (5, 0)], (4, 4)) == 7.0
    assert pareto.hypervolume([], (4, 4)) == 0.0
    with pytest.raises(ValueError, match="two objectives"):
        pareto.hypervolume([(1, 2, 3)], (4, 4, 4))


def test_hypervolume_agrees_with_counted_cells() -> None:
    points = np.random.default_rng(2).integers(0, 12, size=(9, 2))
    cells = [(x, y) for x in range(10) for y in range(10) if any((p <= (x, y)).all() for p in points)]
    assert pareto.hypervolume(points.tolist(), (10, 10)) == len(cells)
