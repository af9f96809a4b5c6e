"""The plan of a conversion from disk whose allocation looks at the loss increases of all layers.

Legend: L layers, C calibration sequences of T tokens, D model dim.

Three passes over the checkpoint, one layer in memory at a time: forward and backward for the metric
of each layer's output (`attention.io.layers.metrics`), then forward once more, where each layer is
calibrated and its loss increases are estimated. The results are stored in the layer folder as
`metric-*.safetensors` and `curves.json`, from which a killed plan resumes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any, TypedDict, cast

import numpy as np
from torch import Tensor

from attention.base.memory import release_memory
from attention.base.timing import clock
from attention.calibration.calibrate import calibrate
from attention.calibration.sizes import stored_tokens
from attention.conversion.convert import lift
from attention.conversion.refinement.refine import FitWork
from attention.families import geometry_of
from attention.io.layers.metrics import read_metric, write_metrics
from attention.io.layers.windows import advance, rows_of
from attention.plan import AttentionPlan
from orchestrator.conversion.layer_folder import CURVES, LayerFolder
from orchestrator.conversion.layer_source import LayerSource
from orchestrator.conversion.record import FitWorkRecord
from orchestrator.storage.json_files import read_if_there, write_json
from search_spaces.planning.by_layer import curves_of_layer, plan_from_curves, requested_counts
from search_spaces.planning.context import PlanningContext
from search_spaces.planning.curves import points_of
from search_spaces.planning.planner import site_generators


class LayerCurves(TypedDict):
    """An entry of `curves.json`: the points of a layer, and the work of its fits."""

    points: dict[str, list[Any]]
    work: FitWorkRecord


def plan_by_curves(
    source: LayerSource, folder: LayerFolder, kv_ratio: Fraction, calibration: Tensor
) -> tuple[AttentionPlan, list[float], list[FitWork]]:
    """Return the recipe's plan, the loss increase expected of each layer, and the work of fits.

    Args:
        source: The checkpoint.
        folder: Keeps what is measured.
        kv_ratio: A ratio that the recipe meets exactly.
        calibration: Tokens, `[C, T]`.

    Raises:
        ValueError: If the budget cannot be met.
    """
    recipe = source.request.recipe
    geometry = source.request.geometry
    file = folder.folder / CURVES
    measured = cast("dict[str, LayerCurves]", read_if_there(file))
    requested = requested_counts(recipe, kv_ratio, geometry)
    missing = [layer for layer in range(geometry.num_layers) if str(layer) not in measured]
    if missing:
        _write_metrics(source, folder, calibration)
        _measure_curves(source, folder, calibration, missing, requested, measured)
    points = {
        f"{layer}/{key}": point
        for layer in range(geometry.num_layers)
        for key, point in points_of(measured[str(layer)]["points"]).items()
    }
    plan, increases = plan_from_curves(recipe, kv_ratio, geometry, points)
    return plan, increases, [FitWork(**layer["work"]) for layer in measured.values()]


def _write_metrics(source: LayerSource, folder: LayerFolder, calibration: Tensor) -> None:
    request = source.request
    started = time.perf_counter()
    before: int | None = None  # of a call that was killed
    tokens = request.recipe.knobs("allocation")["tokens"]
    used = calibration[: max(1, tokens // calibration.shape[1])]

    def report(done: int, total: int) -> None:
        nonlocal before
        before = done - 1 if before is None else before
        left = (time.perf_counter() - started) * (total - done) / (done - before)
        source.log(f"sensitivity of the outputs {done}/{total}, {clock(left)} left")

    with source.phases("plan"):
        write_metrics(
            source.weights,
            request.config,
            used,
            request.working,
            source.device,
            folder.folder,
            report,
        )
    release_memory()


def _measure_curves(
    source: LayerSource,
    folder: LayerFolder,
    calibration: Tensor,
    missing: Sequence[int],
    requested: Mapping[tuple[int, str], Sequence[int]],
    measured: dict[str, LayerCurves],
) -> None:
    """Add the curves of the `missing` layers to `measured`, and to the file after each."""
    request = source.request
    layers = request.geometry.num_layers
    stream = source.embed(calibration)
    _, generators = site_generators(np.random.default_rng(request.seed), layers)
    started = time.perf_counter()
    for layer in range(max(missing) + 1):
        window = source.window(layer, stream)
        if layer in missing:
            counts = {side: of for (at, side), of in requested.items() if at == layer}
            rows = rows_of(stream)
            with source.phase("calibrate", layer, "calibrating"):
                sampled = stored_tokens(rows.shape[1])
                statistics = calibrate(
                    window, rows, sample_tokens=sampled, batch_size=source.batch_size
                )
            with source.phase("plan", layer, "what each head count costs"):
                metric = read_metric(folder.folder, layer).to(source.device)
                context = PlanningContext(
                    geometry_of(window.config),
                    lift(window),
                    statistics,
                    window,
                    rows,
                    output_metrics=[metric],
                    first_layer=layer,
                    checkpoint_layers=layers,
                )
                sites = generators[2 * layer : 2 * layer + 2]
                points = curves_of_layer(request.recipe, counts, context, sites)
            measured[str(layer)] = {
                "points": {key.partition("/")[2]: list(point) for key, point in points.items()},
                "work": cast("FitWorkRecord", asdict(sum(context.work, FitWork()))),
            }
            write_json(folder.folder / CURVES, measured)
            folder.save_seconds(source.phases)
            done = missing.index(layer) + 1
            left = (time.perf_counter() - started) * (len(missing) - done) / done
            source.log(f"loss increases of layer {layer + 1}/{layers}, {clock(left)} left")
            del statistics, context, metric
        if layer < max(missing):
            advance(window, stream, source.batch_size)
        del window
        release_memory()
