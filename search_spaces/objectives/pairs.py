"""Costs of a group that are sums over its pairs of heads."""

from __future__ import annotations

from attention.axes import Knob
from search_spaces.axes import OBJECTIVE
from search_spaces.costs import PairCost
from search_spaces.site import FUSION_DISTANCES, Site


@OBJECTIVE.part(
    "pairs", source="Jin 2024, sec. 3.4; Chen 2024 (DHA), Alg. 4", needs=("similarity",)
)
def pairs(site: Site) -> PairCost:
    """Return the sum over pairs of their distance from the layer's closest pair."""
    return PairCost.from_similarity(site.need_similarity("objective=pairs"))


_KNOBS = (
    Knob("steps", "int", "training steps of the search phase", 1, 1_000_000),
    Knob("rate", "log_float", "peak learning rate of the coefficients in it", 1e-5, 1.0),
)


@OBJECTIVE.part(
    "fusion_loss",
    source="Chen 2024 (DHA), sec. 4.3, Eq. 7 and App. B.2 to B.4",
    knobs=_KNOBS,
    needs=(FUSION_DISTANCES,),
)
def fusion_loss(site: Site, *, steps: int = 240, rate: float = 1e-2) -> PairCost:
    """Return the sum of L_head over the pairs of each group.

    One group of all heads costs the layer's loss.

    The knobs say how the distances were measured, which is done before any plan is made.
    """
    if site.fusion_distance is None:
        raise ValueError(
            "objective=fusion_loss needs the distances of DHA's search phase; pass "
            "fusion_distances to the context "
            "(trainers.fusion_search.search_distances)"
        )
    return PairCost(site.fusion_distance)
