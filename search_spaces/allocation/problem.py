"""The input of an allocation part.

Legend: L layers, U stored KV heads per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from attention.ratios import whole_heads

Counts = tuple[tuple[int, int], ...]
SiteLoss = Callable[[int, str], float]
SiteCurves = Callable[[Sequence[tuple[int, str]], Sequence[int]], list[dict[int, float]]]
PlanLoss = Callable[[Counts], float]


@dataclass(frozen=True)
class AllocationProblem:
    """Spread `kv_ratio` of the `2 L U` heads of the checkpoint over `num_layers` layers.

    `loss(layer, side)`: what it costs to have one head only there; `curves(sites, counts)`:
    increase of the loss for each of these counts, of each site (layer, side) alone, where `side` is
    "key", "value" or "both". `final(counts)`: measured loss of the model with these counts,
    converted and refined as the recipe says.

    Attributes:
        admissible: Head counts that the grouping can make of one site, ascending, at most U.
        usual: Those of them that are considered where each site has a separate count, unless others
            are requested.
    """

    num_layers: int
    stored: int
    kv_ratio: float | Fraction
    admissible: tuple[int, ...]
    loss: SiteLoss | None = None
    curves: SiteCurves | None = None
    final: PlanLoss | None = None
    usual: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Key heads plus value heads over all layers.

        Raises:
            ValueError: Unless the ratio gives a whole number.
        """
        return whole_heads(self.kv_ratio, 2 * self.num_layers * self.stored)
