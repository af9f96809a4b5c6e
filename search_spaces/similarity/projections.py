"""The projection of a side and its activations on the calibration sample.

Legend: H heads, d head dim, D model dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.calibration.moments import LayerStatistics
from attention.geometry import HeadGeometry, RotaryLayout
from attention.heads import LayerHeads


def projection(heads: LayerHeads, side: str) -> tuple[Tensor, Tensor | None]:
    """Weight `[H, d, D]` and bias `[H, d]` or None of "key" or "value".

    Raises:
        ValueError: For another side.
    """
    if side == "key":
        return heads.k, heads.k_bias
    if side == "value":
        return heads.v, heads.v_bias
    raise ValueError(f"side must be 'key' or 'value', got {side!r}")


def layout_of_side(heads: LayerHeads, geometry: HeadGeometry, side: str) -> RotaryLayout:
    """Return the rotary pairs of the heads of a side; values have none."""
    if side == "key":
        return geometry.rotary
    return RotaryLayout.none(projection(heads, side)[0].shape[1])


def activations(
    heads: LayerHeads, statistics: LayerStatistics | None, side: str, tokens: int
) -> Tensor:
    """Return `x W_h^T + b_h`, `[H, n, d]` float32, on at most `tokens` evenly spaced stored inputs.

    Keys are taken before rotation and before a key norm.

    Raises:
        ValueError: Without stored inputs.
    """
    if statistics is None or not statistics.inputs.numel():
        raise ValueError(
            "activations need calibration inputs; calibrate the model with sample_tokens above 0"
        )
    weight, bias = projection(heads, side)
    x = statistics.inputs.flatten(0, 1)
    # Evenly spaced and not random: the same tokens for every head, layer and seed.
    index = torch.linspace(0, len(x) - 1, min(tokens, len(x)), dtype=torch.float64).round().long()
    result = torch.einsum("nD,hdD->hnd", x[index].float(), weight.float())
    return result if bias is None else result + bias.float()[:, None]
