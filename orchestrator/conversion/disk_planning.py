"""The head counts of a conversion layer by layer whose allocation looks at the loss increases of all layers.

Legend: L layers, C calibration sequences of T tokens, D model dim.

Three ways through the checkpoint, one layer in memory at a time: up and down again for the metric of each layer's
output (`attention.io.layers.metrics`), then up once more, where each layer is calibrated and its loss increases are
estimated. What is found lies in the stage as `metric-*.safetensors` and `curves.json`; a killed plan goes on from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from attention.base.memory import release_memory
from attention.base.timing import clock
from attention.calibration.calibrate import calibrate
from attention.conversion.convert import lift
from attention.conversion.refinement.refine import FitWork
from attention.families import geometry_of
from attention.io.layers.metrics import read_metric, write_metrics
from attention.io.layers.windows import LazyWeights, advance, embed, open_window, rows_of
from attention.plan import AttentionPlan
from orchestrator import checkpoints
from orchestrator.conversion.layer_folder import CURVES, Stage
from orchestrator.conversion.request import ConversionRequest
from orchestrator.storage.json_files import read_json, write_json
from search_spaces.planning.by_layer import curves_of_layer, plan_from_curves, requested_counts
from search_spaces.planning.context import PlanningContext
from search_spaces.planning.curves import points_of
from search_spaces.planning.planner import site_generators


@dataclass(frozen=True)
class PlanByLayer:
    """`kv_ratio`: what the recipe meets exactly; `stage`: where what is found is kept; `batch_size`: sequences at once;
    `progress`: takes lines for people."""

    request: ConversionRequest
    weights: LazyWeights
    kv_ratio: Fraction
    stage: Stage
    batch_size: int
    progress: Callable[[str], None]

    def plan(self, calibration: Tensor) -> tuple[AttentionPlan, list[float]]:
        """The recipe's plan and the loss increase expected of each layer, from `calibration` tokens `[C, T]`.

        Raises ValueError if the budget cannot be met.
        """
        request = self.request
        geometry, known = request.geometry, self._known()
        asked = requested_counts(request.recipe, self.kv_ratio, geometry)
        if missing := [layer for layer in range(geometry.num_layers) if str(layer) not in known]:
            self._metrics(calibration)
            self._curves(calibration, missing, asked, known)
        points = {
            f"{layer}/{key}": point
            for layer in range(geometry.num_layers)
            for key, point in points_of(known[str(layer)]["points"]).items()
        }
        return plan_from_curves(request.recipe, self.kv_ratio, geometry, points)

    def work(self) -> list[FitWork]:
        """What it took so far, by layer."""
        return [FitWork(**layer["work"]) for layer in self._known().values()]

    def _known(self) -> dict[str, Any]:
        file = self.stage.folder / CURVES
        return read_json(file) if file.is_file() else {}

    def _metrics(self, calibration: Tensor) -> None:
        request, started = self.request, time.perf_counter()
        tokens = request.recipe.knobs("allocation")["tokens"]
        used = calibration[: max(1, tokens // calibration.shape[1])]

        def told(done: int, of: int) -> None:
            left = (time.perf_counter() - started) * (of - done) / done
            self.progress(f"sensitivity of the outputs {done}/{of}, {clock(left)} left")

        with request.phases("plan"):
            made_of = request.config, used, request.working, checkpoints.device_of(request.device)
            write_metrics(self.weights, *made_of, self.stage.folder, told)
        release_memory()

    def _curves(
        self, calibration: Tensor, missing: list[int], asked: dict[tuple[int, str], Any], known: dict[str, Any]
    ) -> None:
        """Add the points of the `missing` layers to `known`, and to the file after each."""
        request, layers = self.request, self.request.geometry.num_layers
        device = checkpoints.device_of(request.device)
        kinds: Any = request.working, device
        stream = embed(self.weights, request.config, calibration, request.working, device, self.batch_size)
        _, generators = site_generators(np.random.default_rng(request.seed), layers)
        started = time.perf_counter()
        for layer in range(max(missing) + 1):
            window = open_window(self.weights, request.config, layer, stream, *kinds)
            if layer in missing:
                mine = {side: counts for (at, side), counts in asked.items() if at == layer}
                rows = rows_of(stream)
                with request.layer_phase("calibrate", layer, "calibrating"):
                    statistics = calibrate(window, rows, batch_size=self.batch_size)
                with request.layer_phase("plan", layer, "what each head count costs"):
                    metric = read_metric(self.stage.folder, layer).to(device)
                    context = PlanningContext(
                        geometry_of(window.config), lift(window), statistics, window, rows,
                        output_metrics=[metric], first_layer=layer,
                    )  # fmt: skip
                    points = curves_of_layer(request.recipe, mine, context, generators[2 * layer : 2 * layer + 2])
                found = {key.partition("/")[2]: list(point) for key, point in points.items()}
                known[str(layer)] = {"points": found, "work": asdict(sum(context.work, FitWork()))}
                write_json(self.stage.folder / CURVES, known)
                self.stage.spent(request.phases)
                done = missing.index(layer) + 1
                left = (time.perf_counter() - started) * (len(missing) - done) / done
                self.progress(f"loss increases of layer {layer + 1}/{layers}, {clock(left)} left")
                del statistics, context, metric
            if layer < max(missing):
                advance(window, stream, self.batch_size)
            del window
            release_memory()
