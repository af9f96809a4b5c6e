"""A planning context of any geometry without a model: random heads and random statistics, no rotary embedding."""

from __future__ import annotations

import torch

from attention.calibration import Calibration, LayerStatistics
from attention.geometry import HeadGeometry, RotaryLayout
from attention.heads import LayerHeads
from attention.plan import AttentionPlan
from search_spaces.planning import PlanningContext
from search_spaces.recipes import Recipe


def random_context(heads: int, stored: int, layers: int, *, dim: int = 3, width: int = 8) -> PlanningContext:
    """Statistics are the true moments of random inputs, the mixed ones under uniform attention weights."""
    generator = torch.Generator().manual_seed(heads * 100 + stored)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    geometry = HeadGeometry(
        "llama", layers, width, heads, stored, dim, RotaryLayout.none(dim), False, False, False, False, False, 64, 32
    )
    lifted, statistics = [], []
    for _ in range(layers):
        own = LayerHeads(
            normal(heads, dim, width), normal(stored, dim, width), normal(stored, dim, width), normal(heads, width, dim)
        )
        lifted.append(own.expand(geometry.kv_map, geometry.kv_map))
        inputs = normal(2, 6, width)
        mixed = inputs.cumsum(1) / torch.arange(1, 7)[None, :, None]
        moments = [_moment(x) for x in (inputs, mixed)]
        q = torch.einsum("std,hed->hste", inputs, own.q).flatten(1, 2).double()
        query = q.transpose(1, 2) @ q / q.shape[1]
        statistics.append(LayerStatistics(12, moments[0], moments[1].float().expand(heads, -1, -1), query, inputs))

    def measure(recipe: Recipe, plan: AttentionPlan) -> float:
        """Falls with every head kept, later layers counting more."""
        return sum((i + 1) / layer.key_heads + 0.1 / layer.value_heads for i, layer in enumerate(plan.layers))

    calibration = Calibration(tuple(statistics), 12, "random")
    return PlanningContext(geometry, lifted, calibration, measure=measure)


def _moment(x: torch.Tensor) -> torch.Tensor:
    flat = torch.cat([x.flatten(0, 1), torch.ones(x.shape[0] * x.shape[1], 1)], 1).double()
    return flat.T @ flat / len(flat)
