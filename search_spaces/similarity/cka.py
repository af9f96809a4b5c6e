"""Similarity of the heads' weights: linear CKA, and their cosine.

Legend: H heads, d head dim, D model dim.
"""

from __future__ import annotations

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
    weight_HdD = projection(heads, side)[0].double()
    count, width, _ = weight_HdD.shape
    flat = weight_HdD.flatten(0, 1)
    gram = (flat @ flat.T).view(count, width, count, width)
    square = gram.pow(2).sum((1, 3))
    scale = square.diagonal().sqrt()
    return square / torch.outer(scale, scale).clamp_min(torch.finfo(torch.float64).tiny)


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
