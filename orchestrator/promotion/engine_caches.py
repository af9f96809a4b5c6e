"""The front of a search in engine bytes.

The original, the trials of the front, the baselines and the promoted models are measured with their
caches rounded as engines round them: a format of the cache and fewer heads save bytes of one cache,
and only their comparison shows which of them is worth its loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import cast

import torch
from ray.exceptions import RayError

from attention.base.messages import reason
from attention.cache_formats import (
    LLAMA_CPP,
    VLLM,
    CacheFormatError,
    CachePair,
    engine_formats,
    format_record,
)
from attention.checkpoint import Checkpoint
from attention.engine_cache import engine_cache, with_engine_heads
from attention.io.sources import CheckpointError
from attention.modeling.model_classes import plan_of
from orchestrator import checkpoints
from orchestrator.cluster.placement import task_options
from orchestrator.cluster.ray_tasks import each_on_cluster
from orchestrator.config.sections import SearchSection
from orchestrator.promotion.state import PROMOTED
from orchestrator.promotion.training import best_model
from orchestrator.search.leftovers import best_of_recipe
from orchestrator.search.trials.context import SearchSession, TrialContext
from orchestrator.storage.cache_points import (
    BASELINE_ROLE,
    ORIGINAL_ROLE,
    PROMOTED_ROLE,
    TRIAL_ROLE,
    CacheMeasurement,
    CacheModel,
    CachePoint,
    EngineCachesRecord,
)
from orchestrator.storage.json_files import read_json, write_json
from orchestrator.storage.promotion_record import PromotionRecord
from orchestrator.storage.records import TrialRecord, front
from trainers.evaluation import comparison, evaluate
from trainers.text.data import read_sequences

_EXACT = "not rounded"
"""Stands for a format in the losses of the original."""
_FORMAT_ENGINES = {"gguf": LLAMA_CPP, "vllm": VLLM}
"""Engines of export targets; `transformers` rounds nothing, others are loaded by both."""


def cache_pairs(section: SearchSection) -> tuple[CachePair, ...]:
    """Return the formats that a search measures its models in."""
    if section.cache_formats is not None:
        return tuple(map(CachePair.parse, section.cache_formats))
    if section.target == "transformers":
        return ()
    return engine_formats(_FORMAT_ENGINES.get(section.target))


def measure_engine_caches(
    session: SearchSession,
    trials: Sequence[TrialRecord],
    promotion: PromotionRecord | None = None,
) -> list[CachePoint]:
    """Measure models of a search in each cache format; saved in `engine_caches.json`.

    A model that was measured before is not measured again.

    Args:
        session: The search.
        trials: All of its trials.
        promotion: Of it, if it has had one.
    """
    pairs = cache_pairs(session.config.search)
    if not pairs:
        return []
    config = session.config
    context = session.context
    file = session.folder.engine_caches
    models = _models(session, trials, promotion)
    measured: dict[str, CacheMeasurement] = {}
    if file.exists():
        measured = cast(EngineCachesRecord, read_json(file))["measurements"]
    names = {pair.name for pair in pairs}
    todo = []
    for model in models:
        measurement = measured.get(model["folder"])
        if (
            measurement is None
            or names - measurement["caches"].keys() - measurement["why_not"].keys()
        ):
            todo.append(model)
    options = task_options(config)
    rows = config.train.device_batch_size
    calls = [(model["folder"], context, pairs, rows) for model in todo]
    most = None if options["num_gpus"] else session.parallel
    label = "caches of engines"
    reasons: dict[str, str] = {}
    try:
        for number, result in each_on_cluster(options, label, measure_formats, calls, most):
            measured[todo[number]["folder"]] = result
            _write(session, measured, [])
            for why_not in result["why_not"].values():
                reasons.setdefault(why_not, todo[number]["name"])
    # What a search has found is worth more than this
    except (RuntimeError, CheckpointError, OSError, RayError) as error:
        reasons[f"not measured, nor what came after: {reason(error)}"] = "a model"
    for why_not, name in reasons.items():
        print(f"{label}: {name}: {why_not}", flush=True)
    if context.model not in measured:
        return []
    exact = torch.tensor(measured[context.model]["sequence_losses"][_EXACT], dtype=torch.float64)
    points = [
        point
        for model in models
        if model["folder"] in measured
        for point in _points(model, measured[model["folder"]], exact)
    ]
    _write(session, measured, points)
    return points


def _write(
    session: SearchSession, measured: dict[str, CacheMeasurement], points: list[CachePoint]
) -> None:
    session.control.check()
    record = EngineCachesRecord(measurements=measured, points=points)
    write_json(session.folder.engine_caches, record)


def _models(
    session: SearchSession, trials: Sequence[TrialRecord], promotion: PromotionRecord | None
) -> list[CacheModel]:
    """Return the models to measure, each folder once; of two roles the later one."""
    models: list[CacheModel] = [
        {
            "name": ORIGINAL_ROLE,
            "role": ORIGINAL_ROLE,
            "label": ORIGINAL_ROLE,
            "trial_id": None,
            "kv_ratio": 1.0,
            "folder": session.context.model,
        }
    ]
    baselines = best_of_recipe(trials, session.config.search.baseline).values()
    roles = {trial.trial_id: (trial, TRIAL_ROLE) for trial in front(trials, timed=False)}
    roles |= {trial.trial_id: (trial, BASELINE_ROLE) for trial in baselines}
    with contextlib.suppress(OSError):  # the address is away: without weights, not measured
        session.control.fetch(roles.keys())
    for trial, role in roles.values():
        best = best_model(trial, session.folder.trial(trial.trial_id))
        if best is not None:
            models.append(
                {
                    "name": trial.name,
                    "role": role,
                    "label": trial.label,
                    "trial_id": trial.trial_id,
                    "kv_ratio": trial.kv_ratio,
                    "folder": str(best.folder),
                }
            )
    if promotion is not None:
        trained = [(entry, BASELINE_ROLE) for entry in promotion["baselines"].values()]
        candidates = promotion["candidates"].values()
        trained += [(entry, PROMOTED_ROLE) for entry in candidates if entry["status"] == PROMOTED]
        for entry, role in trained:
            if folder := entry.get("folder"):
                training = "promoted" if role == PROMOTED_ROLE else "full training"
                models.append(
                    {
                        "name": f"{entry['name']} · {training}",
                        "role": role,
                        "label": entry["label"],
                        "trial_id": entry["trial_id"],
                        "kv_ratio": entry["kv_ratio"],
                        "folder": folder,
                    }
                )
    return list({model["folder"]: model for model in models}.values())


def _points(model: CacheModel, measured: CacheMeasurement, exact: torch.Tensor) -> list[CachePoint]:
    """Return the points of a model.

    Args:
        model: The model.
        measured: What it takes and loses.
        exact: Loss of each sequence by the original with a cache that is not rounded, `[N]`.
    """
    points: list[CachePoint] = []
    for name, cache in measured["caches"].items():
        losses = torch.tensor(measured["sequence_losses"][name], dtype=torch.float64)
        loss = float(losses.mean())
        compared = comparison(loss, float(exact.mean()), losses, exact)
        losses_of = {
            "loss": loss,
            "loss_increase": compared["loss_increase"],
            "loss_increase_stderr": compared["loss_increase_stderr"],
        }
        points.append(cast(CachePoint, {**model, **cache, **losses_of}))
    return points


def measure_formats(
    folder: str, context: TrialContext, pairs: Sequence[CachePair], rows: int
) -> CacheMeasurement:
    """Measure one model on the held-out text; the original with a cache that is not rounded too.

    Args:
        folder: Of its weights.
        context: Of the search.
        pairs: The formats.
        rows: Sequences at a time.
    """
    held_out = read_sequences(context.eval_file)[:]
    original = Checkpoint.open(context.model).plan
    model = checkpoints.load_working(folder, context.dtype, context.device)
    result = CacheMeasurement(caches={}, sequence_losses={}, why_not={})

    def add_losses(name: str, pair: CachePair | None) -> None:
        with engine_cache(model, pair):
            losses = evaluate(model, held_out, batch_size=rows).sequence_losses
        assert losses is not None
        result["sequence_losses"][name] = losses.tolist()

    if folder == context.model:
        add_losses(_EXACT, None)
    try:
        model = with_engine_heads(model)
    except CacheFormatError as error:
        result["why_not"] = {pair.name: str(error) for pair in pairs}
        return result
    for pair in pairs:
        try:
            cache = format_record(pair, plan_of(model), original)
            add_losses(pair.name, pair)
        except CacheFormatError as error:
            result["why_not"][pair.name] = str(error)
        else:
            result["caches"][pair.name] = cache
    return result
