"""From a recipe and a KV ratio to a plan.

Legend: L layers, H query heads, U stored KV heads per layer (units).

The same recipe, KV ratio, model, calibration and seed give the same plan in any process: every site
has a separate generator, spawned in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np

from attention.base.products import exact_products
from attention.base.progress import stage
from attention.conversion.refinement.local import steps_in_all
from attention.plan import AttentionPlan
from search_spaces.allocation.problem import Counts
from search_spaces.partitions import Partition
from search_spaces.planning.budgets import check_budget, problem_of
from search_spaces.planning.context import PlanningContext
from search_spaces.planning.curves import (
    Curves,
    CurveSite,
    curve_name,
    expected_increases,
    side_curves,
)
from search_spaces.planning.loss_increases import MEASURED_INCREASE, StepReport
from search_spaces.planning.site_grouper import SiteGrouper, layer_sites
from search_spaces.planning.widths import with_width
from search_spaces.recipes.recipe import Recipe
from search_spaces.sharing.problem import SharingProblem
from search_spaces.site import SIDES, plan_of_sites


def make_plan(
    recipe: Recipe,
    kv_ratio: float | Fraction,
    context: PlanningContext,
    generator: np.random.Generator,
) -> AttentionPlan:
    """Return the plan of `recipe` that keeps exactly `kv_ratio` of the checkpoint's KV heads.

    Raises:
        ValueError: If the budget cannot be met exactly (naming the admissible ratios), or if a part
            of the recipe lacks what it needs.
    """
    check_budget(recipe, kv_ratio, context.geometry)
    recipe = with_width(recipe, kv_ratio, context.geometry)
    generators = site_generators(generator, context.geometry.num_layers)
    with exact_products():
        return Planner(recipe, kv_ratio, context, *generators).plan()


def site_generators(
    generator: np.random.Generator, layers: int
) -> tuple[list[np.random.Generator], ...]:
    """Return the generators of the sites for grouping and for curves, two per layer each."""
    return generator.spawn(2 * layers), generator.spawn(2 * layers)


class Planner:
    """One call of `make_plan`: distributes the budget over sites, then has each grouped."""

    def __init__(
        self,
        recipe: Recipe,
        kv_ratio: float | Fraction,
        context: PlanningContext,
        generators: list[np.random.Generator],
        curve_generators: list[np.random.Generator],
    ) -> None:
        self.recipe = recipe
        self.kv_ratio = kv_ratio
        self.context = context
        self.grouper = SiteGrouper(recipe, context)
        self._generators = generators
        self._curve_generators = curve_generators
        self._measures = recipe.measures_increases

    @cached_property
    def curves(self) -> Curves:
        """The measured curves of this recipe, shared by all budgets through the context."""
        return recipe_curves(self.grouper, self._curve_generators)

    def plan(self) -> AttentionPlan:
        """Group the heads of all sites and return the plan."""
        counts = self.counts()
        with stage("grouping heads", len(counts), "layers") as progress:
            for layer, layer_counts in enumerate(counts):
                self._group_layer(layer, layer_counts)
                progress.step()
        shares = self.recipe.apply("sharing", SharingProblem(self.context.heads, self.context.mlps))
        plan = self.recipe.apply("composition", replace(self.grouper.plan(), **shares))
        if self._measures:
            units = len(self.context.units)
            self.context.increases[plan] = expected_increases(
                self.recipe, counts, units, self.curves.points
            )
        return plan

    def counts(self) -> Counts:
        """Return (key heads, value heads) of each layer, by the allocation, within the budget."""
        recipe = self.recipe
        measured = recipe.knobs("allocation").get("increases") == MEASURED_INCREASE
        problem = problem_of(
            recipe,
            self.kv_ratio,
            self.context.geometry,
            loss=self.grouper.cost_of_one_group,
            curves=lambda sites, counts: side_curves(self.curves, recipe, sites, counts),
            final=self._final if measured else None,
        )
        counts = recipe.apply("allocation", problem)
        total = sum(keys + values for keys, values in counts)
        if total != problem.total:
            raise ValueError(
                f"allocation={recipe.allocation} gave {total} heads, expected exactly "
                f"{problem.total}"
            )
        return counts

    def _group_layer(self, layer: int, counts: tuple[int, int]) -> None:
        for index, (sides, count) in enumerate(layer_sites(self.recipe, counts)):
            # Measured counts rest on what was measured for a very partition.
            measured = self._measures and self.curves.partition(CurveSite(layer, sides), count)
            generator = self._generators[2 * layer + index]
            partition = measured or self.grouper.group(layer, sides, count, generator)
            self.grouper.assign(layer, sides, partition)

    def _final(self, counts: Counts) -> float:
        """Measured loss of the model that these counts lead to, refined in few steps.

        Enough to rank the finalists.
        """
        recipe = self.recipe
        knobs = recipe.knobs("refinement")
        if "fit_steps" in knobs:
            knobs["fit_steps"] = min(
                knobs["fit_steps"], recipe.knobs("allocation")["finalist_steps"]
            )

        def measure() -> float:
            for layer, layer_counts in enumerate(counts):
                self._group_layer(layer, layer_counts)
            return self.context.loss_of(recipe, self.grouper.plan(), knobs)

        return self.curves.whole([counts, recipe.refinement, knobs], measure)


def recipe_curves(grouper: SiteGrouper, generators: Sequence[np.random.Generator]) -> Curves:
    """Return the curves of a recipe, whose points the context shares.

    Args:
        grouper: Has the recipe and the context.
        generators: The curve generators of `site_generators`.
    """
    recipe = grouper.recipe
    context = grouper.context
    allocation_knobs = recipe.knobs("allocation")
    measures = allocation_knobs["increases"] == MEASURED_INCREASE
    # What no refinement will fit is measured as it is.
    fitted = recipe.knobs("refinement").get("fit_steps", 0)
    knobs = {name: allocation_knobs[name] for name in ("tokens", "increases")}
    fit_steps = min(allocation_knobs["fit_steps"], fitted)
    # Only estimates of fitted layers are scaled to the steps of the refinement: others serve
    # any number of them.
    scaled = not measures and fit_steps > 0
    layers = context.checkpoint_layers or context.geometry.num_layers
    refined = round(steps_in_all(fitted, layers) / layers)
    knobs |= {"fit_steps": fit_steps, "refined_steps": refined if scaled else 0}

    def group(site: CurveSite, count: int) -> Partition:
        # A separate generator for each point, so that no point depends on which others are
        # measured.
        generator = generators[2 * site.layer + SIDES.index(site.sides[0])]
        fresh = np.random.default_rng([*_seeds(generator), count])
        return grouper.group(site.layer, site.sides, count, fresh)

    def measure(
        partitions: Sequence[tuple[CurveSite, Partition]], report: StepReport
    ) -> list[float]:
        plans = [
            (
                site.layer,
                plan_of_sites(
                    {(site.layer, side): partition for side in site.sides},
                    context.geometry,
                    grouper.widths,
                ),
            )
            for site, partition in partitions
        ]
        return context.increases_of(recipe, plans, report=report, **knobs)

    # Before points are counted: it takes longer than several of them.
    def prepare() -> None:
        if not measures and context.model is not None and context.sequences is not None:
            context.output_metric(0, allocation_knobs["tokens"])

    name = curve_name(recipe, context, knobs, str([_seeds(each) for each in generators[:1]]))
    folder = context.cache_dir
    return Curves(
        group,
        measure,
        context.curves.setdefault(name, {}),
        None if folder is None else Path(folder) / f"curves-{name}.json",
        prepare,
        units=len(context.units),
        # What runs the whole model gains nothing by more layers at a time, and would keep what it
        # found less often.
        at_once=1 if measures else context.layers_at_once,
    )


def _seeds(generator: np.random.Generator) -> list[int]:
    """Return what a generator was seeded with, as integers."""
    return [int(word) for word in generator.bit_generator.seed_seq.generate_state(4)]  # type: ignore[attr-defined]
