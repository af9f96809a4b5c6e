"""`headfold convert`: one checkpoint, without a cluster and without training.

A checkpoint passes through four calls: `request` opens and checks it, `estimate` decides whether it
is converted in memory or layer by layer, a store of its layers is opened accordingly, and
`LayerStore.run` plans, converts, measures and writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from attention.base.text import gib
from attention.cache_formats import format_advice
from attention.checkpoint import Checkpoint
from attention.io.replacing import check_folder
from orchestrator import checkpoints
from orchestrator.config.options import ConvertOptions
from orchestrator.config.parsing import ConfigError, read_cache_format
from orchestrator.conversion.cache_choice import (
    EngineBudget,
    choose_cache,
    formats_alone,
    take_choice,
)
from orchestrator.conversion.curve import (
    add_to_curve,
    check_curve,
    curve_record,
    draw_curve,
    is_curve,
    ratio_folder,
)
from orchestrator.conversion.disk_store import DiskStore, check_output_folder, log_line
from orchestrator.conversion.estimate import RunEstimate, estimate_conversions
from orchestrator.conversion.layer_source import check_layerwise
from orchestrator.conversion.layer_store import LayerStore
from orchestrator.conversion.memory_store import MemoryStore
from orchestrator.conversion.record import CombinationRecord, ConversionRecord, CurveRecord
from orchestrator.conversion.request import ConversionRequest, chosen_recipe, requested_ratios
from orchestrator.conversion.short_fits import best_by_short_fit, competing_recipes, equal_budgets
from orchestrator.reporting.evaluation_tables import next_command, print_conversion
from orchestrator.storage.outputs import Interrupted
from orchestrator.tasks.task import Task, advise_text, require
from search_spaces.recipes import choice
from search_spaces.recipes.recipe import Recipe

_FURTHER = (
    "leave --polish out, and train the result with `headfold finetune --model OUT --original "
    "MODEL`, which divides a model among workers"
)


class Convert(Task[ConvertOptions, ConversionRecord | CurveRecord]):
    """A conversion at one KV ratio, or at several from one calibration.

    Attributes:
        config_only: Whether only the checkpoint's config is available, which is enough for an
            estimate.
        log: Takes the output lines of a conversion layer by layer.
    """

    def __init__(
        self,
        options: ConvertOptions,
        *,
        rehearsal: bool = False,
        verbose: bool = False,
        config_only: bool = False,
    ) -> None:
        super().__init__(options, rehearsal=rehearsal, verbose=verbose)
        self.config_only = config_only
        self.log = log_line

    @property
    def outputs(self) -> Mapping[str, str | Path | None]:
        return {"folder": self.options.out}

    @property
    def out(self) -> Path | None:
        """Folder of the result, if it is saved."""
        return None if self.options.out is None else Path(self.options.out)

    def check(self) -> None:
        require(self.request)

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return checkpoints.open_model(
            self.options.model,
            "model",
            dequantize=self.options.dequantize,
            weights=not (self.rehearsal or self.config_only),
        )

    @cached_property
    def budget(self) -> EngineBudget | None:
        """A cache size in the bytes of an engine, if one was requested."""
        return EngineBudget.of(self._checkpoint, self.options)

    @cached_property
    def request(self) -> ConversionRequest:
        """The conversion, checked once."""
        options = self.options
        checkpoint = self._checkpoint
        recipe, geometry = chosen_recipe(
            checkpoint, options.recipe, options.engine, options.recipe_settings
        )
        if self.budget is not None:
            ratios = self.budget.kv_ratios(recipe, geometry)
            # From here on, ratios are of heads
            options = replace(options, kv_bytes=None, kv_ratio=ratios)
        else:
            ratios = requested_ratios(
                checkpoint,
                options.kv_ratio,
                options.kv_heads,
                options.kv_bytes,
                dtype=options.dtype,
            )
        if options.layerwise and len(ratios) > 1:
            raise ConfigError(
                "layerwise: one ratio at a time is converted layer by layer; give one --kv-ratio"
            )
        several = len(ratios) > 1 and not self._chooses_cache
        if several or self._joins_curve:
            if options.out is not None:
                check_curve(options.out, checkpoint.path, recipe, ratios, options.overwrite)
        elif options.layerwise:
            check_output_folder(options.out, overwrite=options.overwrite, source=checkpoint.path)
        elif options.out is not None:
            check_folder(options.out, overwrite=options.overwrite, reads=[checkpoint.path])
        request = ConversionRequest.check(
            checkpoint,
            recipe,
            ratios,
            options,
            config_only=self.config_only,
            geometry=geometry,
        )
        if options.layerwise:
            check_layerwise(recipe, checkpoint.config)
        self._check_polish(recipe)
        return request

    def _check_polish(self, recipe: Recipe) -> None:
        """Raise ConfigError for an impossible polish, or for weights without one."""
        if not self.options.polish:
            if self.options.polish_weights != ConvertOptions.polish_weights:
                raise ConfigError(
                    "polish_weights: are those that a polish trains; add --polish STEPS, or leave "
                    "it out"
                )
            return
        if self.options.layerwise:
            raise ConfigError(f"polish: layer by layer no step of training is possible; {_FURTHER}")
        if self.options.polish_weights == "kv" and recipe.sharing != "none":
            raise ConfigError(
                f"polish_weights: layers share heads by recipe {recipe.name}, and so the weights "
                "of their keys and values; use --polish-weights all"
            )

    @cached_property
    def _joins_curve(self) -> bool:
        """Whether the result is added to a folder of several ratios."""
        return self.out is not None and is_curve(self.out)

    @property
    def several(self) -> bool:
        """Whether more than one checkpoint is made."""
        return len(self.request.kv_ratios) > 1 and not self._chooses_cache

    @property
    def _chooses_cache(self) -> bool:
        """Whether the KV ratio includes the cache format that is still to be chosen."""
        return self.budget is not None and self.budget.automatic

    @cached_property
    def competing(self) -> list[Recipe]:
        """The recipe, and those that a short fit compares it with."""
        request = self.request
        return competing_recipes(request.checkpoint, request.recipe, self.options)

    @property
    def compared(self) -> list[tuple[Recipe, float]]:
        """The recipes and KV ratios that short fits compare before the conversion."""
        request = self.request
        if self.several or self._joins_curve or self.options.layerwise:
            return []
        pairs = [
            (recipe, ratio)
            for ratio in request.kv_ratios
            for recipe in equal_budgets(self.competing, ratio, request.geometry)
        ]
        return pairs if len(pairs) > 1 else []

    @cached_property
    def estimate(self) -> RunEstimate:
        """The estimate, which decides whether the conversion is done in memory."""
        points = estimate_conversions(self.request, compared=self.compared)
        layerwise = self.options.layerwise
        estimate = RunEstimate.of(
            points,
            self.out,
            several=self.several,
            layerwise=layerwise,
            alternatives=self._chooses_cache,
        )
        cache_format = self._chooses_cache or self.options.cache_format is not None
        if layerwise is None and estimate.layerwise and cache_format:
            raise ConfigError(
                "cache_format: the model has no room in memory, and layer by layer nothing is "
                "measured in a cache format; give --kv-ratio instead of --kv-bytes, and "
                "measure with `headfold evaluate --cache-format`"
            )
        if estimate.layerwise and self.options.polish:
            first = points[0]
            all_weights = self.options.polish_weights == "all"
            less = "--polish-weights kv takes less, or " if all_weights else ""
            raise ConfigError(
                f"polish: it would take about {gib(first.resident)}, {gib(first.available)} are "
                "available, and layer by layer no step of training is possible; "
                f"{less}{_FURTHER}"
            )
        return estimate

    def announce(self) -> None:
        if self.out is None:
            print(
                "no --out: the converted model is measured and not saved",
                file=sys.stderr,
                flush=True,
            )
        self._advise()
        self.estimate.announce(verbose=self.verbose)

    def _advise(self) -> None:
        """Print what a cache format alone achieves, and which text is used if none is named."""
        if self.budget is not None:
            formats = formats_alone(self.request.checkpoint, self.options.engine)
            for share in self.budget.shares:
                advice = format_advice(formats, share, str(self.options.model))
                if advice:
                    print(f"cache: {advice}", file=sys.stderr, flush=True)
        advise_text(self.options.calibration_data, self.options.eval_data)

    def rehearse(self) -> Iterable[Mapping[str, str]]:
        self._advise()
        self.request.texts()
        self.estimate.check()
        return [point.describe(verbose=self.verbose) for point in self.estimate.points]

    def run(self) -> ConversionRecord | CurveRecord:
        """Convert, measure before and after, and save.

        Returns:
            One record: losses and KL in nats per token, KV bytes planned and measured, seconds by
            phase; for several ratios, the common fields, and `points` by falling KV ratio. Ratios
            with the same plan are converted once.

        Raises:
            ConfigError: For what a user can mend. Likewise DataError of texts, PlanError of plans,
                OutputError of folders.
        """
        curve = self.out if self.several or self._joins_curve else None
        store = self._open_store()
        records: list[ConversionRecord] = []
        ratios = list(self.request.distinct().values())
        combinations: list[CombinationRecord] = []
        compared_recipes: dict[str, float] = {}
        if isinstance(store, MemoryStore):
            if self.budget is not None and self.budget.automatic:
                ratios, combinations = self._choose_cache(store, self.budget)
            else:
                if self.options.cache_format is not None:
                    store.cache_pair = read_cache_format(self.options.cache_format)
                if not self.several and not self._joins_curve:
                    compared_recipes = self._choose_recipe(store, ratios[0])
        try:
            for kv_ratio in ratios:
                out = self.out if curve is None else ratio_folder(curve, kv_ratio)
                records.append(store.run(kv_ratio, out, overwrite=self.options.overwrite))
                if curve is not None:
                    add_to_curve(curve, records[-1])
        except KeyboardInterrupt:
            if not self.several:
                raise
            finished = [f"kv-{record['kv_ratio_asked']:g}" for record in records]
            rest = "nothing was written"
            if finished and curve is not None:
                rest = f"{', '.join(finished)} in {curve} are finished, the others not begun"
            raise Interrupted(rest) from None
        if curve is not None:
            draw_curve(curve)
        if combinations:
            records[0]["combinations"] = combinations
        if compared_recipes:
            records[0]["compared_recipes"] = compared_recipes
        return curve_record(records) if self.several else records[0]

    def _choose_cache(
        self, store: MemoryStore, budget: EngineBudget
    ) -> tuple[list[float], list[CombinationRecord]]:
        """Return the KV ratio of the best combination of bits and heads, and all combinations."""
        with self.request.phases("compare"):
            # A folder of several ratios is of one recipe
            recipes = [self.request.recipe] if self._joins_curve else self.competing
            choice = choose_cache(store, budget.options, recipes)
        choice.report(budget.shares[0])
        return [take_choice(store, choice)], choice.combinations

    def _choose_recipe(self, store: MemoryStore, kv_ratio: float) -> dict[str, float]:
        """Let a store convert by the best of the recipes that are compared at a KV ratio.

        Returns:
            The loss increase of each by a short fit; empty if there is only one.
        """
        request = self.request
        recipes = equal_budgets(self.competing, kv_ratio, request.geometry)
        if len(recipes) == 1:
            return {}
        with request.phases("compare"):
            best, increases = best_by_short_fit(store, recipes, kv_ratio)
        store.request = replace(request, recipe=best)
        return increases

    def _open_store(self) -> LayerStore[Any]:
        """Open the layers of the checkpoint, in memory or on disk.

        An estimate is made only if the options leave that open.
        """
        layerwise = self.options.layerwise
        if layerwise is None and self.out is not None and not self.several:
            self.estimate.report_choice()
            layerwise = self.estimate.layerwise
        if layerwise:
            return DiskStore(self.request, self.log)
        return MemoryStore(self.request, always_calibrate=self._chooses_cache)

    def show(self, record: ConversionRecord | CurveRecord) -> None:
        print_conversion(record, self.out)
        engine = self.options.engine and choice.engine_name(self.options.engine)
        point: Mapping[str, Any] = record
        if "points" in record:
            point = record["points"][0]
        if self.out is not None and (command := next_command(point, engine)):
            print(f"next       {command}")
