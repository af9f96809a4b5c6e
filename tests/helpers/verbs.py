"""Tasks by what most tests need of them: a checkpoint, a recipe, ratios, a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.options import (
    ConvertOptions,
    EvaluateOptions,
    ExportOptions,
    FinetuneOptions,
    InspectOptions,
    TrainOptions,
)
from orchestrator.conversion.estimate import estimate_conversions
from orchestrator.conversion.memory_store import MemoryStore
from orchestrator.resources.estimate import ConversionEstimate
from orchestrator.serving import export
from orchestrator.tasks.convert import Convert
from orchestrator.tasks.evaluate import Evaluate
from orchestrator.tasks.finetune import Finetune, FinetuneRequest
from orchestrator.tasks.inspect import Inspect
from orchestrator.tasks.train import ScratchRequest, Train
from search_spaces.recipes.recipe import Recipe


def conversion(
    model: Any,
    recipe: str | Recipe,
    kv_ratio: Any,
    out: Any = None,
    *,
    recipe_settings: dict[str, Any] | None = None,
    config_only: bool = False,
    **settings: Any,
) -> Convert:
    options = {"model": model, "recipe": recipe, "kv_ratio": kv_ratio, "out": out, "overrides": recipe_settings}
    return Convert(ConvertOptions(**options, **settings), config_only=config_only)


def convert_checkpoint(
    model: Any, recipe: Any, kv_ratio: float, out: Any = None, *, layerwise: bool | None = False, **settings: Any
) -> Any:
    return conversion(model, recipe, kv_ratio, out, layerwise=layerwise, **settings).run()


def convert_layerwise(
    model: Any,
    recipe: Any,
    kv_ratio: float,
    out: Any,
    *,
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> Any:
    task = conversion(model, recipe, kv_ratio, out, layerwise=True, **settings)
    task.log = progress or task.log
    return task.run()


def convert_curve(model: Any, recipe: Any, kv_ratios: Sequence[float], out: Any = None, **settings: Any) -> Any:
    return conversion(model, recipe, kv_ratios, out, **settings).run()


def open_store(model: Any, recipe: Any, kv_ratios: Sequence[float], **settings: Any) -> MemoryStore:
    return MemoryStore(conversion(model, recipe, kv_ratios, **settings).request)


def estimate_conversion(model: Any, recipe: Any, kv_ratio: float, **settings: Any) -> ConversionEstimate:
    (result,) = estimate_conversions(conversion(model, recipe, kv_ratio, config_only=True, **settings).request)
    return result


def needs_layerwise(model: Any, recipe: Any, kv_ratio: float, out: Path, **settings: Any) -> bool:
    return conversion(model, recipe, kv_ratio, out, **settings).estimate.layerwise


def announce(model: Any, recipe: Any, kv_ratios: Any, out: Any, **settings: Any) -> None:
    conversion(model, recipe, kv_ratios, out, **settings).estimate.announce()


def inspect_checkpoint(
    checkpoint: Any, *, kv_ratios: Any = (0.5, 0.25), recipe_settings: Any = None, **settings: Any
) -> Any:
    options = {"checkpoint": checkpoint, "kv_ratio": kv_ratios, "overrides": recipe_settings}
    return Inspect(InspectOptions(**options, **settings)).run()


def evaluate_checkpoint(checkpoint: Any, original: Any = None, **settings: Any) -> Any:
    return Evaluate(EvaluateOptions(checkpoint=checkpoint, original=original, **settings)).run()


def export_checkpoint(checkpoint: Any, target: str, out: Any, **settings: Any) -> Any:
    return export.export_checkpoint(ExportOptions(checkpoint=checkpoint, target=target, out=out, **settings))


def check_training_from_scratch(architecture: Any, out: Any, **settings: Any) -> ScratchRequest:
    return Train(TrainOptions(architecture=architecture, out=out, **settings)).request


def train_from_scratch(architecture: Any, out: Any, *, progress: Callable[[str], None] = print, **settings: Any) -> Any:
    task = Train(TrainOptions(architecture=architecture, out=out, **settings))
    task.log = progress
    return task.run()


def check_finetuning(model: Any, out: Any, **settings: Any) -> FinetuneRequest:
    return Finetune(FinetuneOptions(model=model, out=out, **settings)).request


def finetune_checkpoint(model: Any, out: Any, *, progress: Callable[[str], None] = print, **settings: Any) -> Any:
    task = Finetune(FinetuneOptions(model=model, out=out, **settings))
    task.log = progress
    return task.run()


def rehearse_evaluation(checkpoint: Any, original: Any = None, **settings: Any) -> Any:
    task = Evaluate(EvaluateOptions(checkpoint=checkpoint, original=original, **settings), rehearsal=True)
    task.check()
    (words,) = task.rehearse()
    return words
