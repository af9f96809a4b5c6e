"""Conversions with few steps of the local fit, to compare what recipes lose on one checkpoint.

A short fit overrates what heads lose, of all recipes alike, at a small part of a full fit's time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from attention.base.progress import stage
from attention.base.text import number
from attention.cache_formats import CachePair
from attention.checkpoint import Checkpoint
from attention.engine_cache import engine_cache, with_engine_heads
from attention.geometry import HeadGeometry
from attention.io.precision import round_weights
from orchestrator.config.options import ConvertOptions
from orchestrator.conversion.execution import refine_with, steps_of_layers
from orchestrator.conversion.memory_store import MemoryStore
from search_spaces.planning.budgets import nearest_budget
from search_spaces.planning.context import convert_with
from search_spaces.planning.planner import make_plan
from search_spaces.recipes import choice
from search_spaces.recipes.catalogue import recipe as named_recipe
from search_spaces.recipes.recipe import Recipe
from trainers.evaluation import evaluate

COMPARED_TOKENS = 4096
"""Calibration tokens that compared conversions are fitted on, and as many others to measure on.

The held-out text is not looked at, so that the choice does not favour its losses."""
_SHORT_FIT = 12
"""Steps of a recipe's local fit for each that is made for a comparison."""
_WIDE_RECIPE = "headfold_wide"


class ShortFits:
    """Loss increases of conversions with a short fit, on calibration text that it does not read.

    Statistics and plans are of all of it.
    """

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._fitted_on, self._sample = fit_and_check(store.texts.calibration)
        self._loss = evaluate(store.original, self._sample).loss

    def increase(self, model: PreTrainedModel, pair: CachePair | None = None) -> float:
        """Return the loss increase of a model, with its cache in a format if one is given."""
        with engine_cache(model, pair):
            return evaluate(model, self._sample).loss - self._loss

    def converted(self, recipe: Recipe, budget: Fraction) -> PreTrainedModel:
        """Convert with a short fit; return the model with its heads as an engine holds them."""
        request, context = self._store.request, self._store.context
        short = shortly_fitted(recipe)
        plan = make_plan(short, budget, context, np.random.default_rng(request.seed))
        converted = convert_with(short, self._store.original, plan, context.calibration, share=True)
        steps = steps_of_layers(short, plan.num_layers, context.increases.get(plan))
        refine_with(short, context.original_layers, converted, self._fitted_on, layer_steps=steps)
        round_weights(converted, request.written)
        return with_engine_heads(converted)


def fit_and_check(calibration: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequences that short fits are made on, and others that they are judged by.

    Args:
        calibration: Sequences `[N, T]`; of fewer than three all are used for both.
    """
    if len(calibration) < 3:
        return calibration, calibration
    each = max(2, -(-COMPARED_TOKENS // calibration.shape[1]))
    fitted = min(each, max(2, len(calibration) // 2))
    return calibration[:fitted], calibration[fitted : fitted + each]


def competing_recipes(
    checkpoint: Checkpoint, recipe: Recipe, options: ConvertOptions
) -> list[Recipe]:
    """Return the recipe, and wide heads where it is auto's and all that loads it loads these too.

    Args:
        checkpoint: What is converted.
        recipe: The recipe that was chosen for it.
        options: Where a recipe is named, or an engine that loads no wide heads, nothing competes.
    """
    if options.recipe != choice.AUTO_RECIPE:
        return [recipe]
    forms = choice.engine_forms(checkpoint.config, checkpoint.geometry)
    if options.engine is not None:
        engines: Sequence[str] = (choice.engine_name(options.engine),)
    else:
        engines = choice.engines_of(recipe, forms)
    try:
        wide = named_recipe(_WIDE_RECIPE, **options.recipe_settings)
    except ValueError:  # a setting that wide heads do not have
        return [recipe]
    if any(choice.refusals(wide, forms[engine]) for engine in engines):
        return [recipe]
    return [recipe, wide]


def equal_budgets(
    recipes: Sequence[Recipe], kv_ratio: float, geometry: HeadGeometry
) -> list[Recipe]:
    """Return those of the recipes that have as large a plan at a KV ratio as the first one.

    One with a smaller plan would be compared at fewer bytes.
    """
    first, *others = recipes
    budget = nearest_budget(first, kv_ratio, geometry)
    equal = [first]
    for other in others:
        try:
            if nearest_budget(other, kv_ratio, geometry) >= budget:
                equal.append(other)
        except ValueError:  # no plan has so few heads
            continue
    return equal


def best_by_short_fit(
    store: MemoryStore, recipes: Sequence[Recipe], kv_ratio: float
) -> tuple[Recipe, dict[str, float]]:
    """Return the recipe that loses least with a short fit, and the loss increase of each by name.

    Args:
        store: The checkpoint, calibrated for all of the recipes.
        recipes: With plans of equal bytes at `kv_ratio`.
        kv_ratio: Largest share of the KV cache.
    """
    fits = ShortFits(store)
    increases: dict[str, float] = {}
    with stage("comparing recipes", len(recipes), "recipes") as progress:
        for one in recipes:
            budget = nearest_budget(one, kv_ratio, store.request.geometry)
            increases[one.name] = fits.increase(fits.converted(one, budget))
            progress.step()
    best = min(recipes, key=lambda one: increases[one.name])
    losses = ", ".join(f"{name} {number(value, '+.4f')}" for name, value in increases.items())
    print(
        f"recipe: {best.name} loses least by a short fit (loss increase: {losses})",
        file=sys.stderr,
        flush=True,
    )
    return best, increases


def shortly_fitted(recipe: Recipe) -> Recipe:
    """Return a recipe with a short local fit and no finalists, which are fitted one by one."""
    changes: dict[str, int] = {}
    if (steps := recipe.knobs("refinement").get("fit_steps")) is not None:
        changes["refinement.fit_steps"] = max(1, int(steps) // _SHORT_FIT)
    if "finalists" in recipe.knobs("allocation"):
        changes["allocation.finalists"] = 1
    return recipe.with_changes(**changes) if changes else recipe
