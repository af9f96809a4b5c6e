"""`headfold convert`: one checkpoint, without a cluster and without training.

The way of a checkpoint: `request` opens and checks it, `estimate` decides how it is converted, `run` converts it in
memory (`orchestrator.conversion.memory_store`) or layer by layer (`orchestrator.conversion.disk_store`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from attention.io.replacing import check_folder
from orchestrator import checkpoints
from orchestrator.config.options import ConvertOptions
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.curve import check_curve, convert_curve, is_curve, join_curve, ratio_folder
from orchestrator.conversion.disk_store import LayerwiseJob, check_folder_of_layers, log_line
from orchestrator.conversion.estimate import RunEstimate, estimate_conversions
from orchestrator.conversion.memory_store import Source
from orchestrator.conversion.one_layer import check_layerwise
from orchestrator.conversion.record import ConversionRecord, CurveRecord
from orchestrator.conversion.request import ConversionRequest, asked_ratios, chosen_recipe
from orchestrator.reporting.evaluation_tables import print_conversion
from orchestrator.tasks.task import Task, advise_text


class Convert(Task[ConvertOptions, ConversionRecord | CurveRecord]):
    """A conversion at one KV ratio, or at several from one calibration.

    Attributes:
        config_only: Whether only the checkpoint's config is there, which is enough for an estimate.
        log: Takes the lines of a conversion layer by layer.
    """

    def __init__(self, options: ConvertOptions, *, rehearsal: bool = False, config_only: bool = False) -> None:
        super().__init__(options, rehearsal=rehearsal)
        self.config_only = config_only
        self.log = log_line

    @property
    def outputs(self) -> Mapping[str, str | Path | None]:
        return {"folder": self.options.out}

    @property
    def out(self) -> Path | None:
        """Where the result is saved, if anywhere."""
        return None if self.options.out is None else Path(self.options.out)

    def check(self) -> None:
        self.request  # noqa: B018

    @cached_property
    def request(self) -> ConversionRequest:
        """The conversion, checked once."""
        options = self.options
        weights = not (self.rehearsal or self.config_only)
        checkpoint = checkpoints.open_model(options.model, "model", dequantize=options.dequantize, weights=weights)
        ratios = asked_ratios(checkpoint, options.kv_ratio, options.kv_heads, options.kv_bytes, dtype=options.dtype)
        recipe = chosen_recipe(checkpoint, options.recipe, options.engine, options.recipe_settings)
        if options.layerwise and len(ratios) > 1:
            raise ConfigError("layerwise: one ratio at a time is converted layer by layer; give one --kv-ratio")
        if len(ratios) > 1 or self._joins_curve:
            if options.out is not None:
                check_curve(options.out, checkpoint.path, recipe, ratios, options.overwrite)
        elif options.layerwise:
            check_folder_of_layers(options.out, overwrite=options.overwrite, source=checkpoint.path)
        elif options.out is not None:
            check_folder(options.out, overwrite=options.overwrite, reads=[checkpoint.path])
        request = ConversionRequest.check(checkpoint, recipe, ratios, options, config_only=self.config_only)
        if options.layerwise:
            check_layerwise(recipe, checkpoint.config)
        return request

    @cached_property
    def _joins_curve(self) -> bool:
        """Whether the result is one more ratio of a folder of several."""
        return self.out is not None and is_curve(self.out)

    @property
    def _several(self) -> bool:
        return len(self.request.kv_ratios) > 1

    @cached_property
    def estimate(self) -> RunEstimate:
        """What it takes, and with that how it is done, decided once."""
        points = estimate_conversions(self.request)
        return RunEstimate.of(points, self.out, several=self._several, layerwise=self.options.layerwise)

    def announce(self) -> None:
        if self.out is None:
            print(
                "no --out: what is converted is measured, and nothing of it will be saved", file=sys.stderr, flush=True
            )
        advise_text(self.options.calibration_data, self.options.eval_data)
        self.estimate.announce()

    def rehearse(self) -> Iterable[Mapping[str, str]]:
        advise_text(self.options.calibration_data, self.options.eval_data)
        self.request.texts()
        return [point.describe() for point in self.estimate.points]

    def run(self) -> ConversionRecord | CurveRecord:
        """Convert, measure before and after, and save.

        Returns:
            One record: losses and KL in nats per token, KV bytes planned and held, seconds by phase; of several ratios
            what they have in common, and `points`.

        Raises:
            ConfigError: For what a user can mend. Likewise DataError of texts, PlanError of plans, OutputError of
                folders.
        """
        request, overwrite = self.request, self.options.overwrite
        if self._several:
            return convert_curve(request, self.out, overwrite=overwrite)
        (kv_ratio,) = request.kv_ratios
        out = ratio_folder(self.out, kv_ratio) if self.out is not None and self._joins_curve else self.out
        if self._layerwise():
            place = check_folder_of_layers(out, overwrite=overwrite, source=request.model)
            record = LayerwiseJob(request, kv_ratio, place, self.log, overwrite).run(request.texts())
        else:
            record = Source.load(request).at(kv_ratio, out, overwrite=overwrite)
        if self.out is not None and self._joins_curve:
            join_curve(self.out, record)
        return record

    def _layerwise(self) -> bool:
        """Whether it is done layer by layer; an estimate is made only where the options leave it open."""
        if self.options.layerwise is not None:
            return self.options.layerwise
        if self.out is None:
            return False
        self.estimate.explain()
        return self.estimate.layerwise

    def show(self, record: ConversionRecord | CurveRecord) -> None:
        print_conversion(record, self.out)
