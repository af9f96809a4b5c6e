"""`headfold inspect`: the sensitive heads of a checkpoint, and the cost of each budget.

It also shows which heads are similar.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from attention.base.cache import cache_folder
from orchestrator import checkpoints
from orchestrator.config.options import InspectOptions
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.inspection import (
    COMPARED,
    InspectionRecord,
    measure_heads,
    sensitivity_recipe,
    untrained_recipe,
)
from orchestrator.conversion.request import ConversionRequest, requested_ratios
from orchestrator.reporting.inspection_tables import print_inspection
from orchestrator.reporting.pages.inspection_page import build_page
from orchestrator.storage.outputs import write_page
from orchestrator.storage.paths import check_writable
from orchestrator.tasks.task import Task, advise_text, require
from search_spaces.recipes.recipe import Recipe

INSPECTED_RATIOS = (0.5, 0.25)
FEWEST_HEADS = 3
"""KV heads of a checkpoint whose groups can be changed (`search_spaces.planning.agreement`)."""


class Inspect(Task[InspectOptions, InspectionRecord]):
    """Measurements of a checkpoint, from one calibration.

    Nothing is trained, and only caches are written.
    """

    @property
    def outputs(self) -> Mapping[str, str | Path | None]:
        return {"page": self.options.out}

    def check(self) -> None:
        require(self.request)

    @cached_property
    def request(self) -> ConversionRequest:
        """The measurement, checked once."""
        options = self.options
        opened = checkpoints.open_model(
            options.checkpoint,
            "checkpoint",
            dequantize=options.dequantize,
            weights=not self.rehearsal,
        )
        ratios = requested_ratios(
            opened,
            options.kv_ratio,
            options.kv_heads,
            options.kv_bytes,
            dtype=options.dtype,
            default=INSPECTED_RATIOS,
            key="checkpoint",
        )
        if options.agreement and (count := opened.geometry.num_kv_heads) < FEWEST_HEADS:
            raise ConfigError(
                f"agreement: expected a checkpoint with at least {FEWEST_HEADS} KV heads, whose "
                f"groups can be changed, got {count}; leave it out"
            )
        recipe = sensitivity_recipe(options.recipe, options.counts, options.recipe_settings)
        require(self.compared)
        cache = Path(options.cache_dir or cache_folder())
        check_writable(cache, "cache")
        return ConversionRequest.check(
            opened, recipe, ratios, replace(options, cache_dir=cache), key="checkpoint"
        )

    @cached_property
    def compared(self) -> dict[str, Recipe]:
        """The recipes to convert by, without their training."""
        names = self.options.compare
        if names is None:
            names = COMPARED
        elif isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip() != "none"]
        return {name: untrained_recipe(name) for name in names}

    def announce(self) -> None:
        advise_text(self.options.calibration_data, self.options.eval_data)

    def rehearse(self) -> Iterable[Mapping[str, str]]:
        self.announce()
        texts = self.request.texts()
        ratios = ", ".join(self.request.amount(ratio) for ratio in self.request.distinct().values())
        return [
            {
                "measures": "all head counts of each layer by recipe "
                f"{self.request.recipe.name}, on {texts.calibration.numel():,} tokens",
                "converts": f"by {', '.join(self.compared) or 'no recipe'} at {ratios}, "
                f"measured on {texts.held_out.numel():,} tokens",
            }
        ]

    def run(self) -> InspectionRecord:
        """Measure."""
        record = measure_heads(self.request, self.compared, agreement=self.options.agreement)
        return {**record, "options": self.model_and_text_options}

    @property
    def model_and_text_options(self) -> list[str]:
        """The words of the options on model and texts that are not their defaults."""
        options, defaults = self.options, InspectOptions
        words = ["--dequantize"] * options.dequantize
        for name in ("text_field", "eval_data", "dtype"):
            if (value := getattr(options, name)) != getattr(defaults, name):
                words += [f"--{name.replace('_', '-')}", str(value)]
        return words

    def show(self, record: InspectionRecord) -> None:
        print_inspection(record)
        print(f"page: {write_page(self.options.out, build_page(record))}")
