"""`headfold convert` and `headfold export`: one checkpoint, without a cluster and without training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from attention import checkpoint, conversion
from attention.calibration import Calibration, cached_calibration, calibrate
from attention.export import export
from attention.geometry import HeadGeometry
from attention.plan import AttentionPlan
from attention.refinement import RefinementReport, refine
from orchestrator import models
from orchestrator.config import ConfigError
from orchestrator.models import Phases
from search_spaces.planning import PlanningContext, check_budget, make_plan
from search_spaces.recipes import Recipe
from search_spaces.recipes import recipe as named_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_ratio(kv_ratio: float, key: str = "kv_ratio") -> float:
    if not 0 < kv_ratio <= 1:
        raise ConfigError(f"{key}: got {kv_ratio}; a KV ratio must lie in (0, 1], e.g. 0.25 for a quarter of the cache")
    return kv_ratio


def convert_with(
    recipe: Recipe, model: PreTrainedModel, plan: AttentionPlan, calibration: Calibration | None
) -> PreTrainedModel:
    """Carry out a plan as the recipe's alignment and fusion say; `refine_with` comes after it."""
    return conversion.convert(
        model,
        plan,
        alignment=recipe.alignment,
        fusion=recipe.fusion,
        calibration=calibration,
        alignment_settings=recipe.knobs("alignment"),
        fusion_settings=recipe.knobs("fusion"),
    )


def refine_with(
    recipe: Recipe, original: PreTrainedModel, converted: PreTrainedModel, sequences: Tensor | None
) -> RefinementReport:
    """Refine a converted model in place as the recipe says."""
    return refine(recipe.refinement, original, converted, sequences, recipe.knobs("refinement"))


def plan_and_convert(
    recipe: Recipe,
    kv_ratio: float,
    model: PreTrainedModel,
    calibration: Calibration | None,
    sequences: Tensor | None,
    seed: int,
    phases: Phases,
) -> tuple[PreTrainedModel, AttentionPlan]:
    """The converted and refined model and its plan. `sequences` `[N, T]` are calibration tokens, for scores of the full
    model and for refinement."""
    with phases("plan"):
        context = PlanningContext(
            geometry=HeadGeometry.from_config(model.config),
            heads=conversion.lift(model),
            calibration=calibration,
            model=model,
            sequences=sequences,
        )
        plan = make_plan(recipe, kv_ratio, context, np.random.default_rng(seed))
    with phases("convert"):
        converted = convert_with(recipe, model, plan, calibration)
    with phases("refine"):
        refine_with(recipe, model, converted, sequences)
    return converted, plan


def convert_checkpoint(
    model: str | Path,
    recipe: str | Recipe,
    kv_ratio: float,
    out: str | Path | None = None,
    *,
    calibration_data: str = "stdlib",
    eval_data: str = "stdlib",
    calibration_tokens: int = 16_384,
    eval_tokens: int = 16_384,
    sequence_length: int = 256,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "auto",
    cache_dir: str | Path | None = None,
    recipe_settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Convert, measure before and after, and save to `out` if given.

    Returns one record: losses and KL in nats a token, KV bytes planned and held, seconds by phase. Raises ConfigError,
    DataError or PlanError for what a user can mend, all before the model is loaded where that can be known.
    """
    check_ratio(kv_ratio)
    chosen = named_recipe(recipe, **dict(recipe_settings or {})) if isinstance(recipe, str) else recipe
    check_budget(chosen, kv_ratio, models.geometry_of(str(model), sequence_length, key="model"))
    models.dtype_of(dtype)
    models.device_of(device)
    phases = Phases()
    tokenizer = models.load_tokenizer(model)
    with phases("data"):
        sequences = models.texts(
            calibration_data, "calibration", tokenizer, calibration_tokens, sequence_length, seed, cache_dir=cache_dir
        )
        held_out = models.texts(eval_data, "eval", tokenizer, eval_tokens, sequence_length, seed, cache_dir=cache_dir)
    with phases("load"):
        base = models.load_model(model, dtype, device)
    calibration = None
    if "statistics" in chosen.needs:
        with phases("calibrate"):
            calibration = cached_calibration(base, sequences, cache_dir) if cache_dir else calibrate(base, sequences)
    converted, plan = plan_and_convert(chosen, kv_ratio, base, calibration, sequences, seed, phases)
    with phases("evaluate"):
        loss_base = models.score(base, held_out).loss
        scored = models.score(converted, held_out, base)
    record = {
        "model": str(model),
        "loss_base": loss_base,
        "loss": scored.loss,
        "rise": scored.loss - loss_base,
        "kl": scored.kl,
        "eval_tokens": scored.tokens,
        "calibration_tokens": int(sequences.numel()),
        **models.cache_facts(converted),
        "kv_ratio_asked": kv_ratio,
        "recipe": chosen.to_dict(),
        "plan": json.loads(plan.to_json()),
        "plan_digest": plan.digest,
        "seed": seed,
        "dtype": dtype,
    }
    if out is not None:
        with phases("save"):
            checkpoint.save(converted, out, tokenizer, record={"recipe": record["recipe"], "seed": seed})
    return record | {"out": None if out is None else str(out), "seconds": dict(phases)}


def export_checkpoint(source: str | Path, target: str, out: str | Path) -> dict[str, Any]:
    """Lower a checkpoint to a stock format, its tokenizer with it. Raises ConfigError or ValueError as in `export`."""
    models.geometry_of(str(source), key="checkpoint")
    try:
        tokenizer = models.load_tokenizer(source)
    except ConfigError:
        tokenizer = None  # a checkpoint without a tokenizer exports all the same
    return asdict(export(source, target, out, tokenizer))
