"""Groupings on an additive cost: exact against brute force, the others against exact."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.costs import GroupCost, PairCost
from search_spaces.grouping import anneal, anneal_restarts, exact_partition, merge_and_improve
from search_spaces.partitions import canonical, random_partition


def all_partitions(items: list[int]):
    """Every partition, by placing the first item alone or into each group of the rest."""
    if not items:
        yield []
        return
    for rest in all_partitions(items[1:]):
        yield [[items[0]], *rest]
        for index in range(len(rest)):
            yield [*rest[:index], [items[0], *rest[index]], *rest[index + 1 :]]


def random_cost(heads: int, seed: int) -> GroupCost:
    """A cost that is no sum over pairs: a random number for every set of heads."""
    table = np.random.default_rng(seed).uniform(0, 1, 1 << heads)
    return GroupCost(lambda members: table[sum(1 << h for h in members)])


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 8])
def test_exact_against_brute_force(heads: int) -> None:
    cost = random_cost(heads, heads)
    found = exact_partition(cost, heads)
    assert sorted(found) == list(range(1, heads + 1))
    best: dict[int, tuple[float, object]] = {}
    for groups in all_partitions(list(range(heads))):
        partition = canonical(groups)
        total = -cost.score(partition)
        if len(partition) not in best or total < best[len(partition)][0]:
            best[len(partition)] = (total, partition)
    for groups, (total, partition) in best.items():
        assert found[groups].score == pytest.approx(-total)
        assert found[groups].partition == partition  # random costs have no ties


@pytest.mark.parametrize("heads", [4, 6, 8])
def test_exact_with_equal_sizes_against_brute_force(heads: int) -> None:
    cost = random_cost(heads, 10 + heads)
    found = exact_partition(cost, heads, equal_sizes=True)
    assert sorted(found) == [g for g in range(1, heads + 1) if heads % g == 0]
    for groups, answer in found.items():
        equal = [canonical(p) for p in all_partitions(list(range(heads)))]
        equal = [p for p in equal if len(p) == groups and len({len(g) for g in p}) == 1]
        assert answer.partition == max(equal, key=cost.score)


def test_exact_takes_a_matrix_of_pair_costs() -> None:
    distance = np.array([[0, 9, 1, 9], [9, 0, 9, 2], [1, 9, 0, 9], [9, 2, 9, 0]], dtype=float)
    found = exact_partition(distance, 4)
    assert found[2].partition == ((0, 2), (1, 3))
    assert found[2].score == -3.0
    assert found[3].partition == ((0, 2), (1,), (3,))


def test_exact_of_sixteen_heads_in_seconds() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.uniform(size=(16, 16))
    matrix += matrix.T
    started = time.process_time()
    found = exact_partition(matrix, 16, equal_sizes=True, groups=[4, 8])
    assert time.process_time() - started < 20
    cost = PairCost(matrix)
    for groups in (4, 8):
        random = max(cost.score(random_partition(16, groups, rng)) for _ in range(200))
        assert found[groups].score > random


def test_exact_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="1 to 16 heads, got 17"):
        exact_partition(np.zeros((17, 17)), 17)
    with pytest.raises(ValueError, match=r"\[1, 2, 3, 6\] groups of equal size, got 4"):
        exact_partition(np.zeros((6, 6)), 6, equal_sizes=True, groups=[4])


@settings(max_examples=30, deadline=None)
@given(heads=st.integers(2, 10), seed=st.integers(0, 10_000))
def test_pair_cost_shortcuts_agree_with_the_plain_sum(heads: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = PairCost(rng.normal(size=(heads, heads)))
    plain = GroupCost(lambda m: sum(pairs.pairs[i, j] for i in m for j in m if i < j))
    np.testing.assert_allclose(pairs.table(heads)[1:], plain.table(heads)[1:], atol=1e-9)
    partition = random_partition(heads, 2, rng)
    a, b = (int(rng.choice(group)) for group in partition)
    assert pairs.swap_change(*partition, a, b) == pytest.approx(plain.swap_change(*partition, a, b), abs=1e-9)


@pytest.mark.parametrize("method", [anneal, anneal_restarts])
def test_swapping_methods_keep_sizes_and_report_their_cost(method) -> None:
    rng = np.random.default_rng(0)
    for heads, groups in ((8, 2), (12, 4), (7, 3), (5, 1), (6, 6)):
        cost = random_cost(heads, heads)
        found = method(cost, heads, groups, generator=rng)
        assert sorted(h for g in found.partition for h in g) == list(range(heads))
        assert sorted(len(g) for g in found.partition)[-1] - sorted(len(g) for g in found.partition)[0] <= 1
        assert found.score == pytest.approx(cost.score(found.partition))


def test_default_annealing_is_the_papers_110_moves(monkeypatch) -> None:
    """T from 100 by 0.9 down to 0.001 (paper 000, Alg. 4)."""
    seen: list[list[float]] = []
    import sys

    from search_spaces.grouping import anneal as _  # noqa: F401  (the package's function, not the module)

    module = sys.modules["search_spaces.grouping.anneal"]
    inner = module.swap_search

    def spy(cost, start, temperatures, generator):
        temperatures = list(temperatures)
        seen.append(temperatures)
        return inner(cost, start, temperatures, generator)

    monkeypatch.setattr(module, "swap_search", spy)
    anneal(np.ones((8, 8)), 8, 2, generator=np.random.default_rng(0))
    (temperatures,) = seen
    assert len(temperatures) == 110
    assert temperatures[0] == 100 and temperatures[1] == pytest.approx(90) and temperatures[-1] > 0.001


@pytest.mark.parametrize("seed", range(3))
def test_gap_to_exact_at_twelve_heads(seed: int) -> None:
    """On a clustered pair cost: restarts reach the optimum, merging stays within 5 %, and nothing beats exact."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(4, 3))[np.arange(12) % 4] * 3 + rng.normal(size=(12, 3))
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
    best = exact_partition(distance, 12, equal_sizes=True, groups=[4])[4]
    free = exact_partition(distance, 12, groups=[4])[4]
    assert best.score is not None and free.score is not None and free.score >= best.score - 1e-9
    found = {
        "restarts": anneal_restarts(distance, 12, 4, generator=rng),
        "merge": merge_and_improve(distance, 12, 4, equal_sizes=True),
    }
    for grouping in found.values():
        assert grouping.score is not None and grouping.score <= best.score + 1e-9
        assert {len(g) for g in grouping.partition} == {3}
    assert found["restarts"].score == pytest.approx(best.score)
    assert found["merge"].score >= 1.05 * best.score  # type: ignore[operator]
    unequal = merge_and_improve(distance, 12, 4)
    assert free.score >= unequal.score - 1e-9 >= 1.25 * free.score - 1e-9  # type: ignore[operator]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_merging_meets_any_count(data: st.DataObject) -> None:
    heads = data.draw(st.integers(2, 24))
    equal = data.draw(st.booleans())
    counts = [g for g in range(1, heads + 1) if not equal or heads % g == 0]
    groups = data.draw(st.sampled_from(counts))
    matrix = np.random.default_rng(heads).uniform(size=(heads, heads))
    found = merge_and_improve(matrix, heads, groups, equal_sizes=equal, max_passes=3)
    assert sorted(h for g in found.partition for h in g) == list(range(heads))
    assert len(found.partition) == groups
    if equal:
        assert {len(g) for g in found.partition} == {heads // groups}


def test_costs_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        PairCost(np.array([[0.0, np.nan], [np.nan, 0.0]]))
