"""The named recipes. A paper is one of them.

A sixth paper is a new part on the axis where it is new, and a line here.
"""

from __future__ import annotations

from typing import Any

from attention.messages import one_of
from search_spaces.recipes.recipe import AXES, BY, Recipe, RecipeError

__all__ = ["AXES", "BY", "RECIPES", "Recipe", "RecipeError", "recipe"]

LEAST_SQUARES: dict[str, Any] = {"grouping": "exact", "objective": "least_squares", "fusion": "least_squares"}
NAMED = (
    Recipe("gqa", source="Ainslie 2023, sec. 2: neighbours pooled by their mean"),
    Recipe("mqa", allocation="single", source="Shazeer 2019; Ainslie 2023: GQA with one group in every layer"),
    Recipe(
        "asymgqa",
        grouping="walk_asymmetric",
        objective="layer",
        similarity="activation",
        together=False,
        source="Chen 2024 (AsymGQA); the score is the layer's output error, objective=model is the paper's",
    ),
    Recipe(
        "dha",
        grouping="anneal",
        objective="fusion_loss",
        allocation="dha",
        relaxation="lagrangian",
        together=False,
        settings=(("grouping.equal_sizes", False),),
        source="Chen 2024 (DHA): searched groups and budgets, learned per-dimension fusion",
    ),
    Recipe(
        "align",
        grouping="anneal_restarts",
        objective="pairs",
        similarity="aligned",
        alignment="procrustes",
        relaxation="hard_concrete",
        by="value",
        settings=(
            ("recovery.decay", "zero"),
            ("recovery.distillation", "kl_bild"),
            ("recovery.distillation_weight", 1.0),
        ),
        source="Jin 2024: value similarity by distance (Table 1), L0 masks, KL + BiLD",
    ),
    Recipe("directshare", sharing="direct", source="Cao 2024: heads share weights, none is grouped"),
    Recipe(
        "postshare",
        sharing="post",
        relaxation="pull_together",
        source="Cao 2024: the same after drawing them together",
    ),
    Recipe(
        "dcformer",
        **LEAST_SQUARES,
        composition="dcmha",
        source="Xiao 2024, added to a converted model; from scratch: the verb train",
    ),
    Recipe(
        "least_squares",
        **LEAST_SQUARES,
        source="ours: exact grouping on the cost of least-squares fusion; in closed form, exports as plain GQA",
    ),
    Recipe(
        "headfold_gqa",
        **LEAST_SQUARES,
        refinement="fit_heal",
        source="ours: least_squares, then refined layer by layer; exports as plain GQA",
    ),
    Recipe(
        "headfold_layers",
        **LEAST_SQUARES,
        allocation="layerwise",
        refinement="fit_heal",
        source="ours: headfold_gqa with a head count of its own in each layer, which vLLM and llama.cpp hold",
    ),
    Recipe(
        "headfold",
        **LEAST_SQUARES,
        allocation="knapsack",
        refinement="fit_heal",
        together=False,
        source="ours: keys and values apart, heads where their loss is measured to matter, refined layer by layer",
    ),
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in NAMED}


def recipe(name: str, /, **overrides: Any) -> Recipe:
    """A named recipe, with other choices where `overrides` say so (see `Recipe.with_changes`).

    Raises RecipeError with the known names for an unknown one.
    """
    if name not in RECIPES:
        raise RecipeError(one_of("recipe", sorted(RECIPES), name))
    return RECIPES[name].with_changes(**overrides)
