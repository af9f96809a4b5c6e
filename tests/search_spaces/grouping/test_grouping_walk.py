"""The walk: its moves one by one, its acceptance rule, and that it stays among valid partitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.grouping.steps import propose
from search_spaces.grouping.walk import asym_walk
from search_spaces.partitions import full_sizes, random_partition


class Scripted:
    """Stands in for a generator: hands out the given numbers in order."""

    def __init__(self, integers: list[int], randoms: list[float]) -> None:
        self._integers, self._randoms = iter(integers), iter(randoms)
        self.asked: list[int] = []

    def integers(self, high: int) -> int:
        self.asked.append(high)
        return next(self._integers)

    def random(self) -> float:
        return next(self._randoms)


SIMILARITY = np.array(
    [
        #  0    1    2    3    4    5
        [1.0, 0.9, 0.1, 0.8, 0.7, 0.2],
        [0.9, 1.0, 0.3, 0.2, 0.1, 0.0],
        [0.1, 0.3, 1.0, 0.5, 0.5, 0.6],
        [0.8, 0.2, 0.5, 1.0, 0.4, 0.3],
        [0.7, 0.1, 0.5, 0.4, 1.0, 0.2],
        [0.2, 0.0, 0.6, 0.3, 0.2, 1.0],
    ]
)
PAIRS = ((0, 1), (2, 3), (4, 5))


def moved(partition, integers, random, **knobs):
    generator = Scripted(integers, [random])
    options = {"preserve": 0.2, "neighbours": 2, **knobs}
    return propose(partition, SIMILARITY, generator=generator, **options), generator  # type: ignore[arg-type]


def test_the_two_most_similar_heads_outside_the_group_are_the_candidates() -> None:
    # Head 0: outside its group the most similar are 3 (.8) and 4 (.7); head 1 (.9) is inside.
    to_3, generator = moved(PAIRS, [0, 0], 0.9)
    assert generator.asked == [6, 2]
    assert to_3 == ((0, 2, 3), (1,), (4, 5))
    to_4, _ = moved(PAIRS, [0, 1], 0.9)
    assert to_4 == ((0, 4, 5), (1,), (2, 3))


def test_ties_go_to_the_lower_head() -> None:
    # Head 2: 5 (.6) first, then 4 (.5); 3 (.5) is in its own group. With 3 outside, 3 comes before 4.
    partition = ((0, 2), (1, 3), (4, 5))
    second, _ = moved(partition, [2, 1], 0.9)
    assert second == ((0,), (1, 2, 3), (4, 5))


def test_preserve_moves_another_member_of_bs_group_back() -> None:
    # Head 0 goes to 3 in (2, 3): only 2 can come back, so that 0 and 3 end together.
    kept, generator = moved(PAIRS, [0, 0, 0], 0.1)
    assert generator.asked == [6, 2, 1]
    assert kept == ((0, 3), (1, 2), (4, 5))
    # Head 0 goes to 4, the second nearest, in (3, 4, 5): 3 or 5.
    for drawn, expected in ((0, ((0, 4, 5), (1, 3), (2,))), (1, ((0, 3, 4), (1, 5), (2,)))):
        from_three, generator = moved(((0, 1), (2,), (3, 4, 5)), [0, 1, drawn], 0.1)
        assert generator.asked == [6, 2, 2]
        assert from_three == expected


def test_b_itself_comes_back_only_where_it_is_alone() -> None:
    kept, generator = moved(((0, 1, 2), (3,), (4, 5)), [0, 0, 0], 0.1)
    assert generator.asked == [6, 2, 1]
    assert kept == ((0,), (1, 2, 3), (4, 5))


@pytest.mark.parametrize("symmetric", [True, False])
def test_with_two_groups_similarity_decides_what_a_move_brings_together(symmetric: bool) -> None:
    """Eight heads in two groups, one candidate: a always ends next to the head most similar to it; and another
    similarity makes another move of the same draws. (If b itself were returned, no similarity would change
    anything.)"""
    rng = np.random.default_rng(0)
    options = {"preserve": 0.5, "neighbours": 1, "symmetric": symmetric}
    differ = 0
    for seed in range(60):
        partition = random_partition(8, 2, rng)
        result = []
        for matrix in rng.normal(size=(2, 8, 8)):
            a = int(np.random.default_rng(seed).integers(8))  # the first number that `propose` draws
            home = next(group for group in partition if a in group)
            b = max((h for h in range(8) if h not in home), key=lambda h: matrix[a, h])
            result.append(propose(partition, matrix, generator=np.random.default_rng(seed), **options))  # type: ignore[arg-type]
            assert any({a, b} <= set(group) for group in result[-1])
        differ += result[0] != result[1]
    assert differ > 8  # of 60; without a head that comes back, which b it was plays no part in two groups


def test_preserve_keeps_unequal_sizes_too() -> None:
    kept, _ = moved(((0,), (1, 2), (3, 4, 5)), [1, 1, 1], 0.1)  # head 1: outside are 0 (.9), 3 (.2)
    assert sorted(len(group) for group in kept) == [1, 2, 3]


def test_a_head_alone_in_its_group_is_swapped() -> None:
    alone, generator = moved(((0,), (1, 2), (3, 4, 5)), [0, 0, 0], 0.9)  # 0 goes to 1's group; 2 comes back
    assert generator.asked == [6, 2, 1]
    assert alone == ((0, 1), (2,), (3, 4, 5))


def test_symmetric_always_swaps() -> None:
    swapped, _ = moved(PAIRS, [0, 0, 0], 0.99, symmetric=True)
    assert swapped == ((0, 3), (1, 2), (4, 5))


def test_fewer_heads_outside_than_neighbours() -> None:
    partition = ((0, 1, 2, 3, 4), (5,))
    tried, generator = moved(partition, [0, 0], 0.9, neighbours=4)
    assert generator.asked == [6, 1]
    assert tried == ((0, 5), (1, 2, 3, 4))


def test_best_starts_at_none_so_that_negative_scores_work() -> None:
    result = asym_walk(SIMILARITY, lambda p: -1000.0 - len(p[0]), 3, generator=np.random.default_rng(0))
    assert result.score is not None and result.score < -1000
    assert result.score == max(step.score for step in result.trace)


def test_the_trace_reports_the_rule() -> None:
    """Accepted whenever better than the best; with accept=0 never else; with accept=1 always."""
    values = np.random.default_rng(1)
    for accept in (0.0, 1.0):
        result = asym_walk(
            SIMILARITY,
            lambda p: float(values.normal()),
            3,
            iterations=200,
            accept=accept,
            generator=np.random.default_rng(2),
        )
        best = -np.inf
        for step in result.trace:
            better = step.score > best
            best = max(best, step.score)
            assert step.best == best
            assert step.accepted == (better or accept == 1.0)
        assert result.score == best


def test_reset_starts_from_equal_sizes() -> None:
    """Right after a reset one move is made: sizes are at most one off from equal."""
    result = asym_walk(
        SIMILARITY,
        lambda p: 0.0,
        3,
        iterations=100,
        reset=0.5,
        preserve=0.0,
        accept=1.0,
        generator=np.random.default_rng(0),
    )
    after = [step for step in result.trace if step.reset]
    assert 20 < len(after) < 80
    assert {tuple(sorted(len(g) for g in step.partition)) for step in after} == {(1, 2, 3)}
    others = {tuple(sorted(len(g) for g in step.partition)) for step in result.trace if not step.reset}
    assert (1, 1, 4) in others


def test_scores_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="not a number"):
        asym_walk(SIMILARITY, lambda p: float("nan"), 3, generator=np.random.default_rng(0))


@pytest.mark.parametrize("symmetric", [True, False])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_geometry_stays_a_partition(symmetric: bool, data: st.DataObject) -> None:
    heads = data.draw(st.integers(2, 64))
    groups = data.draw(st.integers(1, heads))
    seed = data.draw(st.integers(0, 1000))
    matrix = np.random.default_rng(seed).normal(size=(heads, heads))
    result = asym_walk(
        matrix,
        lambda p: -float(sum(len(g) ** 2 for g in p)),
        groups,
        iterations=8,
        generator=np.random.default_rng(seed),
        symmetric=symmetric,
    )
    for partition in [result.partition, *(step.partition for step in result.trace)]:
        assert sorted(h for group in partition for h in group) == list(range(heads))
        assert len(partition) == groups
        if symmetric:
            assert sorted(map(len, partition)) == sorted(full_sizes(heads, groups))


def test_more_iterations_find_more_under_the_same_score() -> None:
    target = ((0, 5), (1, 4), (2, 3))

    def score(partition):
        return sum(group in target for group in partition)

    def mean(iterations: int) -> float:
        runs = [
            asym_walk(SIMILARITY, score, 3, iterations=iterations, generator=np.random.default_rng(s))
            for s in range(20)
        ]
        return float(np.mean([run.score for run in runs]))

    assert mean(200) > mean(5) + 0.5
