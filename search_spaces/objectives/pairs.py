"""Sum of pair similarities within groups."""

from __future__ import annotations

from search_spaces.axes import OBJECTIVE
from search_spaces.costs import PairCost
from search_spaces.site import Site


@OBJECTIVE.part("pairs", source="Jin 2024 (paper 001), sec. 3.4; Chen 2024 (paper 000), Alg. 4", needs=("similarity",))
def pairs(site: Site) -> PairCost:
    """Additive: each pair costs its distance from the layer's closest pair."""
    return PairCost.from_similarity(site.need_similarity("objective=pairs"))
