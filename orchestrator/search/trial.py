"""One trial: plan → convert → measure untrained → Ray Train workers with DeepSpeed for the remaining rungs.

Runs in a process of Ray Tune's with little CPU of its own; the workers that it starts have the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback
from torch import Tensor
from transformers.utils import logging as transformers_logging

from attention.calibration.sizes import Mixed
from attention.calibration.store import Calibration
from attention.conversion.refinement.original import Original
from attention.io import checkpoint
from attention.io.precision import cast_weights, round_weights
from attention.io.targets import target
from attention.plan import AttentionPlan
from attention.ratios import own_heads
from orchestrator.cluster.placement import run_task
from orchestrator.cluster.pool_client import train
from orchestrator.cluster.relay import relayed
from orchestrator.cluster.session import ray_train_intervals
from orchestrator.config.schema import DECODE
from orchestrator.conversion import dha_distances, loading
from orchestrator.conversion.calibrating import checkpoint_calibration
from orchestrator.conversion.in_memory import plan_and_convert
from orchestrator.conversion.steps import planning_context, relaxation_start
from orchestrator.reporting.base_model import base_of
from orchestrator.search.candidates import Candidate
from orchestrator.search.duplicates import work_digest
from orchestrator.serving.decode_times import DecodeTimes
from orchestrator.storage.records import read_json, write_json
from search_spaces.recipes.recipe import Recipe
from search_spaces.relaxation.stages import OWN
from search_spaces.similarity.sharing import sharing_similarity, similarity_pairs
from trainers.evaluation import CachedTeacher, evaluate
from trainers.jobs.job import TrainJob
from trainers.jobs.share import KEEP_BELOW
from trainers.relaxations.stage import RelaxationSpec
from trainers.settings import AUTO, Strategy, TrainSettings
from trainers.text.data import read_sequences

OF_RUNG_0 = ("phases", "pooled", "work_digest")
"""What only the first report of a trial holds: where its time went, whether it is of a pooled model that the trial's
relaxation does not start from, and what it would go on to train (`orchestrator.search.duplicates`)."""


@dataclass(frozen=True)
class TrialContext:
    """What all trials of a search share; plain values, paths absolute and visible to every node. `dtype`: of what is
    written and counted; `weights`: digest of the original model's; `mixed_moments`: how its statistics are kept."""

    folder: str
    model: str
    dtype: str
    train_file: str
    eval_file: str
    calibration_file: str
    calibration_cache: str
    rungs: tuple[int, ...]
    train: dict[str, Any] = field(hash=False)
    original_loss: float
    device: str = "cpu"
    teacher: str | None = None
    promotion_file: str | None = None  # the promotion's own training text
    weights: str | None = None
    mixed_moments: Mixed | None = None
    pool: str | None = None  # name of the worker pool; None: every training starts workers of its own
    accelerator_type: str | None = None  # of the workers
    checkpoint_address: str | None = None  # where training checkpoints lie, where storage is an address
    placement_strategy: Strategy = AUTO
    decode_times: DecodeTimes | None = None  # of the engine that the search is for, where decode time is an objective
    task: dict[str, Any] | None = field(default=None, hash=False)
    """`ray.remote` options of the task that plans a trial which trains; None: its own process does."""

    def calibration(self, tokens: Tensor) -> Calibration:
        """The original model's statistics over calibration `tokens` `[N, T]`, from the search's cache."""
        known: dict[str, Any] = {"weights": self.weights, "mixed": self.mixed_moments}
        own = {"dtype": self.dtype, "device": self.device}
        return checkpoint_calibration(self.model, tokens, self.calibration_cache, **own, **known)

    def search_phase(self, candidate: Candidate) -> dha_distances.SearchPhase | None:
        """DHA's search phase that a candidate's plan rests on; None if it needs none."""
        settings = TrainSettings.model_validate(self.train)
        return dha_distances.SearchPhase.of(candidate.recipe, self.model, self.train_file, settings, candidate.seed)

    def settings(self, recipe: Recipe, learning_rate: float) -> TrainSettings:
        """How a recipe is trained: the search's settings with what the recipe's recovery changes."""
        return TrainSettings.model_validate(self.train | recipe.apply("recovery") | {"learning_rate": learning_rate})

    def relaxation_steps(self, recipe: Recipe) -> int:
        """Training steps of a trial that its relaxation takes, of those up to the last rung; 0 without one. Only with a
        fraction of 1 it takes all, which leaves no recovery."""
        if recipe.relaxation == "none" or len(self.rungs) == 1:
            return 0
        total, knobs = self.rungs[-1], recipe.knobs("relaxation")
        if steps := knobs.get("steps"):
            if steps >= total:
                raise ValueError(f"relaxation.steps must be below the last rung {total}, got {steps}")
            return steps
        fraction = knobs["fraction"]
        return total if fraction == 1 else min(total - 1, max(1, round(fraction * total)))

    def job(
        self, name: str, model_dir: Path, out_dir: Path, candidate: Candidate, milestones: Sequence[int], **more: Any
    ) -> TrainJob:
        """The training of a candidate's weights up to some steps; `more` fields of the job."""
        fields: dict[str, Any] = {
            "model_dir": str(model_dir),
            "teacher_dir": self.teacher or self.model,
            "train_file": self.train_file,
            "eval_file": self.eval_file,
            "out_dir": str(out_dir),
            "storage_path": str(Path(self.folder) / "train"),
            "run_name": name,
            "milestones": tuple(milestones),
            "settings": self.settings(candidate.recipe, candidate.learning_rate),
            "seed": candidate.seed,
            "keep_best": True,
            "accelerator_type": self.accelerator_type,
            "placement_strategy": self.placement_strategy,
            "checkpoint_address": self.checkpoint_address,
        }
        return TrainJob(**fields | more)

    def decode_facts(self, config: Any, plan: AttentionPlan) -> dict[str, float]:
        """Decode time of a plan, where it is an objective. `config`: of the original model."""
        if (times := self.decode_times) is None:
            return {}
        return {DECODE: times.of(target(times.target).held(config, plan))}

    def relaxation(self, recipe: Recipe, folder: Path, settings: TrainSettings | None = None) -> RelaxationSpec | None:
        """The relaxation of the trial in `folder`; None if its recipe has none."""
        steps = self.relaxation_steps(recipe)
        return relaxation_spec(recipe, (folder / "plan.json").read_text("utf-8"), steps, settings) if steps else None


class ReportRungs:
    """Adds the trial's own facts (KV ratio, bytes, rung) to a milestone's report, since searcher and scheduler look at
    single reports. `before`: steps of the relaxation, which the run does not count and a trial does."""

    def __init__(self, context: TrialContext, facts: dict[str, Any], before: int) -> None:
        self._context, self._facts, self._before, self._told = context, facts, before, set[int]()

    def complete(self, metrics: dict[str, Any]) -> dict[str, Any] | None:
        """The report for Tune; None if it has been told."""
        report = self._facts | metrics
        if notes := [*self._facts.get("notes", ()), *metrics.get("notes", ())]:
            report["notes"] = notes
        report |= {key: metrics[key] + self._before for key in ("step", "best_step") if key in metrics}
        step = report["step"]
        if step in self._told:
            return None
        self._told.add(step)
        increase = report["loss"] - self._context.original_loss
        return report | {"rung": self._context.rungs.index(step), "loss_increase": increase}

    def tell(self, metrics: dict[str, Any]) -> None:
        """From the trial's own process. Ends it, by SystemExit, if Tune stops the trial here."""
        if (report := self.complete(metrics)) is not None:
            tune.report(report)


class ForwardRungs(TuneReportCallback):
    """The same from the process of a Ray Train run of this trial alone."""

    def __init__(self, rungs: ReportRungs) -> None:
        super().__init__()
        self._rungs = rungs

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        if (report := self._rungs.complete(metrics[0])) is not None:
            super().after_report(run_context, [report], None)


def run_trial(config: dict[str, Any], context: TrialContext) -> None:
    """Tune's function. `config` is that of a `Candidate`."""
    prepare_process()
    candidate = Candidate.from_config(config)
    trial_id = str(tune.get_context().get_trial_id())
    folder = Path(context.folder) / "trials" / trial_id
    trains = trained(candidate, context.rungs)
    facts = known_facts(candidate, folder)
    if facts is None:
        if trains and context.task is not None:  # its GPUs are free again when the workers start
            facts = run_task(context.task, watched_facts, candidate, context, folder)
        else:
            facts = watched_facts(candidate, context, folder)
        if trains:
            facts["work_digest"] = work_digest(training_job(context, folder, candidate, ""), folder)
        if math.isfinite(facts["loss"]):
            write_json(folder / "facts.json", facts)
    tune.report(facts | {"rung": 0})
    if trains:
        job = training_job(context, folder, candidate, trial_id)
        before = job.relaxation.total_steps if job.relaxation else 0
        kept = {k: v for k, v in facts.items() if k not in OF_RUNG_0}
        rungs = ReportRungs(context, kept, before)
        train(context.pool, job, rungs.tell, lambda: [ForwardRungs(rungs)])


def watched_facts(candidate: Candidate, context: TrialContext, folder: Path) -> dict[str, Any]:
    """`untrained_facts`, with how far they are for the driver to show."""
    with relayed(str(folder), "planning"):
        return untrained_facts(candidate, context, folder)


def trained(candidate: Candidate, rungs: Sequence[int]) -> bool:
    """Whether a trial goes on to train after it was measured untrained."""
    return len(rungs) > 1 and not candidate.probe


def known_facts(candidate: Candidate, folder: Path) -> dict[str, Any] | None:
    """What rung 0 of this very trial came to, if it was here before: one that was paused, or whose process had died."""
    file, recipe = folder / "facts.json", folder / "recipe.json"
    if not file.is_file() or read_json(recipe) != candidate.config():
        return None
    if not candidate.probe and not checkpoint.intact(folder / "converted"):
        return None  # damaged since: it is made anew
    return read_json(file)


def prepare_process() -> None:
    ray_train_intervals(look_seconds=0.1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def untrained_facts(candidate: Candidate, context: TrialContext, folder: Path) -> dict[str, Any]:
    """Plan, convert, save and measure; the report of rung 0."""
    prepare_process()
    phases = loading.Phases()
    recipe = candidate.recipe
    with phases("load"):
        looked_at, calibration, calibration_tokens, held_out, teacher = shared_parts(context)
    original = looked_at.model
    phase = context.search_phase(candidate)
    distances = dha_distances.read(phase.file(context.calibration_cache)) if phase else None
    planning = planning_context(looked_at, calibration, calibration_tokens, context.calibration_cache, distances)
    own_cache = own_heads(planning.geometry)
    given = None if candidate.plan is None else AttentionPlan.from_json(candidate.plan)
    converted, plan, spent = plan_and_convert(recipe, candidate.kv_ratio, planning, candidate.seed, phases, given)
    write_json(folder / "recipe.json", candidate.config())
    (folder / "plan.json").write_text(plan.to_json() + "\n", encoding="utf-8")
    written = loading.dtype_of(context.dtype)
    rows = context.settings(recipe, candidate.learning_rate).device_batch_size
    with phases("evaluate"):
        round_weights(converted, written)  # what is measured is what is written
        scored = evaluate(converted, held_out, teacher=teacher, batch_size=rows)
        decided_by: dict[str, float] = {}
        # What a searcher decides by is measured on other tokens than what the search is judged by.
        if given is not None:
            decided_by["calibration_loss"] = evaluate(converted, calibration_tokens, batch_size=rows).loss
    note = checkpoint.original_note(own_cache, **base_of(context.model))
    if not candidate.probe and context.relaxation_steps(recipe):
        with phases("save"):
            start = relaxation_start(recipe, original, plan, calibration)
            checkpoint.save(start, folder / "start", context.model, record=note)
            del start
    with phases("similarity"):
        sampled = all(layer.inputs.numel() for layer in calibration.layers)
        similarity = sharing_similarity(shared_pairs(context), plan, planning.geometry.kv_map) if sampled else None
    if loading.parameters(original) > KEEP_BELOW:
        shared_parts.cache_clear()
    decode = context.decode_facts(original.config, plan)
    del (
        original,
        looked_at,
        teacher,
        planning,
    )  # what is cast next has memory of its own then, and no other copy beside it
    cast_weights(converted, written)
    if not candidate.probe:
        with phases("save"):
            record = {"recipe": recipe.to_dict(), "seed": candidate.seed, **note}
            checkpoint.save(converted, folder / "converted", context.model, record=record)
    measured = loading.cache_facts(converted, own_cache)
    return {
        **measured,
        **decode,
        "actual_kv_ratio": measured["kv_ratio"],
        "plan_digest": plan.digest,
        "similarity": similarity,
        "conversion_cost": spent,
        "loss": scored.loss,
        "loss_increase": scored.loss - context.original_loss,
        "kl": scored.kl,
        **decided_by,
        "step": 0,
        "tokens": 0,
        "seed": candidate.seed,
        **({"pooled": True} if context.relaxation_steps(recipe) else {}),
        **scored.noted,
        "phases": dict(phases),
        "seconds": sum(phases.values()),
    }


@lru_cache(maxsize=1)
def shared_parts(context: TrialContext) -> tuple[Original, Calibration, Tensor, Tensor, CachedTeacher]:
    """Original model, its statistics, calibration tokens, held-out tokens, and the model as a teacher that knows what
    it said of them: read once a process, trials reuse it."""
    model = loading.load_working(context.model, context.dtype, context.device)
    tokens, held_out = (read_sequences(file)[:] for file in (context.calibration_file, context.eval_file))
    return Original(model), context.calibration(tokens), tokens, held_out, CachedTeacher(model)


@lru_cache(maxsize=1)
def shared_pairs(context: TrialContext) -> Any:
    """How alike each pair of heads of the original model is; kept even where the model is too large to be."""
    original, calibration, *_ = shared_parts(context)
    planning = planning_context(original, calibration, None, None)
    return similarity_pairs(planning.heads, calibration.layers, planning.geometry)


def training_job(context: TrialContext, folder: Path, candidate: Candidate, trial_id: str) -> TrainJob:
    """The brief fine-tuning of a trial: from its converted checkpoint through the rungs above 0.

    With a relaxation it starts from the unfused heads, and the rungs that lie within it are left out: until it has
    collapsed, at the last rung at the latest, there is no model to measure.
    """
    settings = context.settings(candidate.recipe, candidate.learning_rate)
    spec = context.relaxation(candidate.recipe, folder, settings)
    before = spec.total_steps if spec else 0
    milestones = [rung - before for rung in context.rungs[1:] if rung > before] or [0]
    model = folder / ("start" if spec else "converted")
    return context.job(trial_id, model, folder / "trained", candidate, milestones, relaxation=spec)


def relaxation_spec(recipe: Recipe, plan: str, steps: int, settings: TrainSettings | None = None) -> RelaxationSpec:
    """The relaxation of a recipe towards `plan` (JSON) in at most `steps` steps, shared evenly by its stages.

    `settings`: of the trial's training, of which the recipe may change batch and rate for the relaxation.
    """
    plans = recipe.apply("relaxation", AttentionPlan.from_json(plan))
    knobs = recipe.knobs("relaxation")
    changed = {name: knobs[name] for name in ("batch_size", "learning_rate") if knobs.get(name)}
    changed_settings = None
    if settings is not None and changed:
        changed_settings = TrainSettings.model_validate(settings.model_dump() | changed | {"tuning": "full"})
    return RelaxationSpec(
        recipe.relaxation,
        tuple(p.to_json() for p in plans),
        max(1, steps // len(plans)),
        {name: value for name, value in knobs.items() if name not in OWN},
        changed_settings,
        own_schedule=knobs.get("own_schedule", False),
        regroup_steps=knobs.get("regroup_steps", 0),
    )
