"""The groups of the heads of one site, from its statistics.

Legend: U stored KV heads per layer (units).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from attention.calibration.store import layer_statistics
from attention.plan import AttentionPlan
from search_spaces.costs import GroupCost, Objective
from search_spaces.grouping.neighbour import neighbour_partition
from search_spaces.grouping.problem import GroupingProblem
from search_spaces.partitions import Partition
from search_spaces.planning.context import PlanningContext
from search_spaces.planning.prices import prices_of_site
from search_spaces.planning.widths import side_width
from search_spaces.recipes.recipe import AXES, Recipe
from search_spaces.site import SIDES, Site, plan_of_sites

Sides = tuple[str, ...]
"""The sides that are grouped alike: ("key",), ("value",) or both."""


def layer_sites(recipe: Recipe, counts: tuple[int, int]) -> Iterator[tuple[Sides, int]]:
    """Yield the sites of a layer with `counts` (key heads, value heads), and the count of each."""
    if recipe.together:
        yield SIDES, counts[0]
    else:
        for side, count in zip(SIDES, counts, strict=True):
            yield (side,), count


class SiteGrouper:
    """Groups the heads of one site after the other, as a recipe says.

    Attributes:
        recipe: Its grouping, objective, similarity and width, a number, are used.
        context: Heads and statistics of all layers.
        partitions: The groups found, by layer and side, for objectives that judge whole plans.
    """

    def __init__(self, recipe: Recipe, context: PlanningContext) -> None:
        self.recipe = recipe
        self.context = context
        self.partitions: dict[tuple[int, str], Partition] = {}
        self._last_objective: tuple[Any, Objective] | None = None

    def group(
        self, layer: int, sides: Sides, count: int, generator: np.random.Generator
    ) -> Partition:
        """Return the recipe's partition of the units at one site.

        Args:
            layer: Number of the layer.
            sides: What is grouped alike.
            count: Heads of the checkpoint's width that the groups cost.
            generator: Of the grouping.
        """
        units = len(self.context.units)
        groups = count // self.widths[sides[0]]
        if groups in (1, units):  # only one partition is possible
            return neighbour_partition(units, groups)
        site = self._site(layer, sides)
        objective = None if self.recipe.objective is None else self._objective(site)
        problem = GroupingProblem(units, groups, site.similarity, objective)
        return self.recipe.apply("grouping", problem, generator).partition

    def assign(self, layer: int, sides: Sides, partition: Partition) -> None:
        """Add the partition of a site to those found."""
        self.partitions |= {(layer, side): partition for side in sides}

    def plan(self) -> AttentionPlan:
        """Return the plan of the partitions found; other sites keep the checkpoint's heads."""
        return plan_of_sites(self.partitions, self.context.geometry, self.widths)

    @property
    def widths(self) -> dict[str, int]:
        """Width of the heads of each side."""
        return {side: side_width(self.recipe, self.context.geometry, side) for side in SIDES}

    def cost_of_one_group(self, layer: int, side: str) -> float:
        """Return the cost of all units of a site in one group."""
        objective = self._objective(self._site(layer, (side,)))
        if not isinstance(objective, GroupCost):
            raise ValueError(f"objective={self.recipe.objective} has no group cost to allocate by")
        return objective.cost(tuple(range(len(self.context.units))))

    def _site(self, layer: int, sides: Sides) -> Site:
        context = self.context
        recipe = self.recipe
        by = sides if len(sides) == 1 or recipe.by == "both" else (recipe.by,)
        similarity = None
        if recipe.similarity is not None:
            similarity = _combined([context.similarity(recipe, layer, side) for side in by])

        def plan_with(partition: Partition) -> AttentionPlan:
            tried = self.partitions | {(layer, side): partition for side in sides}
            return plan_of_sites(tried, context.geometry, self.widths)

        return Site(
            layer=layer,
            sides=sides,
            by=by,
            units=context.units,
            heads=context.heads[layer],
            geometry=context.geometry.layer(layer),
            statistics=layer_statistics(context.calibration, layer, context.heads[layer]),
            similarity=similarity,
            fusion_distance=context.fusion_distance(layer, by),
            model=context.model,
            plan_with=plan_with,
            width=self.widths[sides[0]],
            measure=partial(context.loss_of, recipe),
        )

    def _objective(self, site: Site) -> Objective:
        """Return the recipe's objective at a site.

        Only that of the last site is cached, since it holds the site's moments.
        """
        key = (site.layer, site.sides)
        name = str(self.recipe.objective)
        additive = "whole_partition" not in AXES["objective"].get(name).needs
        if additive and self._last_objective is not None and self._last_objective[0] == key:
            return self._last_objective[1]
        objective = self.recipe.apply("objective", site)
        folder = self.context.cache_dir
        calibration = self.context.calibration
        if (
            isinstance(objective, GroupCost)
            and objective.effort_of_one
            and folder is not None
            and calibration is not None
        ):
            knobs = self.recipe.knobs("objective")
            objective.stored_prices = prices_of_site(folder, name, knobs, site, calibration.digest)
        self._last_objective = (key, objective)
        return objective


def _combined(matrices: list[np.ndarray]) -> np.ndarray:
    """Return the sum of similarities, each brought to zero mean and unit spread over its pairs.

    One matrix comes back as it is.
    """
    if len(matrices) == 1:
        return matrices[0]
    total = np.zeros_like(matrices[0])
    for matrix in matrices:
        off = matrix[~np.eye(len(matrix), dtype=bool)]
        spread = off.std() if off.size else 0.0
        total += (matrix - off.mean()) / spread if spread > 0 else 0.0
    return total
