"""What a search does before its trials: the original model is found, scored and calibrated, once."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attention.calibration.calibration import cached_calibration
from attention.io import checkpoint
from attention.io.precision import cast_weights
from attention.ratios import own_heads
from orchestrator.config.schema import SearchConfig
from orchestrator.conversion import loading
from orchestrator.conversion.steps import planning_context
from orchestrator.search.trial import TrialContext
from orchestrator.search.validation import Prepared
from orchestrator.storage.paths import SearchFolder, in_ray_job
from orchestrator.storage.records import read_json, write_json
from orchestrator.tracking.sync import MlflowSync
from search_spaces.recipes.recipe import Recipe
from search_spaces.site import SIDES
from trainers.text.data import read_sequences


@dataclass(frozen=True)
class SearchSession:
    """What the steps of a search, or of a promotion from it, have in common. `parallel`: trials at a time."""

    config: SearchConfig
    folder: SearchFolder
    context: TrialContext
    mlflow: MlflowSync
    parallel: int


def prepare_base(config: SearchConfig, prepared: Prepared, folder: SearchFolder) -> dict[str, Any]:
    """Score the original model and calibrate it, once a search; kept in `base.json`.

    Losses are in nats a token. Trials read the statistics from the cache.
    """
    if folder.base.exists():
        return read_json(folder.base)
    started = time.perf_counter()
    path = locate_model(config.model.path, folder)
    device = "cuda" if config.resources.trial_gpus else "cpu"
    dtype = loading.written_dtype(path, config.model.dtype)
    model = loading.load_working(path, dtype, device)
    held_out = read_sequences(prepared.eval_file)
    scored = loading.score(model, held_out)
    tokens = read_sequences(prepared.calibration_file)
    calibration = cached_calibration(model, tokens, prepared.cache / "calibration")
    cast_weights(model, loading.dtype_of(dtype))  # bytes are those of what is written
    record = {
        "model": str(path),
        "dtype": dtype,
        "loss": scored.loss,
        "eval_tokens": scored.tokens,
        "family": prepared.geometry.family,
        **loading.cache_facts(model, own_heads(prepared.geometry)),
        "digests": {"weights": checkpoint.weights_digest(path), "calibration": calibration.digest},
        "seconds": time.perf_counter() - started,
    }
    write_json(folder.base, record)
    size = f"{record['kv_bytes_per_token']} KV bytes a token"
    print(f"original model: held-out loss {scored.loss:.3f} nats a token, {size}", flush=True)
    return record


def locate_model(path: str, folder: SearchFolder, name: str = "model") -> str:
    """Where trials find a model: an absolute folder, or a hub name.

    A Ray job's working folder vanishes with the job, so a model inside it is copied into the search.
    """
    source = Path(path).expanduser()
    if not source.is_dir():
        return path
    if in_ray_job() and not Path(path).is_absolute():
        copy = folder.root / name
        if not copy.exists():
            checkpoint.write_atomically(copy, lambda fresh: _copy(source, fresh))
        return str(copy)
    return str(source.absolute())


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


def trial_context(config: SearchConfig, prepared: Prepared, folder: SearchFolder, base: dict[str, Any]) -> TrialContext:
    """What all trials share."""
    return TrialContext(
        folder=str(folder.root),
        model=base["model"],
        dtype=loading.written_dtype(base["model"], config.model.dtype),
        train_file=str(prepared.train_file),
        eval_file=str(prepared.eval_file),
        calibration_file=str(prepared.calibration_file),
        calibration_cache=str(prepared.cache / "calibration"),
        rungs=tuple(config.rungs.steps),
        train=config.train.model_dump(mode="json"),
        original_loss=base["loss"],
        device="cuda" if config.resources.trial_gpus else "cpu",
        teacher=config.model.teacher and locate_model(config.model.teacher, folder, "teacher"),
    )


def head_similarities(context: TrialContext, recipe: Recipe) -> dict[tuple[int, str], np.ndarray]:
    """The recipe's similarity of the stored KV heads, `[U, U]`, by (layer, side): for a searcher that proposes plans.

    Loads the model and its statistics (cached before the first trial); only plain arrays stay.
    """
    model = loading.load_working(context.model, context.dtype, context.device)
    tokens = read_sequences(context.calibration_file)
    calibration = cached_calibration(model, tokens, context.calibration_cache)
    planning = planning_context(model, calibration, tokens, None)
    layers = range(planning.geometry.num_layers)
    return {(layer, side): planning.similarity(recipe, layer, side) for layer in layers for side in SIDES}
