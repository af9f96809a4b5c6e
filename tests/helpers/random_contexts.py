"""A planning context of any geometry without a model: random heads and random statistics, no rotary embedding."""

from __future__ import annotations

import numpy as np
import torch
from measured_contexts import MeasuredContext

from attention.calibration.moments import LayerStatistics, packed
from attention.calibration.store import Calibration
from attention.geometry import HeadGeometry, RotaryLayout
from attention.heads import LayerHeads
from attention.plan import AttentionPlan
from search_spaces.planning.planner import PlanningContext
from search_spaces.recipes.catalogue import Recipe


def random_context(heads: int, stored: int, layers: int, *, dim: int = 3, width: int = 8) -> PlanningContext:
    """Statistics are the true moments of random inputs, the mixed ones under uniform attention weights. Distances of
    DHA's search phase are random."""
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
        statistics.append(
            LayerStatistics(12, moments[0], packed(moments[1].float().expand(heads, -1, -1)), query, inputs)
        )

    def measure(recipe: Recipe, plan: AttentionPlan) -> float:
        """Falls with every head kept, later layers counting more."""
        return sum((i + 1) / layer.key_heads + 0.1 / layer.value_heads for i, layer in enumerate(plan.layers))

    calibration = Calibration(tuple(statistics), 12, "random", "random")
    apart = normal(2, layers, heads, heads).abs().triu(1).double().numpy()
    distances = {side: matrix + matrix.swapaxes(1, 2) for side, matrix in zip(("key", "value"), apart, strict=True)}
    return MeasuredContext(geometry, lifted, calibration, measure=measure, fusion_distances=distances)


def quick(recipe: Recipe, heads: int) -> Recipe:
    """The recipe as it is for up to 8 heads; above with searches of milliseconds, where its own would take seconds."""
    if heads <= 8:
        return recipe
    if recipe.objective == "least_squares":
        recipe = recipe.with_changes(objective="pairs", similarity="weight")
    if recipe.grouping == "exact":
        sizes = recipe.knobs("grouping")["equal_sizes"]
        changes = {"grouping.equal_sizes": sizes, "grouping.steps": 50}
        recipe = recipe.with_changes(grouping="merge_anneal", settings=changes)
    own = dict(recipe.settings)
    limits = {"grouping.restarts": 2, "grouping.moves": 20 if recipe.grouping == "anneal_restarts" else 1}
    changes = {name: min(own[name], most) for name, most in limits.items() if name in own}
    if "allocation.counts" in own:
        changes["allocation.counts"] = "powers_of_two"
    return recipe.with_changes(settings=changes)


def ratio_of(kind: str, heads: int, layers: int, generator: np.random.Generator) -> float:
    """A budget to ask for: of equal groups, of any count a layer, of any total, or of no whole number of heads."""
    divisors = [g for g in range(1, heads + 1) if heads % g == 0]
    if kind == "divisor":
        return int(generator.choice(divisors)) / heads
    if kind == "count":
        return int(generator.integers(1, heads + 1)) / heads
    total = int(generator.integers(2 * layers, 2 * layers * heads + 1))
    return (total - (0.37 if kind == "broken" else 0.0)) / (2 * layers * heads)


def _moment(x: torch.Tensor) -> torch.Tensor:
    flat = torch.cat([x.flatten(0, 1), torch.ones(x.shape[0] * x.shape[1], 1)], 1).double()
    return flat.T @ flat / len(flat)
