"""`headfold convert`: one checkpoint, without a cluster and without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attention.io.replacing import check_folder
from orchestrator.conversion.estimate import needs_layerwise
from orchestrator.conversion.in_memory import Source
from orchestrator.conversion.layer_by_layer import convert_layerwise
from search_spaces.recipes.recipe import Recipe


def convert_checkpoint(
    model: str | Path,
    recipe: str | Recipe,
    kv_ratio: float,
    out: str | Path | None = None,
    *,
    layerwise: bool | None = False,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Convert, measure before and after, and save to `out` if given. `settings` are those of `ConversionRequest.check`.

    `kv_ratio`: share of the checkpoint's own KV cache to keep, below 1 unless the recipe changes something else: the
    largest plan at or below it is used, or with `strict` no other than one that meets it. `out` must be free, or with
    `overwrite` hold what we wrote (`attention.io.replacing.check_folder`, whose OutputError comes before any work).
    `layerwise`: hold one decoder layer at a time (`orchestrator.conversion.layer_by_layer`); None does so where the
    model would not fit in memory. Returns one record: losses and KL in nats a token, KV bytes planned and held,
    seconds by phase. Raises ConfigError, DataError or PlanError for what a user can mend, before the model is loaded
    where that can be known.
    """
    if layerwise is None:
        layerwise = out is not None and needs_layerwise(model, recipe, kv_ratio, **settings)
    if layerwise:
        return convert_layerwise(model, recipe, kv_ratio, out, overwrite=overwrite, **settings)
    if out is not None:
        check_folder(out, overwrite=overwrite, reads=[model])
    return Source.load(model, recipe, [kv_ratio], **settings).at(kv_ratio, out, overwrite=overwrite)
