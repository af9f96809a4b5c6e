"""Apply a recipe to a model, whole or a window of it, and count the cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from attention.axes import ALIGNMENT
from attention.base.timing import Phases
from attention.calibration.store import Calibration
from attention.conversion.convert import LiftedHeads, assemble, through
from attention.conversion.refinement.local import shared_steps
from attention.conversion.refinement.original import Original
from attention.conversion.refinement.refine import FitWork, LayerFit, refine
from attention.families import geometry_of
from attention.plan import AttentionPlan
from search_spaces.planning.context import PlanningContext, convert_with
from search_spaces.recipes.recipe import Recipe

CONVERTING = ("calibrate", "search phase", "plan", "convert", "refine")
"""Phases that make a converted model."""


def planning_context(
    original: PreTrainedModel | Original,
    calibration: Calibration | None,
    sequences: Tensor | None,
    cache_dir: str | Path | None,
    fusion_distances: Mapping[str, np.ndarray] | None = None,
) -> PlanningContext:
    """Return what plans of a whole model are made from.

    Args:
        original: The model; an `Original` where others look at the same layers.
        calibration: Its statistics.
        sequences: Calibration tokens, `[N, T]`.
        cache_dir: The folder that keeps loss increases.
        fusion_distances: Of DHA's search phase.
    """
    wrapped = Original.of(original)
    model = wrapped.model
    return PlanningContext(
        geometry=geometry_of(model.config),
        heads=LiftedHeads(model),
        calibration=calibration,
        model=model,
        sequences=sequences,
        cache_dir=cache_dir,
        fusion_distances=fusion_distances,
        original=wrapped,
    )


def convert_and_refine(
    recipe: Recipe, plan: AttentionPlan, context: PlanningContext, phases: Phases
) -> tuple[PreTrainedModel, list[FitWork]]:
    """Return the model of a context, converted to `plan` and refined, and the work of its fits.

    Parameters outside of attention share memory with the context's model, so neither may be
    trained.
    """
    if context.model is None:
        raise ValueError("a conversion needs a model in its context")
    with phases("convert"):
        converted = convert_with(recipe, context.model, plan, context.calibration, share=True)
    with phases("refine"):
        steps = steps_of_layers(recipe, plan.num_layers, context.increases.get(plan))
        fits = refine_with(
            recipe, context.original_layers, converted, context.sequences, layer_steps=steps
        )
    return converted, [fit.work for fit in fits]


def refine_with(
    recipe: Recipe,
    original: PreTrainedModel | Original,
    converted: PreTrainedModel,
    sequences: Tensor | None,
    first: int = 0,
    layer_steps: Sequence[int] | None = None,
) -> tuple[LayerFit, ...]:
    """Refine a converted model in place as the recipe says.

    The other arguments are those of `attention.conversion.refinement.refine`.
    """
    return refine(
        recipe.refinement,
        original,
        converted,
        sequences,
        recipe.knobs("refinement"),
        first=first,
        layer_steps=layer_steps,
    )


def steps_of_layers(
    recipe: Recipe, layers: int, increases: Sequence[float] | None
) -> list[int] | None:
    """Return the steps of the local fit of each of `layers` layers; None where there is no fit.

    They follow the expected loss increases, and are the same for all where these are not known.
    """
    steps = recipe.knobs("refinement").get("fit_steps")
    return None if steps is None else shared_steps(steps, increases or [1.0] * layers)


def cost(work: Iterable[FitWork], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the fields of `FitWork` summed over `work`, and the `seconds` of the conversion.

    Loss increases that were read from a file cost nothing again.
    """
    spent = sum(seconds.get(phase, 0.0) for phase in CONVERTING)
    return asdict(sum(work, FitWork())) | {"seconds": spent}


def relaxation_start(
    recipe: Recipe, model: PreTrainedModel, plan: AttentionPlan, calibration: Calibration | None
) -> PreTrainedModel:
    """Return the model that a relaxation towards `plan` starts from.

    Its logits are unchanged, its heads aligned as the recipe says. Every query head has a separate
    key and value head, even where the checkpoint shares them. It is only for writing: parameters
    outside of attention share `model`'s memory.
    """
    geometry = geometry_of(model.config)
    align = ALIGNMENT.get(recipe.alignment)
    heads = through(
        align, LiftedHeads(model), plan, calibration, geometry, recipe.knobs("alignment")
    )
    whole = AttentionPlan.identity(geometry.num_layers, geometry.num_heads, geometry.head_dim)
    whole = replace(whole, other_layers=geometry.other_layers)
    return assemble(model, whole, heads, share=True)
