"""Planning one wide layer: grouping its value heads by estimates of the cost, against the cost itself.

    python -m benchmarks planning [--quick] [--heads 32 --head-dim 128]

Moments and heads are made, not measured: spectra that fall as a power, moments of heads that differ in scale and in
directions, value heads in families of uneven size that share a part of what they read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.calibration.moments import LayerStatistics, packed
from attention.heads import LayerHeads

FAMILIES, SHARED, TOPICS = 8, 0.7, 256


def made_layer(heads: int, dim: int, seed: int = 0) -> tuple[LayerHeads, LayerStatistics]:
    """One layer of `heads` heads of `dim`, as wide as both make it; no keys or queries of its own."""
    draw = torch.Generator().manual_seed(seed)
    width = heads * dim
    place = torch.arange(width)
    spectrum = (1.0 / (place + 8)).sqrt()  # of the inputs
    own = (1.0 / (1 + place[:dim])).sqrt()[:, None]  # of a head's outputs
    bases = torch.randn(FAMILIES, dim, width, generator=draw)
    family = (torch.rand(heads, generator=draw).square() * FAMILIES).long()
    rows = SHARED**0.5 * bases[family] + (1 - SHARED) ** 0.5 * torch.randn(heads, dim, width, generator=draw)
    mixed = torch.linalg.qr(torch.randn(heads, dim, dim, generator=draw))[0]
    v = mixed @ (own * rows) / width**0.5
    o = torch.randn(heads, width, dim, generator=draw) / width**0.5
    moments = packed_moments(spectrum, heads, draw)
    statistics = LayerStatistics(1, torch.zeros(width + 1, 1), moments, torch.zeros(heads, 1, 1), torch.zeros(0))
    return LayerHeads(v, v, v, o), statistics


def packed_moments(spectrum: Tensor, heads: int, draw: torch.Generator) -> Tensor:
    """`[H, e (e + 1) / 2]`: every head passes some inputs better than others, and sees some topics more."""
    width, topics = len(spectrum), min(TOPICS, len(spectrum) // 4)
    factors = spectrum[:, None] * torch.randn(width, topics, generator=draw)
    damped, mean = torch.rand(width, generator=draw), 0.2 * spectrum * torch.randn(width, generator=draw)
    moments = torch.empty(heads, (width + 1) * (width + 2) // 2)
    for moment in moments:
        passed = spectrum.square() * torch.exp(-3 * torch.rand((), generator=draw) * damped)
        weights = torch.randn(topics, generator=draw).exp() / topics
        square = torch.zeros(width + 1, width + 1)
        square[:-1, :-1] = passed.diag() + (factors * weights) @ factors.T + torch.outer(mean, mean)
        square[-1, :-1] = square[:-1, -1] = mean
        square[-1, -1] = 1.0
        moment.copy_(packed(square[None])[0])
    return moments
