"""Check that the GPUs of a tensor-parallel engine can divide the KV heads of a recipe's plans."""

from __future__ import annotations

from fractions import Fraction

from attention.geometry import HeadGeometry
from attention.ratios import percent
from attention.tensor_parallel import RankLayoutError, fits_ranks, heads_per_rank
from search_spaces.allocation.knapsack import BY_CURVES, considered
from search_spaces.planning.budgets import (
    LOOKS_AT_WEIGHTS,
    admissible_counts,
    counts_of,
    nearest_budget,
    problem_of,
)
from search_spaces.planning.widths import with_width
from search_spaces.recipes.recipe import AXES, Recipe


def layer_counts(
    recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry
) -> tuple[int, ...]:
    """Return the KV heads that a plan of the recipe may give a layer, ascending.

    They are exact where the counts follow from the ratio; other allocations choose among them. A
    wide head counts once.

    Args:
        recipe: The recipe.
        kv_ratio: Upper bound of the kept share of the checkpoint's cache.
        geometry: That of the checkpoint.

    Raises:
        ValueError: For a ratio that the recipe cannot meet.
    """
    ratio = nearest_budget(recipe, kv_ratio, geometry)
    recipe = with_width(recipe, float(ratio), geometry)
    if not AXES["allocation"].get(recipe.allocation).needs & LOOKS_AT_WEIGHTS:
        counts = {count for layer in counts_of(recipe, ratio, geometry) for count in layer}
    elif recipe.allocation in BY_CURVES:
        problem = problem_of(recipe, ratio, geometry)
        counts = set(considered(problem, recipe.knobs("allocation")["counts"]))
    else:
        counts = set(admissible_counts(recipe, geometry))
    return tuple(sorted({count // int(recipe.width) for count in counts}))


def rank_refusal(
    recipe: Recipe, kv_ratio: float | Fraction, geometry: HeadGeometry, ranks: int
) -> str | None:
    """Return why `ranks` GPUs cannot divide the heads of a recipe's plans; None if they can.

    Args:
        recipe: The recipe.
        kv_ratio: As in `layer_counts`.
        geometry: That of the checkpoint.
        ranks: GPUs.
    """
    counts = layer_counts(recipe, kv_ratio, geometry)
    wrong = [count for count in counts if not fits_ranks(count, ranks)]
    if not wrong:
        return None
    if len(counts) == 1:
        try:
            heads_per_rank(counts[0], ranks)
        except RankLayoutError as error:
            return f"recipe {recipe.name} at {percent(float(kv_ratio))}: {error}"
    listed = ", ".join(map(str, wrong))
    way = "take a recipe with one count for all layers"
    if recipe.allocation in BY_CURVES:
        way = "set its parameter allocation.counts to divisors or powers_of_two, or " + way
    return (
        f"recipe {recipe.name} may give a layer {listed} KV heads, which cannot be divided among "
        f"{ranks} GPUs; {way}"
    )
