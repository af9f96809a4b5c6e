"""The width of the KV heads of a recipe's plans.

Legend: U stored KV heads per layer, d head dim, m width: how many times d a shared head is wide.

A head of width m costs as many bytes as m heads of the checkpoint. Counts and budgets are therefore
in units of the checkpoint's heads everywhere, and `count // m` is the number of groups.
"""

from __future__ import annotations

from fractions import Fraction

from attention.geometry import HeadGeometry
from search_spaces.recipes.recipe import WIDEST, Recipe

MOST_DIMS = 256
"""Dims of a head that attention kernels of the engines take."""


def most_width(geometry: HeadGeometry) -> int:
    """Return the largest width whose heads the kernels of the engines take.

    1 where values pass a norm, which wider heads would change.
    """
    return 1 if geometry.value_norm else max(1, MOST_DIMS // geometry.head_dim)


def widest(count: int, geometry: HeadGeometry) -> int:
    """Return the largest width that `count` heads of a site can be put together to."""
    return max(m for m in range(1, min(count, most_width(geometry)) + 1) if count % m == 0)


def with_width(recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry) -> Recipe:
    """Return the recipe with a width that is a number, as its plans at this ratio have it.

    Where queries and keys pass a norm after their projection only values can be wide, and the two
    sides are grouped separately.
    """
    if recipe.width == 1:
        return recipe
    count = max(1, round(float(kv_ratio) * geometry.num_kv_heads))
    width = widest(count, geometry) if recipe.width == WIDEST else recipe.width
    together = recipe.together and not (geometry.qk_norm and width != 1)
    return recipe.with_changes(width=width, together=together)


def side_width(recipe: Recipe, geometry: HeadGeometry, side: str) -> int:
    """Return the width of the key or value heads of a recipe whose width is a number."""
    if not isinstance(recipe.width, int):
        raise TypeError(f"the width must be resolved by with_width, got {recipe.width!r}")
    return 1 if side == "key" and geometry.qk_norm else recipe.width
