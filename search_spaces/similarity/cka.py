"""Similarity of the heads' weights: linear CKA, and their cosine.

Legend: H heads, d head dim, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from attention.calibration.moments import LayerStatistics
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from search_spaces.axes import SIMILARITY
from search_spaces.similarity.projections import projection


@SIMILARITY.part("cka", source="Chen 2024 (DHA), App. B.1")
def cka_similarity(
    heads: LayerHeads, statistics: LayerStatistics | None, geometry: HeadGeometry, side: str
) -> Tensor:
    """Return the linear CKA of the heads' weights, `[H, H]` float64.

    Not centred, as the paper prints it. Rows are the model's dims, so that a rotation inside a head
    changes nothing.
    """
    return weight_cka(projection(heads, side)[0])


def weight_cka(weight_HdD: Tensor) -> Tensor:
    """Return the linear CKA of each pair of projections, `[H, H]` float64."""
    weight_HdD = weight_HdD.double()
    count, width, _ = weight_HdD.shape
    flat = weight_HdD.flatten(0, 1)
    gram = (flat @ flat.T).view(count, width, count, width)
    square = gram.pow(2).sum((1, 3))
    scale = square.diagonal().sqrt()
    return square / torch.outer(scale, scale).clamp_min(torch.finfo(torch.float64).tiny)


def redundancy(heads: LayerHeads, units: Sequence[int]) -> dict[str, float | None]:
    """Return the mean CKA over the pairs of distinct heads of a layer (Chen 2024 (DHA), Fig. 3b).

    Args:
        heads: Lifted heads: keys and values of every query head.
        units: One query head of each stored KV head.

    Returns:
        By "query", "key" and "value"; None for a layer that stores a single head.
    """

    def mean(weight_HdD: Tensor) -> float | None:
        count = len(weight_HdD)
        if count < 2:
            return None
        return float((weight_cka(weight_HdD).sum() - count) / (count * (count - 1)))

    stored = list(units)
    return {"query": mean(heads.q), "key": mean(heads.k[stored]), "value": mean(heads.v[stored])}


@SIMILARITY.part(
    "weight", source="Chen 2024 (AsymGQA), sec. 2.2, option 1; the exact form is silent there"
)
def weight(
    heads: LayerHeads, statistics: LayerStatistics | None, geometry: HeadGeometry, side: str
) -> Tensor:
    """Cosine of the flattened weights. `[H, H]` float64.

    Silent: the paper only says "difference of the weights"; a cosine keeps the scale of a head out
    of it.
    """
    flat_HN = normalize(projection(heads, side)[0].flatten(1).double(), dim=1)
    return flat_HN @ flat_HN.T
