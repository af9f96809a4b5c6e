"""Rung 0: a trial's plan, its conversion, and its measurements before any training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from attention.base.timing import Phases
from attention.calibration.store import Calibration
from attention.conversion.refinement.original import Original
from attention.io import checkpoint
from attention.io.precision import cast_weights, round_weights
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan
from attention.ratios import own_heads
from orchestrator import checkpoints
from orchestrator.checkpoints import base_of
from orchestrator.cluster.ray_tasks import publish_progress
from orchestrator.cluster.session import prepare_process
from orchestrator.conversion import dha_distances
from orchestrator.conversion.execution import (
    convert_and_refine,
    cost,
    planning_context,
    relaxation_start,
    steps_of_layers,
)
from orchestrator.search.candidates import Candidate
from orchestrator.search.trials.context import TrialContext
from orchestrator.search.trials.conversions import (
    ConversionLibrary,
    add_costs,
    conversion_digest,
    conversion_key,
    conversion_note,
)
from orchestrator.storage.json_files import write_json
from orchestrator.training.run import TrainingReport
from search_spaces.planning.context import PlanningContext
from search_spaces.planning.planner import make_plan
from search_spaces.similarity.sharing import sharing_similarity, similarity_pairs
from trainers.evaluation import CachedTeacher, evaluate
from trainers.jobs.share import KEEP_BELOW
from trainers.text.data import read_sequences


class SharedParts(NamedTuple):
    """The parts of the original model that trials need.

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


def untrained_facts(candidate: Candidate, context: TrialContext, folder: Path) -> TrainingReport:
    """Plan, convert, measure and save; return the report of rung 0."""
    prepare_process()
    phases = Phases()
    converted, outcome = _converted(candidate, context, folder, phases)
    facts = outcome.facts
    if converted is not None:
        # Casting copies the weights; the original model is released by now, so that one is in
        # memory
        cast_weights(converted, checkpoints.dtype_of(context.dtype))
        own_cache = outcome.own_cache
        if not candidate.probe:
            with phases("save"):
                note = conversion_note(
                    candidate,
                    "converted",
                    _note(context, own_cache, plan_of(converted).head_dim),
                )
                checkpoint.save(converted, folder / "converted", context.model, record=dict(note))
        measured = checkpoints.cache_facts(converted, own_cache)
        facts = {**measured, **facts, "actual_kv_ratio": measured["kv_ratio"]}
        if not candidate.probe:
            key = conversion_key(candidate, context)
            library = ConversionLibrary.of_search(context.folder)
            library.add(key, outcome.digest, folder, facts, outcome.plan_cost, outcome.cost)
        total = add_costs(outcome.plan_cost, outcome.cost)
        facts = {**facts, "seed": candidate.seed, "conversion_cost": total}
    return {**facts, "phases": dict(phases), "seconds": sum(phases.values())}


class _Outcome(NamedTuple):
    """The result of a conversion.

    Attributes:
        facts: Fields of the trial's report.
        digest: `conversion_digest`.
        own_cache: Key and value heads of the original model.
        plan_cost: Of finding the plan.
        cost: Of converting and refining.
    """

    facts: TrainingReport
    digest: str
    own_cache: int
    plan_cost: dict[str, float]
    cost: dict[str, float]


def _converted(
    candidate: Candidate, context: TrialContext, folder: Path, phases: Phases
) -> tuple[PreTrainedModel | None, _Outcome]:
    """Return the converted model as it was measured, and the result of the conversion.

    The model is None if another trial has made the same; its files are then in the trial's folder.
    """
    recipe = candidate.recipe
    with phases("load"):
        shared = shared_parts(context)
    planning = _planning(candidate, context, shared)
    prescribed = None if candidate.plan is None else AttentionPlan.from_json(candidate.plan)
    with phases("plan"):
        generator = np.random.default_rng(candidate.seed)
        plan = prescribed or make_plan(recipe, candidate.used_ratio, planning, generator)
    in_engine: Any = context.engine_facts(shared.original.model.config, plan)
    plan_cost = cost(planning.work, phases)
    steps = steps_of_layers(recipe, plan.num_layers, planning.increases.get(plan))
    digest = conversion_digest(candidate, context, plan, steps)
    own_cache = own_heads(planning.geometry)
    if not candidate.probe:
        library = ConversionLibrary.of_search(context.folder)
        with phases("reuse"):
            facts = library.take_conversion(digest, plan_cost, candidate, folder)
        if facts is not None:
            library.name(conversion_key(candidate, context), digest, plan_cost)
            _release(shared)
            return None, _Outcome(facts, digest, own_cache, plan_cost, {})
        del phases["reuse"]
    converting = Phases()
    converted, work = convert_and_refine(recipe, plan, planning, converting)
    phases.update(converting)
    write_json(folder / "recipe.json", candidate.config())
    (folder / "plan.json").write_text(plan.to_json() + "\n", encoding="utf-8")
    with phases("evaluate"):
        losses = _losses(converted, candidate, context, shared)
    relaxed = context.relaxation_steps(recipe) > 0
    if relaxed and not candidate.probe:
        with phases("save"):
            start = relaxation_start(recipe, shared.original.model, plan, shared.calibration)
            names = _note(context, own_cache, planning.geometry.head_dim)
            note = conversion_note(candidate, "start", names)
            checkpoint.save(start, folder / "start", context.model, record=dict(note))
            del start
    with phases("similarity"):
        similarity = None
        if all(layer.inputs.numel() for layer in shared.calibration.layers):
            similarity = sharing_similarity(shared_pairs(context), plan, planning.geometry.kv_map)
    _release(shared)
    facts = {
        **in_engine,
        **losses,
        "plan_digest": plan.digest,
        "similarity": similarity,
    }
    if relaxed:
        facts["pooled"] = True
    return converted, _Outcome(facts, digest, own_cache, plan_cost, cost(work, converting))


def _release(shared: SharedParts) -> None:
    """Release a large original model, which is not cached for the next trial."""
    if checkpoints.parameters(shared.original.model) > KEEP_BELOW:
        shared_parts.cache_clear()


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
        # The searcher decides by other tokens than those by which the search is evaluated.
        losses["calibration_loss"] = evaluate(converted, shared.tokens, batch_size=rows).loss
    return losses


def _note(context: TrialContext, own_cache: int, head_dim: int) -> Mapping[str, Any]:
    return checkpoint.original_note(own_cache, head_dim, **base_of(context.model))


@lru_cache(maxsize=1)
def shared_pairs(context: TrialContext) -> Any:
    """Return the similarity of each pair of heads of the original model.

    It is cached even where the model is too large to be.
    """
    shared = shared_parts(context)
    planning = planning_context(shared.original, shared.calibration, None, None)
    return similarity_pairs(planning.heads, shared.calibration.layers, planning.geometry)


def watched_facts(candidate: Candidate, context: TrialContext, folder: Path) -> TrainingReport:
    """Return `untrained_facts`, and send progress to the driver, which shows it."""
    with publish_progress(str(folder), "planning"):
        return untrained_facts(candidate, context, folder)
