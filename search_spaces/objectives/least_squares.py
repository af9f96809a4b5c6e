"""Error of least-squares fusion, as an additive group cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attention.conversion.fusion.costs import KeyCost, ValueCost
from search_spaces.axes import OBJECTIVE
from search_spaces.costs import GroupCost, Members
from search_spaces.site import Site


@OBJECTIVE.part(
    "least_squares",
    source="ours: the eigenvalues that least-squares fusion drops (low-rank KV heads by group: Yu 2024)",
    needs=("statistics",),
)
def least_squares(site: Site) -> GroupCost:
    """What least-squares fusion of the group loses: of attention logits (keys), of attention output (values).

    Where both sides count, each is taken relative to its cost with all heads in one group, since logits and outputs
    have no common unit.
    """
    statistics = site.need_statistics("objective=least_squares")
    makers = {"key": KeyCost, "value": ValueCost}
    costs = [makers[side](site.heads, statistics, site.geometry) for side in site.by]
    everything = tuple(range(site.heads.num_heads))
    # One side needs no scale, and then the cost keeps its unit.
    scales = [max(cost.cost(everything), 1e-300) if len(costs) > 1 else 1.0 for cost in costs]

    def of_groups(groups: Sequence[Members]) -> np.ndarray:
        heads = [[h for unit in members for h in site.units[unit]] for members in groups]
        return sum(cost.costs(heads).numpy() / scale for cost, scale in zip(costs, scales, strict=True))  # type: ignore[return-value]

    unit = max(map(len, site.units), default=1)
    return GroupCost(
        lambda members: of_groups([members])[0],
        of_groups,
        effort=lambda size: sum(cost.effort(size * unit) for cost in costs),
    )
