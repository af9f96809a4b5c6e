"""Which KV ratios a recipe can keep, as far as can be told without weights.

Legend: L layers, U stored KV heads a layer (units).
"""

from __future__ import annotations

from fractions import Fraction
from itertools import islice
from typing import Any

from attention.geometry import HeadGeometry
from attention.ratios import own_cache, own_heads
from search_spaces.allocation.problem import AllocationProblem, Counts
from search_spaces.recipes.recipe import AXES, Recipe
from search_spaces.recipes.rules import keeps_everything, nothing_to_fuse, sharing_saves_no_cache
from search_spaces.sharing.matching import share_count

LOOKS_AT_WEIGHTS = frozenset({"measure", "group_cost", "model"})  # needs of an allocation


def counts_of(recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry) -> Counts:
    """(key heads, value heads) of each layer, for allocations that look at no weights. Raises ValueError for others."""
    part = AXES["allocation"].get(recipe.allocation)
    if part.needs & LOOKS_AT_WEIGHTS:
        raise ValueError(f"allocation={recipe.allocation} looks at the weights of all layers")
    check_budget(recipe, kv_ratio, geometry)
    return recipe.apply("allocation", problem_of(recipe, kv_ratio, geometry))


def admissible_counts(recipe: Recipe, geometry: HeadGeometry) -> tuple[int, ...]:
    """Head counts that the recipe's grouping can make of one site, ascending."""
    stored = geometry.num_kv_heads
    return tuple(g for g in range(1, stored + 1) if not recipe.equal_groups or stored % g == 0)


def problem_of(
    recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry, **measures: Any
) -> AllocationProblem:
    """What the recipe's allocation is handed. `measures`: `loss`, `curves` and `final` of the problem."""
    counts = admissible_counts(recipe, geometry)
    return AllocationProblem(geometry.num_layers, geometry.num_kv_heads, kv_ratio, counts, **measures)


def check_budget(recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry, dtype: Any = None) -> None:
    """Raise ValueError if the budget cannot be met, as far as can be told without weights, naming the nearest that can.

    Cheap: for config checks. `dtype`: of the cache, where it is known, for the message.
    """
    if reason := _refused(recipe, kv_ratio, geometry):
        raise ValueError(f"{reason}; {own_cache(geometry, dtype)}; {_nearest(recipe, kv_ratio, geometry)}")


def _nearest(recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry) -> str:
    """In words: the next budgets below and above that the recipe can meet and that change something."""
    heads = own_heads(geometry)
    most = heads - bool(keeps_everything(recipe.sharing, recipe.composition, 1))
    whole = min(max(int(kv_ratio * heads), 0), most)
    nearest = []
    for totals in (range(whole, 0, -1), range(whole + 1, most + 1)):
        nearest += islice((t for t in totals if not _refused(recipe, Fraction(t, heads), geometry)), 1)
    if not nearest:
        return f"recipe {recipe.name} can meet no kv_ratio on this checkpoint"
    return (
        f"the nearest kv_ratio that recipe {recipe.name} can meet is {' or '.join(f'{t / heads:.8g}' for t in nearest)}"
    )


def _refused(recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry) -> str | None:
    """Why `require_budget` refuses it, or None."""
    try:
        require_budget(recipe, kv_ratio, geometry)
    except ValueError as error:
        return str(error)
    return None


def require_budget(recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry) -> None:
    """`check_budget` without a search for budgets to name: for many calls, as of a space that is being laid out."""
    for reason in (sharing_saves_no_cache(recipe.sharing, kv_ratio), nothing_to_fuse(recipe.relaxation, kv_ratio)):
        if reason:
            raise ValueError(reason)
    if recipe.sharing != "none":
        if geometry.num_kv_heads < geometry.num_heads:
            raise ValueError(
                f"sharing={recipe.sharing} gives a query head the weights of another with the key and value of its "
                f"own, and this checkpoint has {geometry.num_kv_heads} KV heads for {geometry.num_heads} query heads; "
                "it takes a multi-head checkpoint"
            )
        share_count(recipe.knobs("sharing")["alpha"], geometry.num_layers, geometry.num_heads)
    part = AXES["allocation"].get(recipe.allocation)
    if "any_count" in part.needs and recipe.equal_groups:
        raise ValueError(
            f"allocation={recipe.allocation} gives counts that do not divide the heads, and grouping={recipe.grouping} "
            "makes groups of equal size only; set grouping.equal_sizes to false or use walk_asymmetric"
        )
    # Flat losses: the counts are not those of the plan, but whether there are any does not depend on the losses.
    problem = problem_of(
        recipe,
        kv_ratio,
        geometry,
        loss=lambda *_: 1.0,
        curves=lambda sites, counts: [dict.fromkeys(counts, 0.0)] * len(sites),
    )
    if problem.total < 2 * geometry.num_layers:
        raise ValueError(
            f"kv_ratio {float(kv_ratio):g} is {problem.total} heads, fewer than one key and one value head in each of "
            f"{geometry.num_layers} layers; the least is {1 / geometry.num_kv_heads:g}"
        )
    recipe.apply("allocation", problem)


def nearest_budget(recipe: Recipe, kv_ratio: float, geometry: HeadGeometry) -> Fraction:
    """The largest share of the checkpoint's KV heads, at most `kv_ratio`, that the recipe can keep.

    Raises ValueError if there is none.
    """
    heads = own_heads(geometry)
    reason = None
    for total in range(int(kv_ratio * heads + 1e-6), 2 * geometry.num_layers - 1, -1):
        if (refused := _refused(recipe, Fraction(total, heads), geometry)) is None:
            return Fraction(total, heads)
        reason = reason or refused
    raise ValueError(
        f"recipe {recipe.name} has no budget of at most {kv_ratio:g}: "
        f"{reason or f'the least is one key and one value head a layer, {1 / geometry.num_kv_heads:g}'}; "
        f"{own_cache(geometry)}"
    )
