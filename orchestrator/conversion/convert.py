"""`headfold convert` and `headfold export`: one checkpoint, without a cluster and without training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from attention.io.export import export
from attention.io.replacing import check_folder
from attention.io.stock_form import format_of
from orchestrator.conversion import loading
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

    `kv_ratio`: share of the checkpoint's own KV cache to keep, below 1 unless the recipe changes something else. `out`
    must be free, or with `overwrite` hold what we wrote (`attention.io.replacing.check_folder`, whose OutputError comes
    before any work). `layerwise`: hold one decoder layer at a time (`orchestrator.conversion.layer_by_layer`); None
    does so where the model would not fit in memory. Returns one record: losses and KL in nats a token, KV bytes planned
    and held, seconds by phase. Raises ConfigError, DataError or PlanError for what a user can mend, before the model is
    loaded where that can be known.
    """
    if layerwise is None:
        layerwise = out is not None and needs_layerwise(model, recipe, kv_ratio, **settings)
    if layerwise:
        return convert_layerwise(model, recipe, kv_ratio, out, overwrite=overwrite, **settings)
    if out is not None:
        check_folder(out, overwrite=overwrite, reads=[model])
    return Source.load(model, recipe, [kv_ratio], **settings).at(kv_ratio, out, overwrite=overwrite)


def export_checkpoint(
    source: str | Path, target: str, out: str | Path, *, allow_larger_cache: bool = False, overwrite: bool = False
) -> dict[str, Any]:
    """Lower a checkpoint to a stock format, its tokenizer with it. Raises ConfigError or ValueError as in `export`."""
    loading.geometry_of(str(source), key="checkpoint")
    dtype = loading.written_dtype(source)
    allowed = {"allow_larger_cache": allow_larger_cache, "overwrite": overwrite}
    made = export(source, target, out, source, dtype=loading.dtype_of(dtype), **allowed)
    return asdict(made) | format_of(out, dtype)
