"""The steps of a conversion, as a recipe says them: what a plan is made from, convert, refine, and what was written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from attention.calibration.moments import Calibration
from attention.conversion import conversion
from attention.conversion.refinement.refine import RefinementReport, refine
from attention.families import geometry_of
from attention.io import checkpoint
from attention.io.stock_form import format_of
from attention.plan import AttentionPlan
from search_spaces.planning.planning import PlanningContext
from search_spaces.recipes.recipe import Recipe


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
    recipe: Recipe, original: PreTrainedModel, converted: PreTrainedModel, sequences: Tensor | None, first: int = 0
) -> RefinementReport:
    """Refine a converted model in place as the recipe says. `first`: as in `attention.conversion.refinement.refine`."""
    return refine(recipe.refinement, original, converted, sequences, recipe.knobs("refinement"), first=first)


def relaxation_start(
    recipe: Recipe, model: PreTrainedModel, plan: AttentionPlan, calibration: Calibration | None
) -> PreTrainedModel:
    """The model that a relaxation towards `plan` starts from: logits unchanged, heads turned as the recipe aligns, and
    to every query head a key and a value head of its own."""
    geometry = geometry_of(model.config)
    heads = conversion.align_layers(
        conversion.lift(model), plan, recipe.alignment, calibration, geometry, recipe.knobs("alignment")
    )
    whole = AttentionPlan.identity(geometry.num_layers, geometry.num_heads, geometry.head_dim)
    return conversion.assemble(model, whole, heads)


def planning_context(
    model: PreTrainedModel,
    calibration: Calibration | None,
    sequences: Tensor | None,
    cache_dir: str | Path | None,
    fusion_distances: Mapping[str, np.ndarray] | None = None,
) -> PlanningContext:
    """What plans are made from. `sequences` `[N, T]` are calibration tokens; `cache_dir` keeps measured curves."""
    return PlanningContext(
        geometry=geometry_of(model.config),
        heads=conversion.lift(model),
        calibration=calibration,
        model=model,
        sequences=sequences,
        cache_dir=cache_dir,
        fusion_distances=fusion_distances,
    )


def what_it_is(folder: str | Path, dtype: str) -> dict[str, Any]:
    """What a written checkpoint is (`format`: stock or headfold), what loads it, and both in a line for people."""
    form = format_of(checkpoint.load_config(folder), dtype)
    return {"format": form.format, "loads_in": list(form.loads_in), "format_note": form.note}
