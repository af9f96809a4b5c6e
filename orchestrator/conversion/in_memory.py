"""`headfold convert` and `headfold export`: one checkpoint, without a cluster and without training."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from attention.calibration.calibration import Calibration, cached_calibration, calibrate
from attention.conversion import conversion
from attention.conversion.refinement import RefinementReport, refine
from attention.geometry import HeadGeometry
from attention.io import checkpoint
from attention.io.export import export
from attention.io.precision import cast_weights, round_weights
from attention.io.replacing import check_folder
from attention.io.stock_form import format_of
from attention.modeling.modeling import plan_of
from attention.plan import AttentionPlan
from attention.ratios import own_heads
from orchestrator.conversion import loading
from orchestrator.conversion.dha_distances import NEED, measure
from orchestrator.conversion.loading import Phases
from orchestrator.conversion.request import Inputs
from search_spaces.planning.planning import PlanningContext, make_plan
from search_spaces.recipes.recipe import Recipe
from trainers.settings import TrainSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    """The model that a relaxation towards `plan` starts from: logits unchanged, heads turned as the recipe aligns.

    Every query head has a key and a value head of its own, whatever the checkpoint shares.
    """
    geometry = HeadGeometry.from_config(model.config)
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
        geometry=HeadGeometry.from_config(model.config),
        heads=conversion.lift(model),
        calibration=calibration,
        model=model,
        sequences=sequences,
        cache_dir=cache_dir,
        fusion_distances=fusion_distances,
    )


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
    """A checkpoint with its texts and statistics, ready to be converted at any budget. `loss`: of the untouched model.
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
        """KV bytes a token of the untouched model."""
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
            "loss_base": self.loss,
            "loss": scored.loss,
            "rise": scored.loss - self.loss,
            "kl": scored.kl,
            "eval_tokens": scored.tokens,
            "calibration_tokens": 0 if sequences is None else int(sequences.numel()),
            **loading.cache_facts(converted, own),
            "kv_bytes_per_token_base": self.base_bytes,
            "kv_ratio_asked": float(kv_ratio),
            "recipe": self.recipe.to_dict(),
            "plan": json.loads(plan.to_json()),
            "plan_digest": plan.digest,
            "seed": self.seed,
            "dtype": self.dtype,
            "peak_memory": loading.memory_peak(),
        }
        if out is not None:
            with phases("save"):
                about = {"recipe": record["recipe"], "seed": self.seed, **checkpoint.original_note(own)}
                checkpoint.save(converted, out, self.model, record=about, overwrite=overwrite)
            record |= what_it_is(out, self.dtype)
        return record | {"out": None if out is None else str(out), "seconds": dict(phases)}


def convert_checkpoint(
    model: str | Path,
    recipe: str | Recipe,
    kv_ratio: float,
    out: str | Path | None = None,
    *,
    stream: bool | None = False,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Convert, measure before and after, and save to `out` if given. `settings` are those of `Inputs.check`.

    `kv_ratio`: share of the checkpoint's own KV cache to keep, below 1 unless the recipe changes something else. `out`
    must be free, or with `overwrite` hold what we wrote (`attention.io.replacing.check_folder`, whose OutputError comes
    before any work). `stream`: hold one decoder layer at a time (`orchestrator.conversion.layer_by_layer`); None does
    so where the model would not fit in memory. Returns one record: losses and KL in nats a token, KV bytes planned and
    held, seconds by phase. Raises ConfigError, DataError or PlanError for what a user can mend, before the model is
    loaded where that can be known.
    """
    if stream is None:
        from orchestrator.conversion.estimate import must_stream

        stream = out is not None and must_stream(model, recipe, kv_ratio, **settings)
    if stream:
        from orchestrator.conversion.layer_by_layer import stream_checkpoint

        return stream_checkpoint(model, recipe, kv_ratio, out, overwrite=overwrite, **settings)
    if out is not None:
        check_folder(out, overwrite=overwrite, reads=[model])
    return Source.load(model, recipe, [kv_ratio], **settings).at(kv_ratio, out, overwrite=overwrite)


def what_it_is(folder: str | Path, dtype: str) -> dict[str, Any]:
    """What a written checkpoint is (`format`: stock or headfold), what loads it, and both in a line for people."""
    found = format_of(checkpoint.load_config(folder), dtype)
    return {"format": found.format, "loads_in": list(found.loads_in), "format_note": found.note}


def export_checkpoint(
    source: str | Path, target: str, out: str | Path, *, allow_larger_cache: bool = False, overwrite: bool = False
) -> dict[str, Any]:
    """Lower a checkpoint to a stock format, its tokenizer with it. Raises ConfigError or ValueError as in `export`."""
    loading.geometry_of(str(source), key="checkpoint")
    dtype = loading.written_dtype(source)
    allowed = {"allow_larger_cache": allow_larger_cache, "overwrite": overwrite}
    made = export(source, target, out, source, dtype=loading.dtype_of(dtype), **allowed)
    return asdict(made) | what_it_is(out, dtype)
