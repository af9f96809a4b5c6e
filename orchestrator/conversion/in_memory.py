"""A conversion with the whole checkpoint in memory: one source, converted at one ratio or several."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from attention.calibration.calibration import cached_calibration, calibrate
from attention.io import checkpoint
from attention.io.precision import cast_weights, round_weights
from attention.io.stock_form import format_of
from attention.modeling.modeling import plan_of
from attention.plan import AttentionPlan
from attention.ratios import own_heads
from orchestrator.conversion import loading
from orchestrator.conversion.dha_distances import NEED, measure
from orchestrator.conversion.loading import Phases
from orchestrator.conversion.request import Inputs
from orchestrator.conversion.steps import planning_context, refine_with
from search_spaces.planning.context import convert_with
from search_spaces.planning.planning import PlanningContext, make_plan
from search_spaces.recipes.recipe import Recipe
from trainers.settings import TrainSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def plan_and_convert(
    recipe: Recipe,
    kv_ratio: float | Fraction,
    context: PlanningContext,
    seed: int,
    phases: Phases,
    given: AttentionPlan | None = None,
) -> tuple[PreTrainedModel, AttentionPlan]:
    """The converted and refined model of a context, and its plan: `given`, or what the recipe makes of the budget."""
    model = context.model
    if model is None:
        raise ValueError("a conversion needs a model in its context")
    with phases("plan"):
        plan = given or make_plan(recipe, kv_ratio, context, np.random.default_rng(seed))
    with phases("convert"):
        converted = convert_with(recipe, model, plan, context.calibration)
    with phases("refine"):
        refine_with(recipe, model, converted, context.sequences)
    return converted, plan


@dataclass(frozen=True)
class Source:
    """A checkpoint with its texts and statistics, ready to be converted at any budget. `loss`: of the original model.
    `dtype`: name of the one that is written; `base` is in the one that is worked on.

    `calibration` is there if the recipe needs it. `phases` are the seconds that this has taken.
    """

    model: str
    recipe: Recipe
    base: PreTrainedModel
    tokenizer: Any
    held_out: Tensor
    context: PlanningContext
    loss: float
    seed: int
    dtype: str
    phases: Phases

    @classmethod
    def load(cls, model: str | Path, recipe: str | Recipe, kv_ratios: Sequence[float], **settings: Any) -> Source:
        """Check all that can be checked before the model is loaded, then load and calibrate.

        `settings` are those of `Inputs.check`. Raises ConfigError, DataError, RecipeError or ValueError for what a user
        can mend.
        """
        inputs = Inputs.check(model, recipe, kv_ratios, **settings)
        chosen, phases, cache_dir, seed = inputs.recipe, inputs.phases, inputs.cache_dir, inputs.seed
        sequences, held_out = inputs.texts()
        with phases("load"):
            base = loading.load_working(model, inputs.dtype, inputs.device)
        calibration = None
        if "statistics" in chosen.needs:
            with phases("calibrate"):
                calibration = (
                    cached_calibration(base, sequences, cache_dir) if cache_dir else calibrate(base, sequences)
                )
        with phases("evaluate"):
            loss = loading.score(base, held_out).loss
        distances = None
        if NEED in chosen.needs:
            print("measuring how far apart heads come to lie in training (dha's search phase)", file=sys.stderr)
            with phases("search phase"):
                knobs = chosen.knobs("objective")
                training = TrainSettings(zero_stage=0, batch_size=min(8, len(sequences)))
                distances = measure(base, sequences, training, knobs["steps"], knobs["rate"], seed)
        context = planning_context(base, calibration, sequences, cache_dir, distances)
        return cls(inputs.model, chosen, base, inputs.tokenizer, held_out, context, loss, seed, inputs.dtype, phases)

    @property
    def base_bytes(self) -> int:
        """KV bytes a token of the original model."""
        return plan_of(self.base).kv_bytes_per_token(self.dtype)

    def at(
        self, kv_ratio: float | Fraction, out: str | Path | None = None, *, overwrite: bool = False
    ) -> dict[str, Any]:
        """Convert at one budget, measure, save to `out` if given; one record (see `convert_checkpoint`)."""
        phases, own = Phases(self.phases), own_heads(self.context.geometry)
        converted, plan = plan_and_convert(self.recipe, kv_ratio, self.context, self.seed, phases)
        with phases("evaluate"):
            round_weights(converted, loading.dtype_of(self.dtype))  # what is measured is what is written
            scored = loading.score(converted, self.held_out, self.base)
            cast_weights(converted, loading.dtype_of(self.dtype))
        sequences = self.context.sequences
        record = {
            "model": self.model,
            "original_loss": self.loss,
            "loss": scored.loss,
            "loss_increase": scored.loss - self.loss,
            "kl": scored.kl,
            "eval_tokens": scored.tokens,
            "calibration_tokens": 0 if sequences is None else int(sequences.numel()),
            **loading.cache_facts(converted, own),
            "kv_bytes_per_token_original": self.base_bytes,
            "kv_ratio_asked": float(kv_ratio),
            "recipe": self.recipe.to_dict(),
            "plan": plan.to_dict(),
            "plan_digest": plan.digest,
            "seed": self.seed,
            "dtype": self.dtype,
            "peak_memory": loading.memory_peak(),
        }
        if out is not None:
            with phases("save"):
                about = {"recipe": record["recipe"], "seed": self.seed, **checkpoint.original_note(own)}
                checkpoint.save(converted, out, self.model, record=about, overwrite=overwrite)
            record |= format_of(out, self.dtype)
        return record | {"out": None if out is None else str(out), "seconds": dict(phases)}
