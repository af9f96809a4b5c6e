"""One thing to group.

The keys, the values, or both, of one layer, with all that an objective may need to judge it.

Legend: U units: stored KV heads, since query heads that share one are identical and stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attention.calibration.moments import LayerStatistics
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.plan import AttentionPlan, LayerPlan
from attention.plan_parts import groups_of
from search_spaces.partitions import Partition, expand_units

SIDES = ("key", "value")
FUSION_DISTANCES = "fusion_distances"
"""Need of a part that judges groups by DHA's search phase: training steps before any plan."""


@dataclass(frozen=True)
class Site:
    """The input of an objective part. `heads` are lifted; `units[u]`: the query heads of unit u.

    `sides` are the projections that the partition applies to, `by` those that the pair similarity
    and the group cost look at. Partitions are over units. `similarity` `[U, U]` if the recipe has
    one; `fusion_distance` `[U, U]` where DHA's search phase was run. `plan_with(partition)` is the
    plan with this site grouped so and the sites before it as already found; `measure(plan)` its
    loss in nats per token. `width`: how many times as wide as its members a shared head is.
    """

    layer: int
    sides: tuple[str, ...]
    by: tuple[str, ...]
    units: tuple[tuple[int, ...], ...]
    heads: LayerHeads
    geometry: HeadGeometry
    statistics: LayerStatistics | None = None
    similarity: np.ndarray | None = None
    fusion_distance: np.ndarray | None = None
    model: Any = None
    plan_with: Callable[[Partition], AttentionPlan] | None = None
    width: int = 1
    measure: Callable[[AttentionPlan], float] | None = None

    def need_statistics(self, why: str) -> LayerStatistics:
        """Return the statistics, or ValueError saying what to do."""
        if self.statistics is None:
            raise ValueError(f"{why} needs calibration statistics; calibrate the model first")
        return self.statistics

    def need_similarity(self, why: str) -> np.ndarray:
        if self.similarity is None:
            raise ValueError(f"{why} needs a similarity; choose one on the similarity axis")
        return self.similarity


def plan_of_sites(
    partitions: Mapping[tuple[int, str], Partition],
    geometry: HeadGeometry,
    widths: Mapping[str, int] | None = None,
) -> AttentionPlan:
    """Return the plan of partitions of units by (layer, side).

    Sites without one keep what the checkpoint has.

    Args:
        partitions: The groups of each site.
        geometry: That of the checkpoint.
        widths: Of the heads of each side, by default 1.
    """
    units = groups_of(geometry.kv_map)
    single_units = tuple((unit,) for unit in range(len(units)))
    layers: list[LayerPlan] = []
    for layer in range(geometry.num_layers):
        keys, values = (
            expand_units(partitions.get((layer, side), single_units), units) for side in SIDES
        )
        wide = ((widths or {}).get(side, 1) if (layer, side) in partitions else 1 for side in SIDES)
        layers.append(
            LayerPlan.from_groups(keys, values, geometry.num_heads, (next(wide), next(wide)))
        )
    return AttentionPlan(tuple(layers), geometry.head_dim, other_layers=geometry.other_layers)
