"""Cache of each GPU of a tensor-parallel engine for a conversion, before it is made."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from attention.geometry import HeadGeometry
from attention.io.targets import EngineSupport
from attention.plan import number_bytes
from attention.ratios import bytes_of_ratio
from attention.tensor_parallel import RankCache
from search_spaces.planning.widths import with_width
from search_spaces.recipes.recipe import Recipe

EQUAL_COUNTS = ("uniform", "single")
"""Allocations that give every layer the same head count."""


def estimate_ranks(
    recipe: Recipe, kv_ratio: float, geometry: HeadGeometry, dtype: Any, ranks: int
) -> RankCache:
    """Return what each of `ranks` GPUs of a tensor-parallel engine will hold of a token.

    Exact for recipes that give every layer the same head count. For others a lower bound: no GPU
    holds less than its share of the whole, nor less than one KV head per layer.

    Args:
        recipe: Of the conversion.
        kv_ratio: Kept share of the checkpoint's KV cache.
        geometry: That of the checkpoint.
        dtype: Of the cache.
        ranks: GPUs.

    Raises:
        RankLayoutError: For heads that cannot be divided among the GPUs.
    """
    g = geometry
    recipe = with_width(recipe, kv_ratio, g)
    width = int(recipe.width)
    count = kv_ratio * g.num_kv_heads / width
    layers = (g.num_layers, g.head_dim * width)
    original = EngineSupport.of_geometry(g)
    if recipe.allocation in EQUAL_COUNTS and (width == 1 or recipe.together):
        support = EngineSupport.of(
            [round(count)] * layers[0], layers[1], other_layers=g.other_layers
        )
        return support.rank_cache(ranks, dtype, original, g.num_heads)
    fewest = EngineSupport.of([1] * layers[0], layers[1], other_layers=g.other_layers)
    least = fewest.bytes_per_token(dtype)
    bound = original.rank_cache(ranks, dtype, original, g.num_heads)
    whole = bytes_of_ratio(kv_ratio, g, number_bytes(dtype))
    return replace(
        bound,
        kv_bytes_per_token_per_gpu=max(least, math.ceil(whole / ranks)),
        kv_bytes_per_token=whole,
        replicated_layers=0,
        at_least=True,
    )
