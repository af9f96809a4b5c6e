"""Costs that a grouping minimises.

A score of whole partitions, which for a `GroupCost` is additive over their groups.

Legend: n heads (or units) to group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, groupby
from math import comb
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from search_spaces.partitions import Partition

if TYPE_CHECKING:
    from search_spaces.planning.prices import StoredPrices

Members = tuple[int, ...]
CACHE_SIZE = 1 << 17  # groups: some 30 MB


class Objective(Protocol):
    """A score of whole partitions, higher is better.

    `scores` gives the same numbers as `score` one by one.
    """

    def score(self, partition: Partition) -> float: ...

    def scores(self, partitions: Sequence[Partition]) -> list[float]: ...


class GroupCost:
    """An additive objective from `cost(members) -> float`, lower is better.

    Each group is computed once.

    `many(list of members of one size) -> array` computes a batch at once. At most `cache_size`
    groups are cached, the latest; `priced` counts those computed. `programmes`: results of exact
    grouping, reused for the next number of groups. `stored_prices`: prices of whole sizes, if
    any.

    Args:
        effort: Multiply-adds to price one group of a size after `preparation`, where that is worth
            a thought.
        estimates: Makers of costs that stand for this one in a search, each closer than the one
            before; none where this one is cheap.
    """

    def __init__(
        self,
        cost: Callable[[Members], float],
        many: Callable[[Sequence[Members]], np.ndarray] | None = None,
        cache_size: int = CACHE_SIZE,
        effort: Callable[[int], float] | None = None,
        estimates: Sequence[Callable[[], GroupCost]] = (),
        preparation: float = 0.0,
    ) -> None:
        self._cost = cost
        self._many = many
        self.cache_size = cache_size
        self.effort_of_one = effort
        self._known: dict[Members, float] = {}
        self._table: np.ndarray | None = None
        self.programmes: dict[Any, Any] = {}
        self.estimates = tuple(estimates)
        self.preparation = preparation
        self.stored_prices: StoredPrices | None = None
        self.priced = 0

    def effort(self, num_heads: int, sizes: Iterable[int]) -> float:
        """Multiply-adds to prepare and to price every group of these sizes.

        0 if nobody has said what one takes.
        """
        if self.effort_of_one is None:
            return 0.0
        return self.preparation + sum(
            comb(num_heads, size) * self.effort_of_one(size) for size in sizes
        )

    def cost(self, members: Members) -> float:
        """Cost of one group. `members` ascend."""
        if members not in self._known:
            self._remember((members,), (float(self._cost(members)),))
        return self._known[members]

    def costs(self, groups: Iterable[Members]) -> list[float]:
        """Costs of many groups, those of one size in one batch where `many` is there."""
        groups = list(groups)
        missing = sorted(
            {group for group in groups if group not in self._known}, key=lambda g: (len(g), g)
        )
        priced = dict(zip(groups, (self._known.get(group) for group in groups), strict=True))
        for _, some in groupby(missing, len):
            batch = list(some)
            values = self._many(batch) if self._many else [self._cost(group) for group in batch]
            priced |= zip(batch, map(float, values), strict=True)
            self._remember(batch, [priced[group] for group in batch])  # type: ignore[misc]
        return [priced[group] for group in groups]  # type: ignore[misc]

    def _remember(self, groups: Sequence[Members], costs: Sequence[float]) -> None:
        self.priced += len(groups)
        self._known.update(zip(groups, costs, strict=True))
        while len(self._known) > max(self.cache_size, 1):
            del self._known[next(iter(self._known))]

    def afresh(self) -> GroupCost:
        """Return the same cost with a separate count of priced groups.

        The length of a search must not depend on other searches.
        """
        return GroupCost(
            self.cost,
            self._many,
            self.cache_size,
            self.effort_of_one,
            self.estimates,
            self.preparation,
        )

    def score(self, partition: Partition) -> float:
        """Return minus the total cost of a partition."""
        return -sum(self.cost(group) for group in partition)

    def scores(self, partitions: Sequence[Partition]) -> list[float]:
        """Return the scores of several partitions."""
        costs = dict.fromkeys(group for partition in partitions for group in partition)
        costs = dict(zip(costs, self.costs(costs), strict=True))
        return [-sum(costs[group] for group in partition) for partition in partitions]

    def swap_change(self, first: Members, second: Members, a: int, b: int) -> float:
        """Return the increase of the total cost if `a` of `first` and `b` of `second` swap."""
        new = (exchanged(first, a, b), exchanged(second, b, a))
        return sum(self.cost(group) for group in new) - self.cost(first) - self.cost(second)

    def table(self, num_heads: int, sizes: Sequence[int] | None = None) -> np.ndarray:
        """Costs of all subsets `[2^n]` by bit mask.

        Subsets whose size is not in `sizes` are left at infinity.

        Cached, so that a table of more sizes computes only the new ones.
        """
        sizes_wanted = np.zeros(num_heads + 1, dtype=bool)
        sizes_wanted[list(sizes if sizes is not None else range(1, num_heads + 1))] = True
        if self._table is None or len(self._table) != 1 << num_heads:
            self._table = np.full(1 << num_heads, np.nan)
        count = np.bitwise_count(np.arange(1 << num_heads, dtype=np.uint32))
        missing = [
            size
            for size in np.flatnonzero(sizes_wanted).tolist()
            if np.isnan(self._table[(1 << size) - 1])
        ]
        stored = self.stored_prices.read() if self.stored_prices is not None and missing else {}
        new: dict[int, np.ndarray] = {}
        for size in missing:
            groups = list(combinations(range(num_heads), size))
            prices = stored.get(size)
            if prices is None or len(prices) != len(groups):
                prices = new[size] = np.array(self.costs(groups), dtype=np.float64)
            self._table[[sum(1 << h for h in group) for group in groups]] = prices
        if self.stored_prices is not None and new:
            self.stored_prices.add(new)
        return np.where(sizes_wanted[count], self._table, np.inf)


class PairCost(GroupCost):
    """The cost of a group is the sum of a symmetric pair cost over its pairs.

    A single head costs nothing.

    `pairs` `[n, n]` is a distance; `from_similarity` turns a similarity round. The diagonal is not
    read.
    """

    def __init__(self, pairs: np.ndarray) -> None:
        pairs = np.array(pairs, dtype=np.float64)
        if pairs.ndim != 2 or pairs.shape[0] != pairs.shape[1]:
            raise ValueError(f"a pair cost must be a square matrix, got shape {pairs.shape}")
        if not np.isfinite(pairs).all():
            raise ValueError(
                "a pair cost must be finite, got nan or inf; check the similarity it was made from"
            )
        np.fill_diagonal(pairs, 0.0)
        self.pairs = (pairs + pairs.T) / 2
        super().__init__(self._of_group)

    @classmethod
    def from_similarity(cls, similarity: np.ndarray) -> PairCost:
        """Distance from the closest pair: never negative, so that giant groups are not rewarded."""
        similarity = np.asarray(similarity, dtype=np.float64)
        off = similarity[~np.eye(len(similarity), dtype=bool)]
        return cls((off.max() if off.size else 0.0) - similarity)

    def afresh(self) -> PairCost:
        return PairCost(self.pairs)

    def _of_group(self, members: Members) -> float:
        index = list(members)
        return float(self.pairs[np.ix_(index, index)].sum() / 2)

    def swap_change(self, first: Members, second: Members, a: int, b: int) -> float:
        # O(group) and not O(group^2): only the pairs with a or b change.
        difference = self.pairs[b] - self.pairs[a]
        remaining = [h for h in first if h != a], [h for h in second if h != b]
        return float(difference[remaining[0]].sum() - difference[remaining[1]].sum())

    def table(self, num_heads: int, sizes: Sequence[int] | None = None) -> np.ndarray:
        table = np.zeros(1)
        for h in range(num_heads):
            to_h = np.zeros(1)
            for other in range(h):
                to_h = np.concatenate([to_h, to_h + self.pairs[h, other]])
            table = np.concatenate([table, table + to_h])
        if sizes is not None:
            count = np.bitwise_count(np.arange(len(table), dtype=np.uint32))
            table[~np.isin(count, list(sizes))] = np.inf
        table[0] = np.inf
        return table


def as_cost(cost: GroupCost | np.ndarray | Callable[[Members], float]) -> GroupCost:
    """Return a `GroupCost` from one, from a pair-cost matrix, or from a function of the members."""
    if isinstance(cost, GroupCost):
        return cost
    return GroupCost(cost) if callable(cost) else PairCost(np.asarray(cost))


def exchanged(group: Members, out: int, new: int) -> Members:
    """Return `group` with `new` instead of `out`, ascending."""
    return tuple(sorted(new if h == out else h for h in group))
