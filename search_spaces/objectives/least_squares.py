"""Error of least-squares fusion, as an additive group cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from attention.calibration.moments import LayerStatistics
from attention.conversion.fusion.costs import Cost, KeyCost, ValueCost, with_unit_values
from attention.conversion.fusion.estimates import LeadingValueCost, PooledValueCost
from attention.heads import LayerHeads
from search_spaces.axes import OBJECTIVE
from search_spaces.costs import GroupCost, Members
from search_spaces.site import Site

DEAR = 1e12
"""Multiply-adds of a search by value costs from which it goes by estimates of them: about a minute
of one core."""
_SEARCHED = 6000  # prices that a search needs
OFTEN = 4  # the size of most groups


@OBJECTIVE.part(
    "least_squares",
    source=(
        "ours: the eigenvalues that least-squares fusion drops (low-rank KV heads by "
        "group: Yu 2024)"
    ),
    needs=("statistics",),
)
def least_squares(site: Site) -> GroupCost:
    """Return what least-squares fusion of the group loses of attention logits or output.

    They are logits for keys and outputs for values. Values that pass a norm count at a root mean
    square of 1.
    """
    statistics = site.need_statistics("objective=least_squares")
    width = site.width
    keys: list[Cost] = (
        [KeyCost(site.heads, statistics, site.geometry, width)] if "key" in site.by else []
    )
    if "value" not in site.by:
        return _group_cost(site, keys)
    heads = site.heads
    if site.geometry.value_norm:
        heads = with_unit_values(heads, statistics)
    values = ValueCost(heads, statistics, width=width)
    unit = max(map(len, site.units), default=1)
    if values.preparation + _SEARCHED * values.effort(OFTEN * unit) <= DEAR:
        return _group_cost(site, [*keys, values])
    return _group_cost(site, [*keys, values], estimates=_estimates(site, keys, heads, statistics))


def _estimates(
    site: Site, keys: Sequence[Cost], heads: LayerHeads, statistics: LayerStatistics
) -> list[Callable[[], GroupCost]]:
    """Makers of two estimates of the cost; each is made once."""

    @cache
    def pooled() -> PooledValueCost:
        return PooledValueCost(heads, statistics, width=site.width)

    scales = cache(lambda: _scales([*keys, pooled()]))

    def maker(values: Callable[[], Cost]) -> Callable[[], GroupCost]:
        return cache(lambda: _group_cost(site, [*keys, values()], scales))

    return [maker(pooled), maker(lambda: LeadingValueCost(pooled(), statistics))]


def _scales(costs: Sequence[Cost]) -> list[float]:
    """One side needs no scale, and then the cost keeps its unit."""
    everything = tuple(range(costs[0].num_heads))
    return [max(cost.cost(everything), 1e-300) if len(costs) > 1 else 1.0 for cost in costs]


def _group_cost(
    site: Site,
    costs: Sequence[Cost],
    scales: Callable[[], Sequence[float]] | None = None,
    estimates: Sequence[Callable[[], GroupCost]] = (),
) -> GroupCost:
    unit = max(map(len, site.units), default=1)
    scales = scales or cache(lambda: _scales(costs))

    def of_groups(groups: Sequence[Members]) -> np.ndarray:
        heads = [[h for unit in members for h in site.units[unit]] for members in groups]
        return sum(
            cost.costs(heads).numpy() / scale for cost, scale in zip(costs, scales(), strict=True)
        )  # type: ignore[return-value]

    return GroupCost(
        lambda members: of_groups([members])[0],
        of_groups,
        effort=lambda size: sum(cost.effort(size * unit) for cost in costs),
        preparation=sum(cost.preparation for cost in costs),
        estimates=estimates,
    )
