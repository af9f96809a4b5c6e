"""All partitions of a few heads: as many as there are, and none is better than what is found."""

from __future__ import annotations

import numpy as np
import pytest

from search_spaces.costs import GroupCost
from search_spaces.grouping.brute_force import all_partitions, brute_force
from search_spaces.grouping.exact import exact
from search_spaces.grouping.problem import GroupingProblem
from search_spaces.grouping.walk import walk_asymmetric
from search_spaces.partitions import Partition, canonical, group_sizes


def stirling(heads: int, groups: int) -> int:
    """Stirling numbers of the second kind, by their recurrence."""
    if heads == groups or groups == 1:
        return 1
    return groups * stirling(heads - 1, groups) + stirling(heads - 1, groups - 1)


@pytest.mark.parametrize("heads", range(1, 9))
def test_each_partition_comes_once(heads: int) -> None:
    for groups in range(1, heads + 1):
        result = list(all_partitions(heads, groups, heads))
        assert len(set(result)) == len(result) == stirling(heads, groups)
        assert all(canonical(partition) == partition for partition in result)
        largest = max(group_sizes(heads, groups))
        limited = [one for one in result if max(map(len, one)) <= largest]
        assert list(all_partitions(heads, groups, largest)) == limited


def cost(seed: int) -> GroupCost:
    noise: dict[tuple[int, ...], float] = {}
    generator = np.random.default_rng(seed)
    return GroupCost(lambda members: noise.setdefault(members, float(generator.random()) * len(members) ** 2))


@pytest.mark.parametrize("equal_sizes", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8])
def test_it_finds_what_the_programme_over_subsets_finds(groups: int, equal_sizes: bool) -> None:
    problem = GroupingProblem(8, groups, objective=cost(groups))
    generator = np.random.default_rng(0)
    result = brute_force(problem, generator, equal_sizes=equal_sizes)
    best = exact(problem, generator, equal_sizes=equal_sizes)
    assert result.score == pytest.approx(best.score) and result.partition == best.partition


def test_it_scores_whole_partitions_and_no_walk_is_better() -> None:
    class Whole:
        """No sum over groups: the product of the groups' sums."""

        def score(self, partition: Partition) -> float:
            return float(np.prod([sum(np.sin(3.0 * head * len(group)) for head in group) for group in partition]))

        def scores(self, partitions: list[Partition]) -> list[float]:
            return [self.score(partition) for partition in partitions]

    similarity = np.random.default_rng(0).normal(size=(7, 7))
    problem = GroupingProblem(7, 3, similarity + similarity.T, Whole())
    result = brute_force(problem, np.random.default_rng(0))
    walked = [walk_asymmetric(problem, np.random.default_rng(seed), iterations=200).score for seed in range(4)]
    assert result.score is not None
    assert max(score for score in walked if score is not None) <= result.score
    assert result.score == max(map(Whole().score, all_partitions(7, 3, 7)))


def test_too_many_are_refused_with_what_to_take() -> None:
    problem = GroupingProblem(16, 4, objective=cost(0))
    with pytest.raises(ValueError, match=r"16 heads have more than 20,000 into 4 groups; take .* walk_asymmetric"):
        brute_force(problem, np.random.default_rng(0))
