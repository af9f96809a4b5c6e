"""From a recipe and a budget to a plan.

Legend: L layers, H query heads, U stored KV heads a layer (units).

The same recipe, budget, model, calibration and seed give the same plan in any process: every site has a generator of
its own, spawned in a fixed order, so that the draws of one site do not depend on those of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import numpy as np

from attention.geometry import HeadGeometry
from attention.plan import AttentionPlan, LayerPlan
from search_spaces.allocation import AllocationProblem, Counts
from search_spaces.context import PlanningContext
from search_spaces.costs import GroupCost, Objective
from search_spaces.curves import Curves, curve_file
from search_spaces.grouping import GroupingProblem, neighbour_partition
from search_spaces.partitions import Partition, expand
from search_spaces.recipes import AXES, Recipe
from search_spaces.rules import sharing_saves_no_cache
from search_spaces.sharing import SharingProblem, share_count
from search_spaces.site import SIDES, Site


def make_plan(
    recipe: Recipe, kv_ratio: float | Fraction, context: PlanningContext, generator: np.random.Generator
) -> AttentionPlan:
    """The plan of `recipe` that keeps exactly `kv_ratio` of the KV heads of MHA.

    Raises ValueError if the budget cannot be met exactly (naming the admissible ratios), exceeds the checkpoint's own,
    or if a part of the recipe lacks what it needs.
    """
    return _Planner(recipe, kv_ratio, context, generator).plan()


def admissible_counts(recipe: Recipe, geometry: HeadGeometry) -> tuple[int, ...]:
    """Head counts that the recipe's grouping can make of one site, ascending."""
    stored = geometry.num_kv_heads
    return tuple(g for g in range(1, stored + 1) if not recipe.equal_groups or stored % g == 0)


def check_budget(recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry) -> None:
    """Raise ValueError if the budget cannot be met, as far as can be told without weights. Cheap: for config checks."""
    if reason := sharing_saves_no_cache(recipe.sharing, kv_ratio):
        raise ValueError(reason)
    if recipe.sharing != "none":
        share_count(recipe.knobs("sharing")["alpha"], geometry.num_layers, geometry.num_heads)
    if kv_ratio > geometry.kv_ratio + 1e-9:
        raise ValueError(
            f"kv_ratio {float(kv_ratio):g} is above the checkpoint's own {geometry.kv_ratio:g} "
            f"({geometry.num_kv_heads} KV heads for {geometry.num_heads} query heads); ratios are relative to "
            "multi-head attention"
        )
    part = AXES["allocation"].get(recipe.allocation)
    if "any_count" in part.needs and recipe.equal_groups:
        raise ValueError(
            f"allocation={recipe.allocation} gives counts that do not divide the heads, and grouping={recipe.grouping} "
            "makes groups of equal size only; set grouping.equal_sizes to false or use walk_asymmetric"
        )
    # Flat losses: the counts are not those of the plan, but whether there are any does not depend on the losses.
    problem = AllocationProblem(
        geometry.num_layers,
        geometry.num_heads,
        geometry.num_kv_heads,
        kv_ratio,
        admissible_counts(recipe, geometry),
        loss=lambda layer, side: 1.0,
        curve=lambda layer, side, counts: dict.fromkeys(counts, 0.0),
    )
    if problem.total < 2 * geometry.num_layers:
        raise ValueError(
            f"kv_ratio {float(kv_ratio):g} is {problem.total} heads, fewer than one key and one value head in each of "
            f"{geometry.num_layers} layers; the least is {1 / geometry.num_heads:g}"
        )
    part(problem, **recipe.knobs("allocation"))


class _Planner:
    """One call of `make_plan`: the groups found so far, and what is still to be found."""

    def __init__(
        self, recipe: Recipe, kv_ratio: float | Fraction, context: PlanningContext, generator: np.random.Generator
    ) -> None:
        check_budget(recipe, kv_ratio, context.geometry)
        self.recipe, self.kv_ratio, self.context = recipe, kv_ratio, context
        self.units = context.units
        self.found: dict[tuple[int, str], Partition] = {}
        # Spawned first and in order: a site's draws do not depend on the other sites.
        self.generators = generator.spawn(2 * context.geometry.num_layers)
        self.curve_generators = generator.spawn(2 * context.geometry.num_layers)
        self._last_objective: tuple[Any, Objective] | None = None

    def plan(self) -> AttentionPlan:
        for layer, (keys, values) in enumerate(self.counts()):
            if self.recipe.together:
                partition = self.group(layer, SIDES, keys, self.generators[2 * layer])
                self.found[layer, "key"] = self.found[layer, "value"] = partition
                continue
            for index, (side, groups) in enumerate(zip(SIDES, (keys, values), strict=True)):
                self.found[layer, side] = self.group(layer, (side,), groups, self.generators[2 * layer + index])
        return self.share(self.plan_of(self.found))

    def share(self, plan: AttentionPlan) -> AttentionPlan:
        """The plan with the heads and MLP blocks that the recipe shares."""
        recipe, context = self.recipe, self.context
        part = AXES["sharing"].get(recipe.sharing)
        found = part(SharingProblem(context.heads, context.mlps), **recipe.knobs("sharing"))
        return replace(plan, shares=found.shares, mlp_shares=found.mlp_shares)

    def counts(self) -> Counts:
        """(key heads, value heads) of each layer, from the allocation part, checked against the budget."""
        geometry, recipe = self.context.geometry, self.recipe
        problem = AllocationProblem(
            geometry.num_layers,
            geometry.num_heads,
            geometry.num_kv_heads,
            self.kv_ratio,
            admissible_counts(recipe, geometry),
            loss=self._loss_of_one_group,
            curve=self._curve,
        )
        counts = AXES["allocation"].get(recipe.allocation)(problem, **recipe.knobs("allocation"))
        total = sum(keys + values for keys, values in counts)
        if total != problem.total:
            raise ValueError(f"allocation={recipe.allocation} gave {total} heads, expected exactly {problem.total}")
        return counts

    def group(self, layer: int, sides: tuple[str, ...], groups: int, generator: np.random.Generator) -> Partition:
        """The recipe's partition of the units at one site."""
        count = len(self.units)
        if groups in (1, count):  # nothing to choose
            return neighbour_partition(count, groups)
        if "measure" in AXES["allocation"].get(self.recipe.allocation).needs:
            # The counts rest on what was measured for this very partition.
            measured = self.curves.partition(layer, sides, groups)
            if measured is not None:
                return measured
        return self._grouped(layer, sides, groups, generator)

    def _grouped(self, layer: int, sides: tuple[str, ...], groups: int, generator: np.random.Generator) -> Partition:
        part = AXES["grouping"].get(self.recipe.grouping)
        site = self._site(layer, sides)
        objective = self._objective(site) if "objective" in part.needs else None
        problem = GroupingProblem(len(self.units), groups, site.similarity, objective)
        return part(problem, generator, **self.recipe.knobs("grouping")).partition

    def plan_of(self, found: dict[tuple[int, str], Partition]) -> AttentionPlan:
        """The plan of partitions of units; sites without one keep what the checkpoint has."""
        geometry = self.context.geometry
        own = neighbour_partition(len(self.units), len(self.units))
        layers = []
        for layer in range(geometry.num_layers):
            keys, values = (expand(found.get((layer, side), own), self.units) for side in SIDES)
            layers.append(LayerPlan.from_groups(keys, values, geometry.num_heads))
        return AttentionPlan(tuple(layers), geometry.head_dim)

    def _site(self, layer: int, sides: tuple[str, ...]) -> Site:
        context, recipe = self.context, self.recipe
        by = sides if len(sides) == 1 or recipe.by == "both" else (recipe.by,)
        similarity = None
        if recipe.similarity is not None:
            similarity = _combined([context.similarity(recipe, layer, side) for side in by])
        return Site(
            layer=layer,
            sides=sides,
            by=by,
            units=self.units,
            heads=context.heads[layer],
            geometry=context.geometry,
            statistics=context.calibration.layers[layer] if context.calibration else None,
            similarity=similarity,
            model=context.model,
            plan_with=lambda partition: self.plan_of(self.found | {(layer, side): partition for side in sides}),
            measure=partial(context.loss_of, recipe),
        )

    def _objective(self, site: Site) -> Objective:
        """The recipe's objective at a site; of the last site only, since it holds the site's moments."""
        key = (site.layer, site.sides)
        additive = "whole_partition" not in AXES["objective"].get(str(self.recipe.objective)).needs
        if additive and self._last_objective is not None and self._last_objective[0] == key:
            return self._last_objective[1]
        made = AXES["objective"].get(str(self.recipe.objective))(site, **self.recipe.knobs("objective"))
        self._last_objective = (key, made)
        return made

    def _loss_of_one_group(self, layer: int, side: str) -> float:
        """Cost of all units of a site in one group (for DHA's allocation)."""
        objective = self._objective(self._site(layer, (side,)))
        if not isinstance(objective, GroupCost):
            raise ValueError(f"objective={self.recipe.objective} has no group cost to allocate by")
        return objective.cost(tuple(range(len(self.units))))

    def _curve(self, layer: int, side: str, counts: Sequence[int]) -> dict[int, float]:
        """Measured rise of the loss if only this site is grouped, for each count. `side` may be "both"."""
        if side == "both" and not self.recipe.together:
            keys, values = (self._curve(layer, each, counts) for each in SIDES)
            return {count: keys[count] + values[count] for count in counts}
        sides = SIDES if side == "both" else (side,)
        return self.curves.curve(layer, sides, counts, len(self.units))

    @cached_property
    def curves(self) -> Curves:
        """Measured curves of this recipe, shared by all budgets through the context's cache folder."""
        tokens = self.recipe.knobs("allocation")["tokens"]

        def group(layer: int, sides: tuple[str, ...], groups: int) -> Partition:
            if groups == 1:
                return neighbour_partition(len(self.units), 1)
            # A generator of its own for each point, so that no point depends on which others are measured.
            generator = self.curve_generators[2 * layer + SIDES.index(sides[0])]
            fresh = np.random.default_rng([*_seeds(generator), groups])
            return self._grouped(layer, sides, groups, fresh)

        def measure(layer: int, sides: tuple[str, ...], partition: Partition) -> float:
            plan = self.plan_of({(layer, side): partition for side in sides})
            return self.context.rise_of(self.recipe, plan, layer, tokens)

        seed = str([_seeds(g) for g in self.curve_generators[:1]])
        return Curves(group, measure, curve_file(self.recipe, self.context, tokens, seed))


def _seeds(generator: np.random.Generator) -> list[int]:
    """What a generator was seeded with, as integers."""
    return [int(word) for word in generator.bit_generator.seed_seq.generate_state(4)]  # type: ignore[attr-defined]


def _combined(matrices: list[np.ndarray]) -> np.ndarray:
    """Sum of similarities, each brought to zero mean and unit spread over its pairs; one matrix comes back as it is."""
    if len(matrices) == 1:
        return matrices[0]
    total = np.zeros_like(matrices[0])
    for matrix in matrices:
        off = matrix[~np.eye(len(matrix), dtype=bool)]
        spread = off.std() if off.size else 0.0
        total += (matrix - off.mean()) / spread if spread > 0 else 0.0
    return total
