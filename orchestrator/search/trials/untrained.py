"""Rung 0: a trial's plan, its conversion, and what that measures before any training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from attention.base.timing import Phases
from attention.calibration.store import Calibration
from attention.conversion.refinement.original import Original
from attention.io import checkpoint
from attention.io.precision import cast_weights, round_weights
from attention.plan import AttentionPlan
from attention.ratios import own_heads
from orchestrator import checkpoints
from orchestrator.checkpoints import base_of
from orchestrator.cluster.ray_tasks import publish_progress
from orchestrator.cluster.session import prepare_process
from orchestrator.conversion import dha_distances
from orchestrator.conversion.execution import plan_and_convert, planning_context, relaxation_start
from orchestrator.search.candidates import Candidate
from orchestrator.search.trials.context import TrialContext
from orchestrator.storage.json_files import write_json
from search_spaces.planning.context import PlanningContext
from search_spaces.similarity.sharing import sharing_similarity, similarity_pairs
from trainers.evaluation import CachedTeacher, evaluate
from trainers.jobs.share import KEEP_BELOW
from trainers.text.data import read_sequences


class SharedParts(NamedTuple):
    """What trials need of the original model.

    Attributes:
        tokens: For calibration, `[N, T]`.
        held_out: `[N, T]`.
        teacher: The model, with its logits over the held-out tokens cached.
    """

    original: Original
    calibration: Calibration
    tokens: Tensor
    held_out: Tensor
    teacher: CachedTeacher


@lru_cache(maxsize=1)
def shared_parts(context: TrialContext) -> SharedParts:
    """Read what trials need of the original model, once per process."""
    model = checkpoints.load_working(context.model, context.dtype, context.device)
    tokens, held_out = (
        read_sequences(file)[:] for file in (context.calibration_file, context.eval_file)
    )
    return SharedParts(
        Original(model), context.calibration(tokens), tokens, held_out, CachedTeacher(model)
    )


def untrained_facts(candidate: Candidate, context: TrialContext, folder: Path) -> dict[str, Any]:
    """Plan, convert, measure and save; return the report of rung 0."""
    prepare_process()
    phases = Phases()
    converted, own_cache, facts = _converted(candidate, context, folder, phases)
    # Casting copies the weights; the original model is released by now, so that one is in memory
    cast_weights(converted, checkpoints.dtype_of(context.dtype))
    if not candidate.probe:
        with phases("save"):
            record = {
                "recipe": candidate.recipe.to_dict(),
                "seed": candidate.seed,
                **_note(context, own_cache),
            }
            checkpoint.save(converted, folder / "converted", context.model, record=record)
    measured = checkpoints.cache_facts(converted, own_cache)
    facts |= {
        "actual_kv_ratio": measured["kv_ratio"],
        "phases": dict(phases),
        "seconds": sum(phases.values()),
    }
    return measured | facts


def _converted(
    candidate: Candidate, context: TrialContext, folder: Path, phases: Phases
) -> tuple[PreTrainedModel, int, dict[str, Any]]:
    """Return the converted model as it was measured, the original's heads, and facts of the trial.

    The heads are key and value heads.
    """
    recipe = candidate.recipe
    with phases("load"):
        shared = shared_parts(context)
    planning = _planning(candidate, context, shared)
    prescribed = None if candidate.plan is None else AttentionPlan.from_json(candidate.plan)
    converted, plan, cost = plan_and_convert(
        recipe, candidate.used_ratio, planning, candidate.seed, phases, prescribed
    )
    write_json(folder / "recipe.json", candidate.config())
    (folder / "plan.json").write_text(plan.to_json() + "\n", encoding="utf-8")
    with phases("evaluate"):
        losses = _losses(converted, candidate, context, shared)
    own_cache = own_heads(planning.geometry)
    relaxed = context.relaxation_steps(recipe) > 0
    if relaxed and not candidate.probe:
        with phases("save"):
            start = relaxation_start(recipe, shared.original.model, plan, shared.calibration)
            checkpoint.save(
                start, folder / "start", context.model, record=_note(context, own_cache)
            )
            del start
    with phases("similarity"):
        similarity = None
        if all(layer.inputs.numel() for layer in shared.calibration.layers):
            similarity = sharing_similarity(shared_pairs(context), plan, planning.geometry.kv_map)
    if checkpoints.parameters(shared.original.model) > KEEP_BELOW:
        shared_parts.cache_clear()
    facts = {
        **context.decode_facts(shared.original.model.config, plan),
        **losses,
        "plan_digest": plan.digest,
        "similarity": similarity,
        "conversion_cost": cost,
        "seed": candidate.seed,
    }
    if relaxed:
        facts["pooled"] = True
    return converted, own_cache, facts


def _planning(candidate: Candidate, context: TrialContext, shared: SharedParts) -> PlanningContext:
    phase = context.search_phase(candidate)
    distances = dha_distances.read(phase.file(context.calibration_cache)) if phase else None
    return planning_context(
        shared.original, shared.calibration, shared.tokens, context.calibration_cache, distances
    )


def _losses(
    converted: PreTrainedModel, candidate: Candidate, context: TrialContext, shared: SharedParts
) -> Mapping[str, Any]:
    """Return the losses of the converted model, its weights rounded to those that are written."""
    round_weights(converted, checkpoints.dtype_of(context.dtype))
    rows = context.settings(candidate.recipe, candidate.learning_rate).device_batch_size
    scored = evaluate(converted, shared.held_out, teacher=shared.teacher, batch_size=rows)
    losses = {
        "loss": scored.loss,
        "loss_increase": scored.loss - context.original_loss,
        "kl": scored.kl,
        "step": 0,
        "tokens": 0,
        **scored.noted,
    }
    if candidate.plan is not None:
        # What a searcher decides by is measured on other tokens than what the search is judged by.
        losses["calibration_loss"] = evaluate(converted, shared.tokens, batch_size=rows).loss
    return losses


def _note(context: TrialContext, own_cache: int) -> dict[str, Any]:
    return checkpoint.original_note(own_cache, **base_of(context.model))


@lru_cache(maxsize=1)
def shared_pairs(context: TrialContext) -> Any:
    """Return the similarity of each pair of heads of the original model.

    It is cached even where the model is too large to be.
    """
    shared = shared_parts(context)
    planning = planning_context(shared.original, shared.calibration, None, None)
    return similarity_pairs(planning.heads, shared.calibration.layers, planning.geometry)


def watched_facts(candidate: Candidate, context: TrialContext, folder: Path) -> dict[str, Any]:
    """`untrained_facts`, with its progress sent to the driver, which shows it."""
    with publish_progress(str(folder), "planning"):
        return untrained_facts(candidate, context, folder)
