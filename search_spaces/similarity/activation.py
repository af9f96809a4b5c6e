"""Activation-informed similarity.

Measures how well the vectors of one head match a direction among those of the other.

Legend: H heads, n tokens, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.axes import Knob
from attention.calibration.moments import LayerStatistics
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from search_spaces.axes import SIMILARITY
from search_spaces.similarity.projections import activations


def activation_similarity(activations_HTd: Tensor) -> Tensor:
    """Return the similarity of each pair of heads, `[H, H]` float64 (AsymGQA, section 2.2, Eq. 1).

    For heads a and b: half the sum, over the tokens of a, of the largest cosine with any token of
    b, plus half the same from b to a. At most n; n for a head with itself. A zero row has cosine 0
    with everything.
    """
    unit_HTd = torch.nn.functional.normalize(activations_HTd.double(), dim=-1).float()
    count = len(unit_HTd)
    result = torch.zeros(count, count, dtype=torch.float64)
    for h in range(count):
        cosines_jTT = unit_HTd[h] @ unit_HTd[h:].transpose(1, 2)
        row = 0.5 * (cosines_jTT.amax(2).double().sum(1) + cosines_jTT.amax(1).double().sum(1))
        result[h, h:] = result[h:, h] = row
    return result


@SIMILARITY.part(
    "activation",
    source="Chen 2024 (AsymGQA), sec. 2.2, Eq. 1",
    knobs=(
        Knob(
            "tokens",
            "int",
            "number of tokens that heads are compared on; cost grows with their square",
            low=1,
        ),
    ),
    needs=("statistics", "inputs"),
)
def activation(
    heads: LayerHeads,
    statistics: LayerStatistics | None,
    geometry: HeadGeometry,
    side: str,
    *,
    tokens: int = 512,
) -> Tensor:
    """Eq. 1 for all pairs of heads, on evenly spaced calibration tokens. `[H, H]` float64."""
    return activation_similarity(activations(heads, statistics, side, tokens))
