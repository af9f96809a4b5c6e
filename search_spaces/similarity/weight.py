"""Weight-informed similarity. Legend: H heads, d head dim, D model dim."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from attention.calibration.moments import LayerStatistics
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from search_spaces.axes import SIMILARITY
from search_spaces.similarity.projections import projection


@SIMILARITY.part("weight", source="Chen 2024 (paper 003), sec. 2.2, option 1; the exact form is silent there")
def weight(heads: LayerHeads, statistics: LayerStatistics | None, geometry: HeadGeometry, side: str) -> Tensor:
    """Cosine of the flattened weights. `[H, H]` float64.

    Silent: the paper only says "difference of the weights"; a cosine keeps the scale of a head out of it.
    """
    flat_HN = normalize(projection(heads, side)[0].flatten(1).double(), dim=1)
    return flat_HN @ flat_HN.T
