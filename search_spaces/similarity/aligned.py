"""Similarity of two heads once the one is turned towards the other. Legend: H heads, d head dim."""

from __future__ import annotations

from torch import Tensor

from attention.calibration.moments import LayerStatistics
from attention.conversion.alignment.grams import CRITERION, head_gram, pair_similarity
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from search_spaces.axes import SIMILARITY
from search_spaces.similarity.projections import layout_of_side


@SIMILARITY.part(
    "aligned",
    source="Jin 2024, sec. 3.3, Eq. 18, 19 and 22",
    knobs=(CRITERION,),
    needs=("statistics", "inputs"),
)
def aligned(
    heads: LayerHeads,
    statistics: LayerStatistics | None,
    geometry: HeadGeometry,
    side: str,
    *,
    criterion: str = "dist",
) -> Tensor:
    """Pair similarity after the best alignment that leaves the model unchanged. `[H, H]` float64.

    Keys turn within their rotary pairs, values freely. With a norm on the keys they cannot turn at
    all; the similarity is then still that of rotated keys, which orders heads but promises nothing.

    Raises:
        ValueError: Without statistics.
    """
    if statistics is None:
        raise ValueError(
            "similarity=aligned needs calibration statistics; calibrate the model first"
        )
    layout = layout_of_side(heads, geometry, side)
    return pair_similarity(head_gram(heads, statistics, side, criterion), criterion, layout)
