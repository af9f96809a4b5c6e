"""From a recipe and a KV ratio to a plan.

Legend: L layers, H query heads, U stored KV heads per layer (units).

The same recipe, KV ratio, model, calibration and seed give the same plan in any process: every site
has a generator of its own, spawned in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from attention.base.progress import stage
from attention.plan import AttentionPlan
from search_spaces.allocation.problem import Counts
from search_spaces.costs import GroupCost, Objective
from search_spaces.grouping.neighbour import neighbour_partition
from search_spaces.grouping.problem import GroupingProblem
from search_spaces.partitions import Partition
from search_spaces.planning.budgets import check_budget, problem_of
from search_spaces.planning.context import PlanningContext
from search_spaces.planning.curves import Curves, CurveSite, curve_name, expected_increases
from search_spaces.planning.loss_increases import MEASURED_INCREASE, StepReport
from search_spaces.planning.prices import prices_of_site
from search_spaces.recipes.recipe import AXES, Recipe
from search_spaces.sharing.problem import SharingProblem
from search_spaces.site import SIDES, Site, plan_of_sites


def make_plan(
    recipe: Recipe,
    kv_ratio: float | Fraction,
    context: PlanningContext,
    generator: np.random.Generator,
) -> AttentionPlan:
    """Return the plan of `recipe` that keeps exactly `kv_ratio` of the checkpoint's own KV heads.

    Raises:
        ValueError: If the budget cannot be met exactly (naming the admissible ratios), or if a part
            of the recipe lacks what it needs.
    """
    check_budget(recipe, kv_ratio, context.geometry)
    return Planner(
        recipe, kv_ratio, context, *site_generators(generator, context.geometry.num_layers)
    ).plan()


def site_generators(
    generator: np.random.Generator, layers: int
) -> tuple[list[np.random.Generator], ...]:
    """Return the generators of the sites for grouping and for curves, two per layer each."""
    return generator.spawn(2 * layers), generator.spawn(2 * layers)


@dataclass
class Planner:
    """One call of `make_plan`; `partitions`: the groups found so far."""

    recipe: Recipe
    kv_ratio: float | Fraction
    context: PlanningContext
    generators: list[np.random.Generator]
    curve_generators: list[np.random.Generator]
    partitions: dict[tuple[int, str], Partition] = field(default_factory=dict, init=False)
    _last_objective: tuple[Any, Objective] | None = field(default=None, init=False)

    def plan(self) -> AttentionPlan:
        """Group the heads of all sites and return the plan."""
        counts = self.counts()
        with stage("grouping heads", len(counts), "layers") as progress:
            for layer, of_layer in enumerate(counts):
                self.group_layer(layer, of_layer)
                progress.step()
        shares = self.recipe.apply("sharing", SharingProblem(self.context.heads, self.context.mlps))
        plan = self.recipe.apply("composition", replace(self.plan_of(self.partitions), **shares))
        if "measure" in AXES["allocation"].get(self.recipe.allocation).needs:
            units = len(self.context.units)
            self.context.increases[plan] = expected_increases(
                self.recipe, counts, units, self.curves.points
            )
        return plan

    def group_layer(self, layer: int, counts: tuple[int, int]) -> None:
        """Find the partitions of one layer with these (key heads, value heads)."""
        if self.recipe.together:
            partition = self.group(layer, SIDES, counts[0], self.generators[2 * layer])
            self.partitions[layer, "key"] = self.partitions[layer, "value"] = partition
            return
        for index, (side, groups) in enumerate(zip(SIDES, counts, strict=True)):
            self.partitions[layer, side] = self.group(
                layer, (side,), groups, self.generators[2 * layer + index]
            )

    def counts(self) -> Counts:
        """Return (key heads, value heads) of each layer, by the allocation, within the budget."""
        recipe = self.recipe
        measures: dict[str, Any] = {"loss": self._loss_of_one_group, "curves": self.curves_of}
        if recipe.knobs("allocation").get("increases") == MEASURED_INCREASE:
            measures["final"] = self._final
        problem = problem_of(recipe, self.kv_ratio, self.context.geometry, **measures)
        counts = recipe.apply("allocation", problem)
        total = sum(keys + values for keys, values in counts)
        if total != problem.total:
            raise ValueError(
                f"allocation={recipe.allocation} gave {total} heads, expected exactly "
                f"{problem.total}"
            )
        return counts

    def group(
        self, layer: int, sides: tuple[str, ...], groups: int, generator: np.random.Generator
    ) -> Partition:
        """Return the recipe's partition of the units at one site."""
        count = len(self.context.units)
        if groups in (1, count):  # nothing to choose
            return neighbour_partition(count, groups)
        if "measure" in AXES["allocation"].get(self.recipe.allocation).needs:
            # The counts rest on what was measured for this very partition.
            measured = self.curves.partition(CurveSite(layer, sides), groups)
            if measured is not None:
                return measured
        return self._grouped(layer, sides, groups, generator)

    def _grouped(
        self, layer: int, sides: tuple[str, ...], groups: int, generator: np.random.Generator
    ) -> Partition:
        site = self._site(layer, sides)
        objective = None if self.recipe.objective is None else self._objective(site)
        problem = GroupingProblem(len(self.context.units), groups, site.similarity, objective)
        return self.recipe.apply("grouping", problem, generator).partition

    def plan_of(self, partitions: dict[tuple[int, str], Partition]) -> AttentionPlan:
        """Return the plan of partitions of units.

        Sites without one keep what the checkpoint has.
        """
        return plan_of_sites(partitions, self.context.geometry)

    def _site(self, layer: int, sides: tuple[str, ...]) -> Site:
        context = self.context
        recipe = self.recipe
        by = sides if len(sides) == 1 or recipe.by == "both" else (recipe.by,)
        similarity = None
        if recipe.similarity is not None:
            similarity = _combined([context.similarity(recipe, layer, side) for side in by])
        return Site(
            layer=layer,
            sides=sides,
            by=by,
            units=self.context.units,
            heads=context.heads[layer],
            geometry=context.geometry.layer(layer),
            statistics=context.calibration.layers[layer] if context.calibration else None,
            similarity=similarity,
            fusion_distance=context.fusion_distance(layer, by),
            model=context.model,
            plan_with=lambda partition: self.plan_of(
                self.partitions | {(layer, side): partition for side in sides}
            ),
            measure=partial(context.loss_of, recipe),
        )

    def _objective(self, site: Site) -> Objective:
        """Return the recipe's objective at a site.

        Only that of the last site is cached, since it holds the site's moments.
        """
        key = (site.layer, site.sides)
        name = str(self.recipe.objective)
        knobs = self.recipe.knobs("objective")
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
            objective.kept = prices_of_site(folder, name, knobs, site, calibration.digest)
        self._last_objective = (key, objective)
        return objective

    def _loss_of_one_group(self, layer: int, side: str) -> float:
        """Cost of all units of a site in one group (for DHA's allocation)."""
        objective = self._objective(self._site(layer, (side,)))
        if not isinstance(objective, GroupCost):
            raise ValueError(f"objective={self.recipe.objective} has no group cost to allocate by")
        return objective.cost(tuple(range(len(self.context.units))))

    def curves_of(
        self, sites: Sequence[tuple[int, str]], counts: Sequence[int], *, shown: bool = True
    ) -> list[dict[int, float]]:
        """Return the loss increases if only one site is grouped, for each site and count.

        Args:
            sites: (layer, side); `side` may be "both".
            counts: Head counts.
            shown: As in `Curves.of`.
        """
        both = (SIDES,) if self.recipe.together else tuple((side,) for side in SIDES)
        curve_sites = [
            [CurveSite(at, sides) for sides in (both if side == "both" else ((side,),))]
            for at, side in sites
        ]
        results = iter(
            self.curves.of(
                [site for of_site in curve_sites for site in of_site], counts, shown=shown
            )
        )
        curves = [[next(results) for _ in of_site] for of_site in curve_sites]
        return [
            {count: sum(curve[count] for curve in of_site) for count in counts}
            for of_site in curves
        ]

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
            for layer, of_layer in enumerate(counts):
                self.group_layer(layer, of_layer)
            return self.context.loss_of(recipe, self.plan_of(self.partitions), knobs)

        return self.curves.whole([counts, recipe.refinement, knobs], measure)

    @cached_property
    def curves(self) -> Curves:
        """The measured curves of this recipe, shared by all budgets through the context."""
        allocation_knobs = self.recipe.knobs("allocation")
        # What no refinement will fit is measured as it is.
        fitted = self.recipe.knobs("refinement").get("fit_steps", 0)
        knobs = {name: allocation_knobs[name] for name in ("tokens", "increases")}
        fit_steps = min(allocation_knobs["fit_steps"], fitted)
        # Only estimates of fitted layers are scaled to the steps of the refinement: others serve
        # any number of them.
        scaled = allocation_knobs["increases"] != MEASURED_INCREASE and fit_steps > 0
        knobs |= {"fit_steps": fit_steps, "refined_steps": fitted if scaled else 0}

        def group(site: CurveSite, groups: int) -> Partition:
            if groups == 1:
                return neighbour_partition(len(self.context.units), 1)
            # A generator of its own for each point, so that no point depends on which others are
            # measured.
            generator = self.curve_generators[2 * site.layer + SIDES.index(site.sides[0])]
            fresh = np.random.default_rng([*_seeds(generator), groups])
            return self._grouped(site.layer, site.sides, groups, fresh)

        def measure(
            partitions: Sequence[tuple[CurveSite, Partition]], report: StepReport
        ) -> list[float]:
            plans = [
                (
                    site.layer,
                    self.plan_of({(site.layer, side): partition for side in site.sides}),
                )
                for site, partition in partitions
            ]
            return self.context.increases_of(self.recipe, plans, report=report, **knobs)

        seed = str([_seeds(g) for g in self.curve_generators[:1]])
        name = curve_name(self.recipe, self.context, knobs, seed)
        folder = self.context.cache_dir
        file = None if folder is None else Path(folder) / f"curves-{name}.json"
        points = self.context.curves.setdefault(name, {})
        units = len(self.context.units)
        # What runs the whole model gains nothing by more layers at a time, and would keep what it
        # found less often.
        at_once = (
            1 if allocation_knobs["increases"] == MEASURED_INCREASE else self.context.layers_at_once
        )

        # Before points are counted: it takes longer than several of them.
        def prepare() -> None:
            context = self.context
            if (
                allocation_knobs["increases"] != MEASURED_INCREASE
                and context.model is not None
                and context.sequences is not None
            ):
                context.output_metric(0, allocation_knobs["tokens"])

        return Curves(group, measure, points, file, prepare, units=units, at_once=at_once)


def _seeds(generator: np.random.Generator) -> list[int]:
    """Return what a generator was seeded with, as integers."""
    return [int(word) for word in generator.bit_generator.seed_seq.generate_state(4)]  # type: ignore[attr-defined]


def _combined(matrices: list[np.ndarray]) -> np.ndarray:
    """Sum of similarities, each brought to zero mean and unit spread over its pairs.

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
