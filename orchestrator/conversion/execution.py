"""The steps of a conversion, as a recipe says them: what a plan is made from, and how it is refined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from attention.axes import ALIGNMENT
from attention.calibration.store import Calibration
from attention.conversion.convert import LiftedHeads, assemble, through
from attention.conversion.refinement.local import shared_steps
from attention.conversion.refinement.original import Original
from attention.conversion.refinement.refine import FitWork, LayerFit, refine
from attention.families import geometry_of
from attention.plan import AttentionPlan
from search_spaces.planning.planner import PlanningContext
from search_spaces.recipes.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def refine_with(
    recipe: Recipe,
    original: PreTrainedModel | Original,
    converted: PreTrainedModel,
    sequences: Tensor | None,
    first: int = 0,
    layer_steps: Sequence[int] | None = None,
) -> tuple[LayerFit, ...]:
    """Refine a converted model in place as the recipe says. The others: as in
    `attention.conversion.refinement.refine`."""
    where = {"first": first, "layer_steps": layer_steps}
    return refine(recipe.refinement, original, converted, sequences, recipe.knobs("refinement"), **where)


def steps_of_layers(recipe: Recipe, layers: int, increases: Sequence[float] | None) -> list[int] | None:
    """Steps of the local fit of each of `layers` layers by the loss increases that are expected, the same for all where
    nothing is known; None where there is no fit."""
    steps = recipe.knobs("refinement").get("fit_steps")
    return None if steps is None else shared_steps(steps, increases or [1.0] * layers)


CONVERTING = ("calibrate", "search phase", "plan", "convert", "refine")  # phases that make a converted model


def cost(work: Iterable[FitWork], seconds: Mapping[str, float]) -> dict[str, float]:
    """What a conversion cost, as plain values: `optimizer_steps`, `tokens` and `flops` of `FitWork`, and the `seconds`
    of its phases. Loss increases that were found kept cost nothing again."""
    return asdict(sum(work, FitWork())) | {"seconds": sum(seconds.get(phase, 0.0) for phase in CONVERTING)}


def relaxation_start(
    recipe: Recipe, model: PreTrainedModel, plan: AttentionPlan, calibration: Calibration | None
) -> PreTrainedModel:
    """The model that a relaxation towards `plan` starts from: logits unchanged, heads turned as the recipe aligns.

    Every query head has a key and a value head of its own, whatever the checkpoint shares. It is to be written: what
    lies outside of attention is `model`'s memory.
    """
    geometry = geometry_of(model.config)
    align, knobs = ALIGNMENT.get(recipe.alignment), recipe.knobs("alignment")
    heads = through(align, LiftedHeads(model), plan, calibration, geometry, knobs)
    whole = AttentionPlan.identity(geometry.num_layers, geometry.num_heads, geometry.head_dim)
    return assemble(model, whole, heads, share=True)


def planning_context(
    original: PreTrainedModel | Original,
    calibration: Calibration | None,
    sequences: Tensor | None,
    cache_dir: str | Path | None,
    fusion_distances: Mapping[str, np.ndarray] | None = None,
) -> PlanningContext:
    """What plans are made from. `original`: an `Original` where others look at the same layers; `sequences` `[N, T]`
    are calibration tokens; `cache_dir` keeps loss increases."""
    looked_at = Original.of(original)
    model = looked_at.model
    return PlanningContext(
        geometry=geometry_of(model.config),
        heads=LiftedHeads(model),
        calibration=calibration,
        model=model,
        sequences=sequences,
        cache_dir=cache_dir,
        fusion_distances=fusion_distances,
        original=looked_at,
    )
