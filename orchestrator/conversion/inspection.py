"""`headfold inspect`: which heads of a checkpoint matter, and what each budget would take.

Legend: L layers, U stored KV heads per layer. Nothing is trained, and nothing written but caches;
losses are in nats per token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NotRequired, TypedDict

import numpy as np
from torch import Tensor

from attention.base.messages import one_of
from attention.base.progress import stage
from attention.base.timing import Phases
from attention.cache_formats import offered_formats
from attention.io.precision import round_weights
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan
from attention.ratios import byte_share, own_heads, ratio_of
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.execution import convert_and_refine
from orchestrator.conversion.memory_store import MemoryStore
from orchestrator.conversion.record import OriginalFacts
from orchestrator.conversion.request import ConversionRequest
from search_spaces.planning.budgets import nearest_budget
from search_spaces.planning.context import PlanningContext
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import RECIPES, Recipe
from search_spaces.recipes.catalogue import recipe as named_recipe
from search_spaces.similarity.cka import redundancy
from search_spaces.similarity.sharing import similarity_pairs
from search_spaces.site import SIDES
from trainers.evaluation import perplexity
from trainers.rounded_caches import RoundedCacheRow, measure_rounded

COMPARED = ("gqa", "headfold")
FIT_KEY = "refinement.fit_steps"
SideCurves = dict[str, dict[str, float]]
"""Loss increases of one layer by side and head count (as text, for JSON)."""


class BudgetRecord(TypedDict):
    """The plan that a knapsack on the loss increases makes of one KV ratio."""

    kv_ratio_asked: float
    byte_share: float
    """The requested share of the bytes of the whole cache, unconverted layers included."""
    kv_ratio: float
    kv_bytes_per_token: int
    ceiling: str
    key: list[int]
    value: list[int]
    sum_of_increases: float
    plan: Mapping[str, Any]


class RecipeEntry(TypedDict):
    """One recipe at one KV ratio before any training: the result of `convert`.

    Where the recipe makes fewer steps of local fit (`fit_steps`) than `convert`
    (`fit_steps_of_convert`), the loss is higher.
    """

    recipe: str
    kv_ratio_asked: float
    kv_ratio: NotRequired[float]
    kv_bytes_per_token: NotRequired[int]
    loss: NotRequired[float]
    kl: NotRequired[float]
    loss_increase: NotRequired[float]
    loss_increase_stderr: NotRequired[float | None]
    perplexity: NotRequired[float]
    original_perplexity: NotRequired[float]
    notes: NotRequired[list[str]]
    fit_steps: NotRequired[int]
    fit_steps_of_convert: NotRequired[int]
    why_not: NotRequired[str]
    """Why the recipe cannot be shown."""
    seconds: float


class InspectionRecord(OriginalFacts):
    """The JSON of `headfold inspect`. KV ratios are shares of the checkpoint's own KV cache.

    A ratio that a recipe cannot meet stands for the largest budget below it: `kv_ratio_asked` is
    the one, `kv_ratio` the other.
    """

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool
    rotary_dims: int
    parameters: int
    kv_bytes_per_token: int
    sensitivity: list[Mapping[str, Any]]
    """Loss increases of each layer and side by head count, when only that site is fused."""
    similarity: list[Mapping[str, Any]]
    """Mean cosines of the stored heads of a layer, `raw` and `aligned`, `[U, U]`."""
    redundancy: list[Mapping[str, Any]]
    """Mean linear CKA of pairs of query heads, of stored key and value heads, in each layer."""
    budgets: list[BudgetRecord]
    cache_formats: list[RoundedCacheRow]
    """The checkpoint as it is, with its cache in the formats of engines."""
    recipes: list[RecipeEntry]
    agreement: list[Mapping[str, Any]] | None
    """Spearman of the layer-output score's ranks with those of the loss, if that was measured."""
    seed: int
    dtype: str
    cache: str
    options: NotRequired[list[str]]
    """Options on model and texts, which `convert` takes too, as words of the command line."""
    seconds: dict[str, float]


def measure_heads(
    request: ConversionRequest, compared: Mapping[str, Recipe], *, agreement: bool = False
) -> InspectionRecord:
    """Measure a checkpoint; return plain JSON values.

    Args:
        request: The checkpoint, a recipe of `sensitivity_recipe`, the ratios, and a folder that
            keeps measurements.
        compared: Recipes by name.
        agreement: Whether the agreement of both scores is measured too.

    Raises:
        DataError: For texts that a user can mend, before the model is loaded.
    """
    started = time.perf_counter()
    store = MemoryStore(request, always_calibrate=True)
    context = store.context
    phases = request.phases
    geometry = request.geometry
    with phases("similarity"):
        similarity = _similarity(context)
    with phases("sensitivity"):
        plans, curves = _plans_and_curves(request.distinct(report=True), store)
    with phases("formats"):
        formats = _formats(store)
    with phases("recipes"):
        costs = _recipes(compared, plans, store, request.options.recipe_settings.get(FIT_KEY))
    sites: list[Mapping[str, Any]] | None = None
    if agreement:
        # Imported here, since scipy takes a while to start
        from search_spaces.planning.agreement import agreement as measure_agreement

        with phases("agreement"):
            measured = measure_agreement(context, np.random.default_rng(request.seed))
            sites = [site.to_dict() for site in measured]
    record: Any = {
        "model": request.checkpoint.name,
        "family": geometry.family,
        "layers": geometry.num_layers,
        "heads": geometry.num_heads,
        "kv_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "qk_norm": geometry.qk_norm,
        "rotary_dims": geometry.rotary.dims,
        "parameters": checkpoints.parameters(store.original),
        "kv_bytes_per_token": plan_of(store.original).kv_bytes_per_token(request.dtype),
        "original_loss": store.loss,
        "original_perplexity": perplexity(store.loss),
        **store.texts.facts,
        "eval_tokens": int(store.texts.held_out.numel()),
        "calibration_tokens": int(store.texts.calibration.numel()),
        "recipe": request.recipe.to_dict(),
        "sensitivity": [{"layer": layer, **sides} for layer, sides in enumerate(curves)],
        "similarity": similarity,
        "redundancy": _redundancy(context),
        "budgets": [_budget(ratio, plan, curves, request) for ratio, plan in plans.items()],
        "cache_formats": formats,
        "recipes": costs,
        "agreement": sites,
        "seed": request.seed,
        "dtype": request.dtype,
        "cache": str(request.cache_dir),
        "seconds": dict(phases) | {"all": time.perf_counter() - started},
    }
    return record


def sensitivity_recipe(
    name: str, counts: str | None, settings: Mapping[str, Any] | None = None
) -> Recipe:
    """Return the named recipe with a knapsack's head counts, keys and values apart.

    There are no finalists: to convert and refine these takes longer than all else here.

    Args:
        name: Name of the recipe.
        counts: Head counts to measure; None for the recipe's.
        settings: Other changes.

    Raises:
        RecipeError: For unknown names.
    """
    changes: Any = {
        "together": False,
        "allocation": "knapsack",
        "relaxation": "none",
        "allocation.finalists": 1,
    }
    if counts is not None:
        changes["allocation.counts"] = counts
    return named_recipe(name, **(changes | dict(settings or {})))


def untrained_recipe(name: str) -> Recipe:
    """Return the named recipe as far as it goes without training.

    Raises:
        ConfigError: For an unknown one.
    """
    if name not in RECIPES:
        raise ConfigError(f"compare: {one_of('recipe', sorted(RECIPES), name)}")
    return RECIPES[name].with_changes(relaxation="none")


def _shortly_refined(recipe: Recipe, steps: int | None) -> Recipe:
    """Return the recipe with at most so many steps of local fit per layer; None: as it is."""
    fit_steps = dict(recipe.settings).get(FIT_KEY, 0)
    if steps is None or fit_steps <= steps:
        return recipe
    return recipe.with_changes(**{FIT_KEY: steps})


def _formats(store: MemoryStore) -> list[RoundedCacheRow]:
    """Return the loss of the original with its cache in each format that an engine holds."""
    offered = offered_formats(store.request.checkpoint.plan)
    held_out = store.texts.held_out
    records: list[RoundedCacheRow] = []
    with stage("rounding the cache", len(offered), "formats") as progress:
        for facts in offered:
            exact = store.original_evaluation
            records.append(measure_rounded(facts, store.original, held_out, exact))
            progress.step()
    return records


def _stored(context: PlanningContext) -> list[int]:
    """Return one query head of each stored KV head; the lifted heads of a unit are identical."""
    return [unit[0] for unit in context.units]


def _redundancy(context: PlanningContext) -> list[Mapping[str, Any]]:
    stored = _stored(context)
    return [
        {"layer": layer} | redundancy(heads, stored) for layer, heads in enumerate(context.heads)
    ]


def _similarity(context: PlanningContext) -> list[Mapping[str, Any]]:
    assert context.calibration is not None
    first = _stored(context)

    def rounded(matrix: Tensor) -> list[list[float]]:
        return [[round(float(cosine), 5) for cosine in row] for row in matrix[first][:, first]]

    pairs = similarity_pairs(context.heads, context.calibration.layers, context.geometry)
    return [
        {"layer": layer}
        | {
            side: {"raw": rounded(pair.raw), "aligned": rounded(pair.aligned)}
            for side, pair in sides.items()
        }
        for layer, sides in enumerate(pairs)
    ]


def _plans_and_curves(
    budgets: Mapping[Fraction, float], store: MemoryStore
) -> tuple[dict[float, AttentionPlan], list[SideCurves]]:
    """Return the plan of each budget by the ratio that requested it, and each layer's curves."""
    request = store.request
    context = store.context
    plans = {}
    for budget, ratio in budgets.items():
        generator = np.random.default_rng(request.seed)
        plans[ratio] = make_plan(request.recipe, budget, context, generator)
    (points,) = context.curves.values()  # one recipe, one seed: one set of curves
    curves: list[SideCurves] = [
        {side: {} for side in SIDES} for _ in range(context.geometry.num_layers)
    ]
    for key, point in points.items():
        layer, _, site = key.partition("/")
        side, _, count = site.partition("/")
        if layer.isdigit():  # whole plans have separate points
            curves[int(layer)][side][count] = point.increase
    return plans, [
        {side: dict(sorted(curve.items(), key=_head_count)) for side, curve in sides.items()}
        for sides in curves
    ]


def _head_count(point: tuple[str, float]) -> int:
    return int(point[0])


def _budget(
    requested: float, plan: AttentionPlan, curves: list[SideCurves], request: ConversionRequest
) -> BudgetRecord:
    keys = [layer.key_slices for layer in plan.layers]  # heads of the checkpoint's width
    values = [layer.value_slices for layer in plan.layers]
    used = ratio_of(plan, own_heads(request.geometry))
    # The count of all heads is not in the curves: nothing increases.
    increase = sum(
        curves[layer][side].get(str(count), 0.0)
        for side, counts in zip(SIDES, (keys, values), strict=True)
        for layer, count in enumerate(counts)
    )
    return {
        "kv_ratio_asked": requested,
        "byte_share": byte_share(requested, request.geometry),
        "kv_ratio": used,
        "kv_bytes_per_token": plan.kv_bytes_per_token(request.dtype),
        "ceiling": request.ceiling_note(requested, used),
        "key": keys,
        "value": values,
        "sum_of_increases": increase,
        "plan": plan.to_dict(),
    }


def _recipes(
    recipes: Mapping[str, Recipe],
    plans: Mapping[float, AttentionPlan],
    store: MemoryStore,
    fit_steps: int | None,
) -> list[RecipeEntry]:
    """Return an entry for every recipe at every ratio.

    Args:
        recipes: By name; that of the request takes `plans`.
        plans: By requested ratio.
        store: The checkpoint.
        fit_steps: The most steps of local fit per layer; None for those of each recipe.
    """
    entries: list[RecipeEntry] = []
    jobs = [(name, ratio) for name in recipes for ratio in plans]
    for number, (name, requested) in enumerate(jobs, 1):
        started = time.perf_counter()
        entry: Any = {"recipe": name, "kv_ratio_asked": requested}
        # Not a stage that counts: those of the conversion do, which take very different times
        with stage(f"converting by {name} ({number} of {len(jobs)})"):
            try:
                entry |= _measured_recipe(name, recipes[name], requested, plans, store, fit_steps)
            except ValueError as error:  # one recipe that does not fit must not cost the others
                entry["why_not"] = str(error)
        entries.append(entry | {"seconds": time.perf_counter() - started})
    return entries


def _measured_recipe(
    name: str,
    recipe: Recipe,
    requested: float,
    plans: Mapping[float, AttentionPlan],
    store: MemoryStore,
    fit_steps: int | None,
) -> Mapping[str, Any]:
    request = store.request
    context = store.context
    usual_steps = recipe.knobs("refinement").get("fit_steps", 0)
    planned = request.recipe
    allocated = (planned.name, planned.together, planned.allocation)
    # The measured recipe may have other head counts than that of its name
    if (name, recipe.together, recipe.allocation) == allocated:
        plan = plans[requested]
        recipe = planned
    else:
        ratio = nearest_budget(recipe, requested, context.geometry)
        plan = make_plan(recipe, ratio, context, np.random.default_rng(request.seed))
    recipe = _shortly_refined(recipe, fit_steps)
    converted, _ = convert_and_refine(recipe, plan, context, Phases())
    round_weights(converted, request.written)
    fields = {
        "kv_ratio": ratio_of(plan, own_heads(request.geometry)),
        "kv_bytes_per_token": plan.kv_bytes_per_token(request.dtype),
        **store.compare(converted),
    }
    if (steps := recipe.knobs("refinement").get("fit_steps")) is not None:
        fields |= {"fit_steps": steps, "fit_steps_of_convert": usual_steps}
    return fields
