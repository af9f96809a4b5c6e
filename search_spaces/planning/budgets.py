"""Which KV ratios a recipe can keep, as far as can be known without weights.

A ratio that a user gives is a ceiling: `nearest_budget` is the budget that is used, `check_budget`
the exact one.

Legend: L layers, U stored KV heads per layer (units).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import islice
from typing import Any

from attention.geometry import HeadGeometry
from attention.ratios import most_heads, own_cache, own_heads, percent
from search_spaces.allocation.knapsack import BY_CURVES, considered, reachable, usual_counts
from search_spaces.allocation.problem import (
    AllocationProblem,
    Counts,
    PlanLoss,
    SiteCurves,
    SiteLoss,
)
from search_spaces.planning.widths import widest
from search_spaces.recipes.recipe import AXES, WIDEST, Recipe
from search_spaces.recipes.rules import keeps_everything, nothing_to_fuse, sharing_saves_no_cache
from search_spaces.sharing.matching import share_count

LOOKS_AT_WEIGHTS = frozenset({"measure", "group_cost", "model"})  # needs of an allocation


def counts_of(recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry) -> Counts:
    """(key heads, value heads) of each layer, for allocations that look at no weights.

    Raises:
        ValueError: For others.
    """
    part = AXES["allocation"].get(recipe.allocation)
    if part.needs & LOOKS_AT_WEIGHTS:
        raise ValueError(f"allocation={recipe.allocation} looks at the weights of all layers")
    check_budget(recipe, kv_ratio, geometry)
    return recipe.apply("allocation", problem_of(recipe, kv_ratio, geometry))


def admissible_counts(recipe: Recipe, geometry: HeadGeometry) -> tuple[int, ...]:
    """Head counts that the recipe's grouping can make of one site, ascending.

    Every count, in groups as equal as can be; divisors alone where the grouping makes no other
    groups, or where a stock checkpoint of the family could not hold them. A head of width m counts
    as m.
    """
    stored = geometry.num_kv_heads
    part = AXES["grouping"].get(recipe.grouping)
    equal = "equal_groups" in part.needs or (
        recipe.equal_groups and recipe.together and not geometry.pads_queries
    )

    def possible(count: int) -> bool:
        width = widest(count, geometry) if recipe.width == WIDEST else int(recipe.width)
        return count % width == 0 and (not equal or stored % (count // width) == 0)

    return tuple(count for count in range(1, stored + 1) if possible(count))


def flat_loss(layer: int, side: str) -> float:
    """Return 1, the loss of every site where only head counts matter."""
    return 1.0


def problem_of(
    recipe: Recipe,
    kv_ratio: float | Fraction,
    geometry: HeadGeometry,
    *,
    loss: SiteLoss | None = None,
    curves: SiteCurves | None = None,
    final: PlanLoss | None = None,
) -> AllocationProblem:
    """Return what the recipe's allocation is handed."""
    counts = admissible_counts(recipe, geometry)
    usual = (
        usual_counts(geometry.num_kv_heads, geometry.num_heads)
        if recipe.equal_groups and recipe.width == 1
        else counts
    )
    return AllocationProblem(
        geometry.num_layers,
        geometry.num_kv_heads,
        kv_ratio,
        counts,
        loss=loss,
        curves=curves,
        final=final,
        usual=usual,
    )


def check_budget(
    recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry, dtype: Any = None
) -> None:
    """Raise ValueError naming the nearest budget if this one cannot be met exactly.

    Only what can be known without weights is checked. Cheap: for config checks.

    Args:
        recipe: The recipe.
        kv_ratio: Share of the checkpoint's own cache.
        geometry: That of the checkpoint.
        dtype: Of the cache, where it is known, for the message.
    """
    if reason := _refused(recipe, kv_ratio, geometry):
        raise ValueError(
            f"{reason}; {own_cache(geometry, dtype)}; {_nearest(recipe, kv_ratio, geometry)}"
        )


def _nearest(recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry) -> str:
    """In words.

    The next budgets below and above that the recipe can meet and that change something.
    """
    heads = own_heads(geometry)
    most = heads - bool(keeps_everything(recipe.sharing, recipe.composition, 1))
    totals = [total for total in possible_totals(recipe, geometry) if total <= most]
    position = bisect_right(totals, kv_ratio * heads)
    nearest = [
        *_met(recipe, totals[:position][::-1], geometry),
        *_met(recipe, totals[position:], geometry),
    ]
    if not nearest:
        return f"recipe {recipe.name} can meet no kv_ratio on this checkpoint"
    ratios = " or ".join(f"{total / heads:.8g}" for total in nearest)
    return f"the nearest kv_ratio that recipe {recipe.name} can meet is {ratios}"


def _met(recipe: Recipe, totals: Sequence[int], geometry: HeadGeometry) -> list[int]:
    """Return the first of these totals that the recipe can meet; none if there is none."""
    heads = own_heads(geometry)
    return list(
        islice((t for t in totals if not _refused(recipe, Fraction(t, heads), geometry)), 1)
    )


@cache
def possible_totals(recipe: Recipe, geometry: HeadGeometry) -> Sequence[int]:
    """Key heads plus value heads in all layers, ascending.

    The totals that the recipe's allocation may give.

    Those of an allocation that is not known here are all there are, to be tried one by one.
    """
    layers = geometry.num_layers
    most = own_heads(geometry)
    problem = problem_of(recipe, 1, geometry)
    if recipe.allocation == "single":
        return [2 * layers]
    if recipe.allocation == "uniform":
        return [2 * layers * count for count in problem.admissible]
    if recipe.allocation in BY_CURVES:
        counts = considered(problem, recipe.knobs("allocation")["counts"])
        if "apart" in AXES["allocation"].get(recipe.allocation).needs:
            return reachable(counts, 2 * layers)
        return [2 * total for total in reachable(counts, layers)]
    return range(2 * layers, most + 1)


def _refused(recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry) -> str | None:
    """Why `require_budget` refuses it, or None."""
    try:
        require_budget(recipe, kv_ratio, geometry)
    except ValueError as error:
        return str(error)
    return None


def require_budget(recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry) -> None:
    """Check a budget as `check_budget` does, without a search for budgets to name.

    For many calls, as of a space that is being laid out.
    """
    for reason in (
        sharing_saves_no_cache(recipe.sharing, kv_ratio),
        nothing_to_fuse(recipe.relaxation, kv_ratio),
    ):
        if reason:
            raise ValueError(reason)
    if recipe.sharing != "none":
        if geometry.num_kv_heads < geometry.num_heads:
            raise ValueError(
                f"sharing={recipe.sharing} gives a query head the weights of another with its own "
                f"key and value, and this checkpoint has {geometry.num_kv_heads} KV heads for "
                f"{geometry.num_heads} query heads; "
                "it takes a multi-head checkpoint"
            )
        share_count(recipe.knobs("sharing")["alpha"], geometry.num_layers, geometry.num_heads)
    part = AXES["allocation"].get(recipe.allocation)
    if "any_count" in part.needs and recipe.equal_groups:
        raise ValueError(
            f"allocation={recipe.allocation} gives counts that do not divide the heads, and "
            f"grouping={recipe.grouping} "
            "makes groups of equal size only; set grouping.equal_sizes to false or use "
            "walk_asymmetric"
        )
    # Flat losses: the counts are not those of the plan, but whether there are any does not depend
    # on the losses.
    problem = problem_of(
        recipe,
        kv_ratio,
        geometry,
        loss=flat_loss,
        curves=lambda sites, counts: [dict.fromkeys(counts, 0.0)] * len(sites),
    )
    if problem.total < 2 * geometry.num_layers:
        raise ValueError(
            f"kv_ratio {float(kv_ratio):.4g} is {problem.total} heads, fewer than one key and one "
            f"value head in each "
            f"of {geometry.num_layers} layers; the least is {1 / geometry.num_kv_heads:g}"
        )
    if recipe.allocation in BY_CURVES and problem.total in possible_totals(recipe, geometry):
        return
    recipe.apply("allocation", problem)


class BelowLeast(ValueError):
    """A budget below the `least` share of the checkpoint's KV heads that a recipe can keep."""

    def __init__(
        self, recipe: Recipe, kv_ratio: float | Fraction, least: Fraction, geometry: HeadGeometry
    ) -> None:
        self.least = least
        super().__init__(
            f"recipe {recipe.name} keeps at least {percent(float(least))} of the KV cache, got "
            f"{percent(float(kv_ratio))}; {own_cache(geometry)}"
        )


def nearest_budget(recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry) -> Fraction:
    """Return the largest share of the KV heads, at most `kv_ratio`, that the recipe can keep.

    Raises:
        ValueError: If there is none: below the least, or where nothing can be shared.
    """
    if recipe.sharing != "none" or nothing_to_fuse(recipe.relaxation, kv_ratio):
        check_budget(recipe, kv_ratio, geometry)
        return Fraction(kv_ratio)
    heads = own_heads(geometry)
    most = most_heads(kv_ratio, geometry)
    totals = possible_totals(recipe, geometry)
    position = bisect_right(totals, most)
    if reachable := _met(recipe, totals[:position][::-1], geometry):
        return Fraction(reachable[0], heads)
    if geometry.num_kv_heads == 1:
        raise ValueError(f"one KV head: nothing to share; {own_cache(geometry)}")
    if least := _met(recipe, totals[position:], geometry):
        raise BelowLeast(recipe, kv_ratio, Fraction(least[0], heads), geometry)
    reason = _refused(recipe, Fraction(1, geometry.num_kv_heads), geometry)
    raise ValueError(
        f"recipe {recipe.name} can meet no kv_ratio on this checkpoint: {reason}; "
        f"{own_cache(geometry)}"
    )
