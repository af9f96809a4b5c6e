"""`headfold inspect`: which heads of a checkpoint matter, which are alike, and what each budget would take.

Legend: L layers, U stored KV heads a layer. Nothing is trained or written but the caches; losses are in nats a token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from attention.base.messages import one_of
from attention.base.progress import stage
from attention.io.precision import round_weights
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan
from attention.ratios import own_heads, ratio_of
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.execution import refine_with, steps_of_layers
from orchestrator.conversion.memory_store import Source
from orchestrator.conversion.request import ConversionRequest
from search_spaces.planning.budgets import nearest_budget
from search_spaces.planning.context import PlanningContext, convert_with
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import RECIPES, Recipe
from search_spaces.recipes.catalogue import recipe as named_recipe
from search_spaces.similarity.sharing import similarity_pairs
from search_spaces.site import SIDES
from trainers.evaluation import perplexity

InspectionRecord = dict[str, Any]
"""The JSON of `headfold inspect`: see `measure_heads`."""
COMPARED = ("gqa", "headfold")
FIT_KEY = "refinement.fit_steps"


def measure_heads(
    request: ConversionRequest, compared: Mapping[str, Recipe], *, agreement: bool = False
) -> InspectionRecord:
    """Measure a checkpoint; one record of plain JSON values.

    `sensitivity`: for each layer and side the increase of the loss by head count, when only that site is fused as the
    recipe of the request says. `similarity`: mean cosines of the stored heads of a layer, `raw` and `aligned`,
    `[U, U]`. `budgets`: what the knapsack on these increases makes of each ratio (of the checkpoint's own KV cache).
    `recipes`: held-out loss of the model converted by each recipe of `compared` at each ratio, before any training:
    what `convert` gives. Where the recipe is to make fewer steps of local fit (`fit_steps`) than `convert` makes
    (`fit_steps_of_convert`), it is more.
    `agreement`: Spearman of the layer-output score's ranks with those of the loss, if asked for. A ratio that a recipe
    cannot meet stands for the largest budget below it; `kv_ratio_asked` and `kv_ratio` tell both.

    Args:
        request: The checkpoint, a recipe of `sensitivity_recipe`, the ratios, and a folder that keeps measurements.
        compared: Recipes by name.
        agreement: Whether that is measured too.

    Raises:
        DataError: For texts that a user can mend, before the model is loaded.
    """
    started = time.perf_counter()
    source = Source.load(request, always_calibrate=True)
    context, phases, geometry = source.context, request.phases, request.geometry
    with phases("similarity"):
        similarity = _similarity(context)
    with phases("sensitivity"):
        plans, curves = _plans_and_curves(request.distinct(report=True), source)
    with phases("recipes"):
        costs = _recipes(compared, plans, source, request.options.recipe_settings.get(FIT_KEY))
    sites = None
    if agreement:
        from search_spaces.planning.agreement import agreement as measured_agreement  # scipy's start takes a while

        with phases("agreement"):
            measured = measured_agreement(context, np.random.default_rng(request.seed))
            sites = [site.to_dict() for site in measured]
    return {
        "model": request.checkpoint.name,
        "family": geometry.family,
        "layers": geometry.num_layers,
        "heads": geometry.num_heads,
        "kv_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "qk_norm": geometry.qk_norm,
        "rotary_dims": geometry.rotary.dims,
        "parameters": checkpoints.parameters(source.original),
        "kv_bytes_per_token": plan_of(source.original).kv_bytes_per_token(request.dtype),
        "original_loss": source.loss,
        "original_perplexity": perplexity(source.loss),
        **source.texts.facts,
        "eval_tokens": int(source.texts.held_out.numel()),
        "calibration_tokens": int(source.texts.calibration.numel()),
        "recipe": request.recipe.to_dict(),
        "sensitivity": [{"layer": layer} | sides for layer, sides in enumerate(curves)],
        "similarity": similarity,
        "budgets": [_budget(*item, curves, request) for item in plans.items()],
        "recipes": costs,
        "agreement": sites,
        "seed": request.seed,
        "dtype": request.dtype,
        "cache": str(request.cache_dir),
        "seconds": dict(phases) | {"all": time.perf_counter() - started},
    }


def sensitivity_recipe(name: str, counts: str | None, settings: Mapping[str, Any] | None = None) -> Recipe:
    """The named recipe with a knapsack's head counts, keys and values apart, and no finalists: to convert and refine
    these takes longer than all else here. Raises RecipeError."""
    apart = {"together": False, "allocation": "knapsack", "relaxation": "none", "allocation.finalists": 1}
    asked = {} if counts is None else {"allocation.counts": counts}
    return named_recipe(name, **(apart | asked | dict(settings or {})))


def shortly_refined(whole: Recipe, steps: int | None) -> Recipe:
    """The recipe with at most so many steps of local fit a layer; None: as it is."""
    own = dict(whole.settings).get(FIT_KEY, 0)
    return whole.with_changes(**{FIT_KEY: steps}) if steps is not None and own > steps else whole


def untrained(name: str) -> Recipe:
    """The named recipe as far as it goes without training. Raises ConfigError for an unknown one."""
    if name not in RECIPES:
        raise ConfigError(f"compare: {one_of('recipe', sorted(RECIPES), name)}")
    return RECIPES[name].with_changes(relaxation="none")


def _similarity(context: PlanningContext) -> list[dict[str, Any]]:
    assert context.calibration is not None
    first = [unit[0] for unit in context.units]  # the heads of a unit are identical

    def rounded(matrix: Tensor) -> list[list[float]]:
        return [[round(float(x), 5) for x in row] for row in matrix[first][:, first]]

    pairs = similarity_pairs(context.heads, context.calibration.layers, context.geometry)
    return [
        {"layer": layer} | {side: {"raw": rounded(p.raw), "aligned": rounded(p.aligned)} for side, p in sides.items()}
        for layer, sides in enumerate(pairs)
    ]


def _plans_and_curves(
    budgets: Mapping[Fraction, float], source: Source
) -> tuple[dict[float, AttentionPlan], list[dict[str, dict[str, float]]]]:
    """The plan of each budget by the ratio that requested it, and of each layer and side the increases by head count
    (as text, for JSON)."""
    request, context, geometry = source.request, source.context, source.context.geometry
    plans = {}
    for budget, ratio in budgets.items():
        plans[ratio] = make_plan(request.recipe, budget, context, np.random.default_rng(request.seed))
    (points,) = context.curves.values()  # one recipe, one seed: one set of curves
    curves: list[dict[str, dict[str, float]]] = [{side: {} for side in SIDES} for _ in range(geometry.num_layers)]
    for key, point in points.items():
        layer, _, place = key.partition("/")
        side, _, count = place.partition("/")
        if layer.isdigit():  # what is known of whole plans lies beside the places
            curves[int(layer)][side][count] = point.increase
    return plans, [{side: dict(sorted(c.items(), key=lambda i: int(i[0]))) for side, c in s.items()} for s in curves]


def _budget(
    asked: float, plan: AttentionPlan, curves: list[dict[str, dict[str, float]]], request: ConversionRequest
) -> dict[str, Any]:
    heads = {side: [getattr(layer, f"{side}_heads") for layer in plan.layers] for side in SIDES}
    # All heads kept is not in the curves: nothing increases.
    increase = sum(curves[i][side].get(str(n), 0.0) for side, kept in heads.items() for i, n in enumerate(kept))
    return {
        "kv_ratio_asked": asked,
        **_size(plan, request),
        "ceiling": request.ceiling_note(asked, ratio_of(plan, own_heads(request.geometry))),
        **heads,
        "sum_of_increases": increase,
        "plan": plan.to_dict(),
    }


def _size(plan: AttentionPlan, request: ConversionRequest) -> dict[str, Any]:
    kept = ratio_of(plan, own_heads(request.geometry))
    return {"kv_ratio": kept, "kv_bytes_per_token": plan.kv_bytes_per_token(request.dtype)}


def _recipes(
    recipes: Mapping[str, Recipe], plans: dict[float, AttentionPlan], source: Source, fit_steps: int | None
) -> list[dict[str, Any]]:
    """Held-out loss of every recipe at every ratio, one entry each; `why_not` where a recipe cannot be shown. That of
    the request takes `plans`. Layers are fitted by at most `fit_steps` each, if that is given."""
    request, context = source.request, source.context
    entries: list[dict[str, Any]] = []
    jobs = [(name, ratio) for name in recipes for ratio in plans]
    with stage("converting by each recipe", len(jobs), "conversions") as told:
        for name, asked in jobs:
            entry: dict[str, Any] = {"recipe": name, "kv_ratio_asked": asked}
            began = time.perf_counter()
            try:
                plan = plans[asked]
                if name != request.recipe.name:
                    ratio = nearest_budget(recipes[name], asked, context.geometry)
                    plan = make_plan(recipes[name], ratio, context, np.random.default_rng(request.seed))
                whole = shortly_refined(request.recipe if name == request.recipe.name else recipes[name], fit_steps)
                entry |= _size(plan, request) | _scored(whole, plan, source)
                if (steps := whole.knobs("refinement").get("fit_steps")) is not None:
                    usual = recipes[name].knobs("refinement").get("fit_steps", 0)
                    entry |= {"fit_steps": steps, "fit_steps_of_convert": usual}
            except ValueError as error:  # one recipe that does not fit this checkpoint must not cost the others
                entry["why_not"] = str(error)
            entries.append(entry | {"seconds": time.perf_counter() - began})
            told.step()
    return entries


def _scored(recipe: Recipe, plan: AttentionPlan, source: Source) -> dict[str, Any]:
    """What the conversion of a plan by a recipe, refined as it says, gives on held-out text."""
    converted = convert_with(recipe, source.original, plan, source.context.calibration, share=True)
    steps = steps_of_layers(recipe, plan.num_layers, source.context.increases.get(plan))
    refine_with(recipe, source.context.looked_at, converted, source.context.sequences, layer_steps=steps)
    round_weights(converted, source.request.written)
    return source.measured(converted)
