"""Which heads of a checkpoint matter and which are alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import options


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Folder with safetensors, a GGUF file, or hub name.")],
    kv_ratio: options.KVRatios = None,
    kv_heads: options.KVHeads = None,
    kv_bytes: options.KVBytes = None,
    strict: options.Strict = False,
    recipe: Annotated[str, typer.Option(help="Recipe whose grouping and fusion the single places get.")] = "headfold",
    compare: Annotated[
        str | None, typer.Option(help="Recipes to convert by (default: gqa,headfold), or 'none'.")
    ] = None,
    counts: Annotated[
        str | None,
        typer.Option(help="Head counts to measure: any, powers_of_two or divisors (default: the recipe's)."),
    ] = None,
    agreement: Annotated[
        bool, typer.Option("--agreement", help="Also compare the layer-output score's ranks with the whole model's.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("inspection.html"),
    overrides: options.Overrides = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder where measurements are kept (default: in the user's cache).")
    ] = None,
    json: options.JsonFile = None,
    calibration_data: options.CalibrationData = None,
    eval_data: options.EvalData = None,
    text_field: options.TextField = "text",
    calibration_tokens: options.CalibrationTokens = None,
    eval_tokens: options.EvalTokens = None,
    sequence_length: options.SequenceLength = None,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    dequantize: options.Dequantize = False,
) -> None:
    """Show which heads matter, and what recipes cost: one page. Also which are alike, and what each layer keeps."""
    from orchestrator.checkpoints import resolve_model
    from orchestrator.conversion.inspection import COMPARED, inspect_checkpoint
    from orchestrator.conversion.request import asked_ratios, unit_of
    from orchestrator.reporting.inspection_tables import print_inspection
    from orchestrator.reporting.pages.inspection_page import build_page
    from orchestrator.storage.outputs import check_results, write_page

    check_results(json, page=out)
    checkpoint = resolve_model(checkpoint, dequantize=dequantize, key="checkpoint")
    options.advise_text(calibration_data, eval_data)
    names = COMPARED if compare is None else [name.strip() for name in compare.split(",") if name.strip() != "none"]
    record = inspect_checkpoint(
        checkpoint,
        kv_ratios=asked_ratios(
            checkpoint, kv_ratio, kv_heads, kv_bytes, dtype=dtype, default=(0.5, 0.25), key="checkpoint"
        ),
        strict=strict,
        unit=unit_of(kv_heads, kv_bytes),
        recipe=recipe,
        compare=names,
        counts=counts,
        agreement=agreement,
        recipe_settings=options.recipe_settings(overrides),
        cache_dir=cache,
        calibration_data=calibration_data,
        eval_data=eval_data,
        text_field=text_field,
        calibration_tokens=calibration_tokens,
        eval_tokens=eval_tokens,
        sequence_length=sequence_length,
        seed=seed,
        dtype=dtype,
        device=device,
    )
    print_inspection(record)
    print(f"page: {write_page(out, build_page(record))}")
    options.finish(record, json)
