"""A conversion with the whole checkpoint in memory: one source, converted at one ratio or several."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from attention.base.memory import freeze_garbage
from attention.base.timing import Phases
from attention.calibration.calibrate import calibrate
from attention.calibration.sizes import SAMPLE_TOKENS
from attention.calibration.store import Calibration
from attention.conversion.refinement.original import Original
from attention.io import checkpoint
from attention.io.precision import cast_weights, round_weights
from attention.plan import AttentionPlan
from attention.ratios import own_heads
from orchestrator import checkpoints
from orchestrator.conversion.calibration import checkpoint_calibration, chosen
from orchestrator.conversion.dha_distances import NEED, measure
from orchestrator.conversion.execution import cost, planning_context, refine_with, steps_of_layers
from orchestrator.conversion.record import ConversionRecord
from orchestrator.conversion.request import ConversionRequest
from orchestrator.resources.memory import available_bytes
from search_spaces.planning.context import convert_with
from search_spaces.planning.planner import PlanningContext, make_plan
from search_spaces.recipes.recipe import Recipe
from trainers.evaluation import CachedTeacher, Evaluation, evaluate
from trainers.settings import TrainSettings
from trainers.text.data import LoadedTexts


def plan_and_convert(
    recipe: Recipe,
    kv_ratio: float | Fraction,
    context: PlanningContext,
    seed: int,
    phases: Phases,
    given: AttentionPlan | None = None,
) -> tuple[PreTrainedModel, AttentionPlan, dict[str, Any]]:
    """The converted and refined model of a context, its plan (`given`, or what the recipe makes of the ratio) and what
    it cost (`orchestrator.conversion.execution.cost`). What lies outside of attention is in the memory of the context's
    model, so neither may be trained."""
    model = context.model
    if model is None:
        raise ValueError("a conversion needs a model in its context")
    before = len(context.work)
    with phases("plan"):
        plan = given or make_plan(recipe, kv_ratio, context, np.random.default_rng(seed))
    with phases("convert"):
        converted = convert_with(recipe, model, plan, context.calibration, share=True)
    with phases("refine"):
        steps = steps_of_layers(recipe, plan.num_layers, context.increases.get(plan))
        fits = refine_with(recipe, context.looked_at, converted, context.sequences, layer_steps=steps)
    return converted, plan, cost([*context.work[before:], *(fit.work for fit in fits)], phases)


@dataclass(frozen=True)
class Source:
    """A checkpoint with its texts and statistics, ready to be converted at any KV ratio.

    `original`: the original model, in what is computed in; `teacher`: the same, for what others are compared with on
    the held-out text; `worth`: what it is worth there.
    """

    request: ConversionRequest
    original: PreTrainedModel
    texts: LoadedTexts
    context: PlanningContext
    teacher: CachedTeacher
    worth: Evaluation

    @property
    def loss(self) -> float:
        """Held-out loss of the original model."""
        return self.worth.loss

    def measured(self, converted: PreTrainedModel) -> dict[str, Any]:
        """Fields of a record: held-out loss and KL of a converted model, beside the original."""
        scored = evaluate(converted, self.texts.held_out, teacher=self.teacher)
        return {"loss": scored.loss, "kl": scored.kl, **scored.compared(self.worth), **scored.noted}

    @classmethod
    def load(cls, request: ConversionRequest, *, always_calibrate: bool = False) -> Source:
        """Load the model of a request, and calibrate it if the recipe needs that. Raises DataError for its texts."""
        freeze_garbage()
        needs, phases = request.recipe.needs, request.phases
        if NEED in needs:
            import trainers.fusion_search  # noqa: F401  # a package that it lacks is missed before all else
        texts = request.texts()
        sequences = texts.calibration
        original = request.load_model()
        calibration = None
        if always_calibrate or "statistics" in needs:
            with phases("calibrate"):
                sampled = SAMPLE_TOKENS if always_calibrate or "inputs" in needs else 0
                calibration = _calibration(request, original, sequences, sampled)
        with phases("evaluate"):
            teacher = CachedTeacher(original)
            worth = evaluate(teacher, texts.held_out)
        distances = None
        if NEED in needs:
            print("measuring how far apart heads come to lie in training (dha's search phase)", file=sys.stderr)
            with phases("search phase"):
                knobs = request.recipe.knobs("objective")
                training = TrainSettings(zero_stage=0, batch_size=min(8, len(sequences)))
                distances = measure(original, sequences, training, knobs["steps"], knobs["rate"], request.seed)
        context = planning_context(Original(original), calibration, sequences, request.cache_dir, distances)
        return cls(request, original, texts, context, teacher, worth)

    def at(self, kv_ratio: float, out: str | Path | None = None, *, overwrite: bool = False) -> ConversionRecord:
        """Convert at one KV ratio or the largest below it, measure, save to `out` if given; one record."""
        request = self.request
        phases = Phases(self.request.phases)
        budget = request.budget(kv_ratio)
        converted, plan, spent = plan_and_convert(request.recipe, budget, self.context, request.seed, phases)
        with phases("evaluate"):
            round_weights(converted, request.written)  # what is measured is what is written
            scored = self.measured(converted)
            cast_weights(converted, request.written)
        measured = {
            "original_loss": self.loss,
            **scored,
            "eval_tokens": self.worth.tokens,
            "cost": spent,
            **checkpoints.cache_facts(converted, own_heads(request.geometry)),
        }
        if self.context.calibration is not None:
            measured["mixed_moments"] = self.context.calibration.mixed
        if out is not None:
            with phases("save"):
                checkpoint.save(converted, out, request.model, record=request.note(), overwrite=overwrite)
        record = request.record(plan, kv_ratio, self.texts, measured, out)
        record["seconds"] = dict(phases)
        return record


def _calibration(request: ConversionRequest, original: PreTrainedModel, sequences: Tensor, sampled: int) -> Calibration:
    """In files where the request names a folder for them, and there a layer at a time; else all in memory, with the
    inputs of `sampled` tokens at most."""
    if request.cache_dir is not None:
        own: dict[str, Any] = {"dtype": request.dtype, "device": request.device}
        return checkpoint_calibration(request.checkpoint, sequences, request.cache_dir, **own)
    mixed = chosen(request.geometry, sampled and sequences.numel(), available_bytes())
    return calibrate(original, sequences, sample_tokens=sampled, mixed=mixed)
