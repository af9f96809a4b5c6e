"""Preparation of the trials of a search.

The original model is scored and calibrated, once, and the increases of the loss are measured that
plans rest on.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from attention.base.memory import release_memory
from attention.base.progress import stage
from attention.calibration.store import Calibration
from attention.checkpoint import Checkpoint
from attention.geometry import HeadGeometry
from attention.io import checkpoint
from attention.io.precision import cast_weights
from attention.io.targets import EngineSupport
from attention.ratios import own_heads
from orchestrator import checkpoints
from orchestrator.cluster.capacity import cluster_nodes, slots
from orchestrator.cluster.placement import Demand, task_options, worker_options
from orchestrator.cluster.ray_tasks import on_cluster
from orchestrator.config.schema import ConfigError, SearchConfig
from orchestrator.conversion import dha_distances
from orchestrator.conversion.calibration import Workers, checkpoint_calibration, is_shared
from orchestrator.conversion.execution import planning_context
from orchestrator.resources.processes import Needs
from orchestrator.search.candidates import Candidate, search_phase_candidates
from orchestrator.search.texts import TEST
from orchestrator.search.trials.context import TrialContext
from orchestrator.search.trials.untrained import shared_parts
from orchestrator.search.validation import Prepared
from orchestrator.serving.decode_times import DecodeTimes, measure_decode_times
from orchestrator.storage.json_files import read_json, write_json
from orchestrator.storage.paths import SearchFolder, in_ray_job
from orchestrator.storage.records import OriginalRecord
from search_spaces.planning.by_layer import measure_curves
from search_spaces.planning.curves import DECIDES
from search_spaces.recipes.recipe import Recipe
from search_spaces.site import FUSION_DISTANCES, SIDES
from trainers.evaluation import evaluate
from trainers.settings import threads_of
from trainers.text.data import SPLITS, read_sequences
from trainers.text.token_sets import is_complete


def prepare_original(
    config: SearchConfig, prepared: Prepared, folder: SearchFolder
) -> OriginalRecord:
    """Score the original model and calibrate it, once per search; saved in `original.json`."""
    if folder.original.exists():
        return cast(OriginalRecord, read_json(folder.original))
    path = locate_model(config.model.path, folder)
    device = config.train.device_with(config.resources.trial_gpus)
    tokens = read_sequences(prepared.files["calibration"])[:]
    workers = calibration_workers(config)
    if not is_shared(prepared.setup.model, tokens):
        workers = None
    record: OriginalRecord = on_cluster(
        task_options(config),
        "original model",
        measure_original,
        path,
        prepared.setup.dtype,
        device,
        prepared.geometry,
        prepared.files,
        prepared.cache / "calibration",
        config.train.device_batch_size,
        workers is None,
    )
    if workers is not None:  # by now no process uses their resources
        started = time.perf_counter()
        calibration = checkpoint_calibration(
            Checkpoint(path, prepared.setup.model.config),
            tokens,
            prepared.cache / "calibration",
            dtype=prepared.setup.dtype,
            device=device,
            weights=record["digests"]["weights"],
            workers=workers,
        )
        add_calibration(record, calibration)
        record["seconds"] += time.perf_counter() - started
    if (ranks := config.search.tensor_parallel) > 1:
        on_rank = EngineSupport.of_geometry(prepared.geometry).on_rank(ranks)
        record["kv_bytes_per_token_per_gpu"] = on_rank.bytes_per_token(prepared.setup.dtype)
    record["texts"] = _text_digests(prepared)
    write_json(folder.original, record)
    size = f"{record['kv_bytes_per_token']} KV bytes per token"
    words = f"original model: held-out loss {record['loss']:.3f} nats per token, {size}"
    print("; ".join([words, *record.get("notes", [])]), flush=True)
    return record


def measure_original(
    path: str,
    dtype: str,
    device: str,
    geometry: HeadGeometry,
    files: dict[str, Path],
    cache: Path,
    rows: int,
    calibrates: bool = True,
) -> OriginalRecord:
    """Return the record of the original model.

    Args:
        rows: Sequences at a time.
        calibrates: Whether to leave its calibration in `cache`, and its facts in the record;
            else others make them.
    """
    started = time.perf_counter()
    opened = Checkpoint.open(path)
    model = checkpoints.load_working(opened, dtype, device)
    scored = evaluate(model, read_sequences(files["eval"])[:], batch_size=rows)
    cast_weights(model, checkpoints.dtype_of(dtype))  # bytes are those of what is written
    facts = checkpoints.cache_facts(model, own_heads(geometry))
    del model  # the calibration reads a layer at a time
    weights = checkpoint.weights_digest(opened.folder, cache)
    record: OriginalRecord = {
        "model": path,
        "dtype": dtype,
        "loss": scored.loss,
        "eval_tokens": scored.tokens,
        "family": geometry.family,
        "kv_ratio": facts["kv_ratio"],
        "kv_bytes_per_token": facts["kv_bytes_per_token"],
        "cache_bytes_measured": facts["cache_bytes_measured"],
        "cache_tokens": facts["cache_tokens"],
        "parameters": facts["parameters"],
        "digests": {"weights": weights},
        "mixed_moments": None,
        "seconds": 0.0,
    }
    if calibrates:
        tokens = read_sequences(files["calibration"])[:]
        calibration = checkpoint_calibration(
            opened, tokens, cache, dtype=dtype, device=device, weights=weights
        )
        add_calibration(record, calibration)
    if scored.notes:
        record["notes"] = list(scored.notes)
    release_memory()  # the driver may have done this in its own process
    record["seconds"] = time.perf_counter() - started
    return record


def add_calibration(record: OriginalRecord, calibration: Calibration) -> None:
    """Add the facts of its calibration to the record of the original model."""
    record["digests"]["calibration"] = calibration.digest
    record["mixed_moments"] = calibration.mixed


def decode_times(
    config: SearchConfig, original: OriginalRecord, dtype: str, folder: SearchFolder
) -> DecodeTimes | None:
    """Return the decode time of the engine by KV heads; None where it is no objective.

    It is measured once per search and saved in `decode_times.json`.
    """
    length = config.search.decode_context_length
    if length is None:
        return None
    if not folder.decode_times.exists():
        times: DecodeTimes = on_cluster(
            task_options(config),
            "decode time in the engine",
            measure_decode_times,
            original["model"],
            config.search.target,
            length,
            dtype,
        )
        write_json(folder.decode_times, asdict(times))
        by_heads = ", ".join(
            f"{1000 * seconds:.3g} ms with {heads}"
            for heads, seconds in zip(times.heads, times.seconds, strict=True)
        )
        print(
            f"decode time of {times.engine} at context {length}: {by_heads} KV heads per layer",
            flush=True,
        )
    record = read_json(folder.decode_times)
    return DecodeTimes(**record | {name: tuple(record[name]) for name in ("heads", "seconds")})


def locate_model(path: str, folder: SearchFolder, name: str = "model") -> str:
    """Return where trials find a model: an absolute folder, or a hub name.

    The working folder of a Ray job is deleted with the job, so a model inside it is copied into the
    search.
    """
    source = Path(path).expanduser()
    if not source.is_dir():
        return path
    if in_ray_job() and not Path(path).is_absolute():
        copy = folder.root / name
        if not copy.exists():
            checkpoint.write_atomically(
                copy, lambda fresh: shutil.copytree(source, fresh, dirs_exist_ok=True)
            )
        return str(copy)
    return str(source.absolute())


def _text_digests(prepared: Prepared) -> dict[str, str]:
    return {split: read_sequences(prepared.files[split]).digest for split in SPLITS}


def check_texts(prepared: Prepared, original: OriginalRecord) -> None:
    """Raise ConfigError for a search whose losses are of other texts than `prepared` has."""
    if begun := original.get("texts"):
        now = _text_digests(prepared)
        if changed := [split for split in SPLITS if begun[split] != now[split]]:
            raise ConfigError(
                f"data.{changed[0]}: the text of {prepared.texts.cuts[changed[0]].source} is "
                "another than when this search began, so that its losses cannot be compared; "
                "restore the file, or start a new search"
            )
        return
    for split, division in prepared.texts.divisions.items():
        if division != "twentieth":
            raise ConfigError(
                f"data.{split}: this search was begun by a version of Headfold that held out "
                "another part of small files, so that its losses are of another text; start a new "
                "search"
            )


def trial_context(
    config: SearchConfig, prepared: Prepared, folder: SearchFolder, original: OriginalRecord
) -> TrialContext:
    """Return what all trials share."""
    return TrialContext(
        folder=str(folder.root),
        model=original["model"],
        dtype=prepared.setup.dtype,
        **{
            f"{split}_file": str(file)
            for split, file in prepared.files.items()
            if split != TEST or is_complete(file)
        },
        calibration_cache=str(prepared.cache / "calibration"),
        weights=original.get("digests", {}).get("weights"),
        mixed_moments=original.get("mixed_moments"),
        rungs=tuple(config.rungs.steps),
        train=config.train.model_dump(mode="json"),
        original_loss=original["loss"],
        device=config.train.device_with(config.resources.trial_gpus),
        teacher=config.model.teacher and locate_model(config.model.teacher, folder, "teacher"),
        accelerator_type=config.resources.accelerator_type,
        placement_strategy=config.resources.placement_strategy,
        checkpoint_minutes=config.resources.checkpoint_minutes,
        checkpoint_address=folder.train_address,
        task=task_options(config) if config.resources.trial_gpus else None,
        recomputation=Needs(prepared.setup.inputs, "pooled").recomputations,
        decode_times=decode_times(config, original, prepared.setup.dtype, folder),
        target=config.search.target,
        tensor_parallel=config.search.tensor_parallel,
    )


def head_similarities(context: TrialContext, recipe: Recipe) -> dict[tuple[int, str], np.ndarray]:
    """Return a recipe's similarity of the stored KV heads, `[U, U]`, by (layer, side).

    For searchers that propose plans.
    """
    model = checkpoints.load_working(context.model, context.dtype, context.device)
    tokens = read_sequences(context.calibration_file)[:]
    planning = planning_context(model, context.calibration(tokens), tokens, None)
    layers = range(planning.geometry.num_layers)
    return {
        (layer, side): planning.similarity(recipe, layer, side)
        for layer in layers
        for side in SIDES
    }


def run_search_phases(config: SearchConfig, prepared: Prepared, context: TrialContext) -> None:
    """Run DHA's search phases that plans of the trials are based on."""
    candidates = search_phase_candidates(config, prepared.problem.named)
    phases = [phase for phase in map(context.search_phase, candidates) if phase]
    dha_distances.prepare(phases, context.calibration_cache, worker_options(config))


# ---- increases of the loss, on the workers of a cluster ------------------------------------------
# A layer's points do not depend on another layer, so there is one Ray task per layer. Each writes
# its points into the file that trials read (`search_spaces.planning.curves`); existing points are
# not measured again.

SEVERAL = 4
"""Number of workers from which their start pays off; two are enough on GPUs."""
CurveTask = tuple[Candidate, int]
"""A candidate, and the layer whose loss increases are measured for its plan."""


def slots_of(config: SearchConfig) -> int:
    """Return how many tasks with the CPUs and GPUs of one trial the cluster has room for."""
    resources = Demand.of(config).task.bundle | {"CPU": config.train.cpus_per_worker}
    return slots(cluster_nodes(), resources)


def calibration_workers(config: SearchConfig) -> Workers | None:
    """Return the actors that share the calibration; None where one process makes it."""
    slots = slots_of(config)
    if slots < (2 if config.resources.trial_gpus else SEVERAL):
        return None
    return Workers(slots, task_options(config) | {"num_cpus": config.train.cpus_per_worker})


def measure_increases(config: SearchConfig, prepared: Prepared, context: TrialContext) -> None:
    """Measure the loss increases that plans of named candidates rest on, by several workers.

    If there is no room for several, the first trial that needs them measures them.
    """
    cpus = config.train.cpus_per_worker
    if slots_of(config) >= SEVERAL:
        tasks = curve_tasks(prepared.problem.named, prepared.geometry.num_layers)
        measure_on_workers(tasks, context, task_options(config) | {"num_cpus": cpus})


def curve_tasks(candidates: Iterable[Candidate], layers: int) -> list[CurveTask]:
    """Return a task per layer for each set of curves that the candidates need.

    The curves depend on the seed and on how heads are grouped and fused, not on the KV ratio.
    """
    first: dict[object, Candidate] = {}
    for candidate in candidates:
        recipe = candidate.recipe
        if candidate.plan is not None or not recipe.measures_increases:
            continue
        if FUSION_DISTANCES in recipe.needs:  # which are of the trial's search phase
            continue
        # Plans that no refinement fits are measured without a fit
        axes = (*DECIDES, "allocation", "refinement")
        choices = tuple(
            (axis, getattr(recipe, axis), tuple(recipe.knobs(axis).items())) for axis in axes
        )
        same = (choices, recipe.width, recipe.together, recipe.by, candidate.seed)
        first.setdefault(same, candidate)
    return [(candidate, layer) for candidate in first.values() for layer in range(layers)]


def measure_layer(task: CurveTask, context: TrialContext, threads: int | None = None) -> int:
    """Measure a layer in this process; return its number of points.

    Args:
        threads: Threads of torch; None for its own default.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    (candidate, layer), shared = task, shared_parts(context)
    planning = planning_context(
        shared.original, shared.calibration, shared.tokens, context.calibration_cache
    )
    generator = np.random.default_rng(candidate.seed)
    return measure_curves(candidate.recipe, candidate.used_ratio, planning, generator, [layer])


def measure_on_workers(
    tasks: Sequence[CurveTask], context: TrialContext, options: Mapping[str, Any]
) -> None:
    """Run the tasks as Ray tasks with these options of `ray.remote`.

    A layer that cannot be measured is left to the trials, which report why.
    """
    if not tasks:
        return
    remote: Any = ray.remote(max_retries=1, **options)(measure_layer)
    threads = threads_of(options["num_cpus"])
    waiting = [remote.remote(task, context, threads) for task in tasks]
    failures = 0
    with stage("measuring increases of the loss", len(tasks), "layers") as progress:
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            try:
                ray.get(done)
            except RayError as error:
                failures += 1
                print(f"increases of the loss: {str(error).strip().splitlines()[-1]}", flush=True)
            progress.step()
    measured = f"{len(tasks) - failures} of {len(tasks)}" if failures else str(len(tasks))
    print(f"increases of the loss: {measured} layers measured", flush=True)
