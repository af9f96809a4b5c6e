"""Plans a few layers at a time.

Measurements of some layers, the plan of one layer, and a plan from stored curves.

Legend: L layers, U stored KV heads per layer (units).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from attention.geometry import HeadGeometry
from attention.plan import AttentionPlan, LayerPlan
from search_spaces.grouping.neighbour import neighbour_partition
from search_spaces.partitions import Partition
from search_spaces.planning.budgets import check_budget, flat_loss, problem_of
from search_spaces.planning.context import PlanningContext
from search_spaces.planning.curves import (
    CurvePoint,
    Curves,
    CurveSite,
    expected_increases,
    side_curves,
)
from search_spaces.planning.planner import recipe_curves, site_generators
from search_spaces.planning.site_grouper import SiteGrouper, layer_sites
from search_spaces.planning.widths import side_width, with_width
from search_spaces.recipes.recipe import Recipe
from search_spaces.site import SIDES, plan_of_sites

_Counts = Sequence[int]


def plan_layer(
    recipe: Recipe,
    counts: tuple[int, int],
    context: PlanningContext,
    generators: list[np.random.Generator],
) -> LayerPlan:
    """Return the plan of the single layer in `context`, keeping `counts` (key heads, value heads).

    With its two `generators` of `site_generators` for the whole checkpoint the plan is the layer's
    in `make_plan`.
    """
    kv_share = Fraction(sum(counts), 2 * context.geometry.num_kv_heads)
    recipe = with_width(recipe, kv_share, context.geometry)
    grouper = SiteGrouper(recipe, context)
    for (sides, count), generator in zip(layer_sites(recipe, counts), generators, strict=False):
        grouper.assign(0, sides, grouper.group(0, sides, count, generator))
    return grouper.plan().layers[0]


def requested_counts(
    recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry
) -> dict[tuple[int, str], _Counts]:
    """Return the head counts of which the recipe's allocation needs loss increases.

    Returns:
        The counts of each (layer, "key", "value" or "both").

    Raises:
        ValueError: If the budget cannot be met.
    """
    requested: dict[tuple[int, str], _Counts] = {}

    def flat(sites: Sequence[tuple[int, str]], counts: _Counts) -> list[dict[int, float]]:
        requested.update(dict.fromkeys(sites, counts))
        return [dict.fromkeys(counts, 0.0)] * len(sites)

    check_budget(recipe, kv_ratio, geometry)
    recipe.apply("allocation", problem_of(recipe, kv_ratio, geometry, loss=flat_loss, curves=flat))
    return requested


def measure_curves(
    recipe: Recipe,
    kv_ratio: float | Fraction,
    context: PlanningContext,
    generator: np.random.Generator,
    layers: Sequence[int],
) -> int:
    """Measure, into the context's curves, what `make_plan` would measure in `layers`.

    Returns:
        The number of points that these layers have.

    Raises:
        ValueError: As `make_plan` does.
    """
    geometry = context.geometry
    recipe = with_width(recipe, kv_ratio, geometry)
    requested = requested_counts(recipe, kv_ratio, geometry)
    sites = sorted(site for site in requested if site[0] in layers)
    if not sites:
        return 0
    _, generators = site_generators(generator, geometry.num_layers)
    curves = recipe_curves(SiteGrouper(recipe, context), generators)
    return sum(map(len, side_curves(curves, recipe, sites, requested[sites[0]])))


def curves_of_layer(
    recipe: Recipe,
    counts: Mapping[str, _Counts],
    context: PlanningContext,
    generators: list[np.random.Generator],
) -> dict[str, CurvePoint]:
    """Return the points of the single layer in `context`, for the `counts` of each side.

    With the layer's two curve generators of `site_generators` they are those of `make_plan` for the
    whole checkpoint.

    Args:
        counts: As `requested_counts` returns them.
    """
    recipe = with_width(recipe, 1, context.geometry)
    curves = recipe_curves(SiteGrouper(recipe, context), generators)
    for side, requested in counts.items():
        # The caller knows which layer of the checkpoint it is.
        side_curves(curves, recipe, [(0, side)], requested, shown=False)
    return curves.points


def plan_from_curves(
    recipe: Recipe,
    kv_ratio: float | Fraction,
    geometry: HeadGeometry,
    points: Mapping[str, CurvePoint],
) -> tuple[AttentionPlan, list[float]]:
    """Return the plan that the recipe's allocation makes of known curves.

    It has the partitions that they were measured for.

    Returns:
        The plan, and the loss increase that the curves expect of each layer.

    Raises:
        ValueError: If the budget cannot be met exactly.
    """
    units = geometry.num_kv_heads
    measured = Curves.of_points(points, units=units)

    def curves(sites: Sequence[tuple[int, str]], counts: _Counts) -> list[dict[int, float]]:
        return side_curves(measured, recipe, sites, counts)

    check_budget(recipe, kv_ratio, geometry)
    recipe = with_width(recipe, kv_ratio, geometry)
    widths = {side: side_width(recipe, geometry, side) for side in SIDES}
    counts = recipe.apply("allocation", problem_of(recipe, kv_ratio, geometry, curves=curves))
    partitions: dict[tuple[int, str], Partition] = {}
    for layer, layer_counts in enumerate(counts):
        for sides, count in layer_sites(recipe, layer_counts):
            partition = measured.partition(CurveSite(layer, sides), count)
            partition = partition or neighbour_partition(units, count // widths[sides[0]])
            partitions |= {(layer, side): partition for side in sides}
    plan = plan_of_sites(partitions, geometry, widths)
    return plan, expected_increases(recipe, counts, units, points)
