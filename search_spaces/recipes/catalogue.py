"""The named recipes. A paper is one of them.

A sixth paper is a new part on the axis where it is new, and a line here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attention.base.messages import one_of
from search_spaces.recipes.recipe import AXES, BY, WIDEST, Recipe, RecipeError

__all__ = ["AXES", "BY", "RECIPES", "Recipe", "RecipeError", "recipe"]

LEAST_SQUARES: dict[str, Any] = {
    "grouping": "exact",
    "objective": "least_squares",
    "fusion": "least_squares",
}


@dataclass(frozen=True)
class NamedRecipe:
    """A recipe as `headfold recipes` lists it.

    Attributes:
        papers: Keys of `bibliography.PAPERS`; none: our own.
    """

    recipe: Recipe
    summary: str
    papers: tuple[str, ...] = ()

    @property
    def cost(self) -> str:
        """Return what a conversion by this recipe takes, from the parts that it is made of."""
        needs = self.recipe.needs
        if self.recipe.relaxation != "none":
            return "training (finetune or search): its heads move together while the model trains"
        if self.recipe.composition != "none":
            return "calibration, then training: the added parameters start at the identity"
        if self.recipe.refinement != "none":
            planning = ", a loss increase per layer and head count" if "measure" in needs else ""
            return f"calibration{planning}, local fit of each layer"
        if "iterations" in self.recipe.knobs("grouping"):
            return "calibration, a walk over groupings"
        return "calibration, closed form" if "statistics" in needs else "seconds: no text is read"


NAMED_RECIPES = (
    NamedRecipe(
        Recipe("gqa", source="Ainslie 2023, sec. 2: neighbours pooled by their mean"),
        "Average neighbouring KV heads: the baseline.",
        ("GQA",),
    ),
    NamedRecipe(
        Recipe(
            "mqa",
            allocation="single",
            source="Shazeer 2019; Ainslie 2023: GQA with one group in every layer",
        ),
        "Average all KV heads of a layer to one.",
        ("MQA", "GQA"),
    ),
    NamedRecipe(
        Recipe(
            "asymgqa",
            grouping="walk_asymmetric",
            objective="layer",
            similarity="activation",
            together=False,
            source=(
                "Chen 2024 (AsymGQA); the score is the layer's output error, objective=model is "
                "the paper's"
            ),
        ),
        "Search groups of unequal size by a random walk guided by the similarity of activations.",
        ("AsymGQA",),
    ),
    NamedRecipe(
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
        "Give each layer its own key and value heads and learn how the heads of a group mix.",
        ("DHA",),
    ),
    NamedRecipe(
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
        "Rotate the heads of a group towards each other, then prune to their mean under L0 masks.",
        ("Align",),
    ),
    NamedRecipe(
        Recipe(
            "directshare",
            sharing="direct",
            source="Cao 2024: heads share weights, none is grouped",
        ),
        "Let similar heads of different layers share weights: fewer parameters, the same KV cache.",
        ("DirectShare",),
    ),
    NamedRecipe(
        Recipe(
            "postshare",
            sharing="post",
            relaxation="pull_together",
            source="Cao 2024: the same after drawing them together",
        ),
        "The same after training pulls the weights of each pair together.",
        ("DirectShare",),
    ),
    NamedRecipe(
        Recipe(
            "dcformer",
            **LEAST_SQUARES,
            composition="dcmha",
            source="Xiao 2024, added to a converted model; from scratch: the verb train",
        ),
        "Group by least squares, then add dynamic composition of heads to win back the loss.",
        ("DCMHA",),
    ),
    NamedRecipe(
        Recipe(
            "least_squares",
            **LEAST_SQUARES,
            source=(
                "ours: exact grouping on the cost of least-squares fusion; in closed form, "
                "exports as plain GQA"
            ),
        ),
        "Group heads exactly and fuse each group by least squares, in closed form.",
    ),
    NamedRecipe(
        Recipe(
            "headfold_gqa",
            **LEAST_SQUARES,
            refinement="fit_heal",
            source="ours: least_squares, then refined layer by layer; exports as plain GQA",
        ),
        (
            "least_squares, then each attention layer is fitted to the original's output: "
            "one head count for all layers."
        ),
    ),
    NamedRecipe(
        Recipe(
            "headfold_wide",
            **LEAST_SQUARES,
            refinement="fit_heal",
            width=WIDEST,
            source=(
                "ours (docs/methods.md, section 8): fewer heads, each as wide as several; "
                "exports as plain GQA with the frequencies of wider heads"
            ),
        ),
        (
            "headfold_gqa with few wide heads in place of many: lower loss at equal bytes, more "
            "query and output weights."
        ),
    ),
    NamedRecipe(
        Recipe(
            "headfold_layers",
            **LEAST_SQUARES,
            allocation="layerwise",
            refinement="fit_heal",
            source=(
                "ours: headfold_gqa with a different head count in each layer, which vLLM and "
                "llama.cpp load"
            ),
        ),
        "headfold_gqa with a head count per layer, more where the loss needs them.",
    ),
    NamedRecipe(
        Recipe(
            "headfold",
            **LEAST_SQUARES,
            allocation="knapsack",
            refinement="fit_heal",
            together=False,
            source=(
                "ours: keys and values apart, heads where their loss is measured to matter, "
                "refined layer by layer"
            ),
        ),
        (
            "Head counts per layer for keys and values apart, then the same fit: the lowest "
            "loss of heads of the checkpoint's width, in transformers alone."
        ),
    ),
)

RECIPES: dict[str, Recipe] = {named.recipe.name: named.recipe for named in NAMED_RECIPES}


def recipe(name: str, /, **overrides: Any) -> Recipe:
    """Return a named recipe, with other choices for `overrides` (see `Recipe.with_changes`).

    Raises:
        RecipeError: For an unknown name or choice.
    """
    if name not in RECIPES:
        raise RecipeError(one_of("recipe", sorted(RECIPES), name))
    return RECIPES[name].with_changes(**overrides)
