"""Plans a few layers at a time.

What is measured of some layers, one layer's plan, and a plan from kept curves.

Legend: L layers, U stored KV heads per layer (units).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from attention.geometry import HeadGeometry
from attention.plan import AttentionPlan, LayerPlan
from search_spaces.grouping.neighbour import neighbour_partition
from search_spaces.partitions import Partition
from search_spaces.planning.budgets import check_budget, problem_of
from search_spaces.planning.context import PlanningContext
from search_spaces.planning.curves import CurvePoint, expected_increases, point_key
from search_spaces.planning.planner import Planner, site_generators
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
    planner = Planner(recipe, 1, context, generators, [])
    planner.group_layer(0, counts)
    return planner.plan_of(planner.partitions).layers[0]


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
    recipe.apply(
        "allocation", problem_of(recipe, kv_ratio, geometry, loss=lambda *_: 1.0, curves=flat)
    )
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
    requested = requested_counts(recipe, kv_ratio, geometry)
    planner = Planner(recipe, kv_ratio, context, *site_generators(generator, geometry.num_layers))
    sites = sorted(site for site in requested if site[0] in layers)
    return sum(map(len, planner.curves_of(sites, requested[sites[0]]))) if sites else 0


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
    planner = Planner(recipe, 1, context, [], generators)
    for side, requested in counts.items():
        # The caller knows which layer of the checkpoint it is.
        planner.curves_of([(0, side)], requested, shown=False)
    return planner.curves.points


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

    def curve(layer: int, side: str, counts: _Counts) -> dict[int, float]:
        if side == "both" and not recipe.together:
            return {
                count: sum(curve(layer, each, [count])[count] for each in SIDES) for count in counts
            }
        sides = SIDES if side == "both" else (side,)
        return {
            c: 0.0 if c == units else points[point_key(layer, sides, c)].increase for c in counts
        }

    def curves(sites: Sequence[tuple[int, str]], counts: _Counts) -> list[dict[int, float]]:
        return [curve(layer, side, counts) for layer, side in sites]

    check_budget(recipe, kv_ratio, geometry)
    counts = recipe.apply("allocation", problem_of(recipe, kv_ratio, geometry, curves=curves))
    partitions: dict[tuple[int, str], Partition] = {}
    for layer, (keys, values) in enumerate(counts):
        sites: Any = (
            [(SIDES, keys)] if recipe.together else [(("key",), keys), (("value",), values)]
        )
        for sides, count in sites:
            free = count not in (1, units)
            partition = (
                points[point_key(layer, sides, count)].partition
                if free
                else neighbour_partition(units, count)
            )
            partitions |= {(layer, side): partition for side in sides}
    return plan_of_sites(partitions, geometry), expected_increases(recipe, counts, units, points)
