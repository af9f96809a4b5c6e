"""Verbs of one checkpoint, without a cluster: convert, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli import options, publishing
from orchestrator.cli.recipes import chosen_recipe


def convert(
    model: Annotated[str, typer.Option(help="Folder with safetensors, a GGUF file, or hub name.")],
    recipe: options.Recipe = "auto",
    engine: options.Engine = None,
    kv_ratio: options.KVRatios = None,
    kv_heads: options.KVHeads = None,
    kv_bytes: options.KVBytes = None,
    strict: options.Strict = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the checkpoint (for several ratios: kv-RATIO in it, curve.json, curve.png)."),
    ] = None,
    overrides: options.Overrides = None,
    layerwise: Annotated[
        bool | None,
        typer.Option(
            help="Hold one decoder layer at a time, from disk to disk, and go on where it was stopped (by default "
            "where the model would not fit in memory: see the verb estimate)."
        ),
    ] = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
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
    """Convert one checkpoint, without training. Needs no cluster, and prints the loss before and after."""
    from orchestrator.checkpoints import resolve_model
    from orchestrator.config.schema import ConfigError
    from orchestrator.conversion.convert import convert_checkpoint
    from orchestrator.conversion.estimates.estimate import announce
    from orchestrator.conversion.request import asked_ratios, unit_of
    from orchestrator.conversion.several_ratios import (
        convert_curve,
        convert_into,
        is_curve,
        rehearse_conversion,
    )
    from orchestrator.reporting.evaluation_tables import increase_of, text_of
    from orchestrator.storage.outputs import check_results
    from orchestrator.storage.records import percent, unmet

    check_results(json, folder=out)
    model = resolve_model(model, dequantize=dequantize, weights=not dry_run)
    ratios = asked_ratios(model, kv_ratio, kv_heads, kv_bytes, dtype=dtype)
    recipe_settings = options.recipe_settings(overrides)
    recipe = chosen_recipe(model, recipe, engine, recipe_settings)
    if out is None and not dry_run:
        print("no --out: what is converted is measured, and nothing of it will be saved", file=sys.stderr, flush=True)
    settings: dict[str, Any] = {
        "calibration_data": calibration_data,
        "eval_data": eval_data,
        "text_field": text_field,
        "calibration_tokens": calibration_tokens,
        "eval_tokens": eval_tokens,
        "sequence_length": sequence_length,
        "seed": seed,
        "dtype": dtype,
        "device": device,
        "strict": strict,
        "unit": unit_of(kv_heads, kv_bytes),
        "recipe_settings": recipe_settings,
    }
    if layerwise and len(ratios) > 1:
        raise ConfigError("layerwise: one ratio at a time is converted layer by layer; give one --kv-ratio")
    options.advise_text(calibration_data, eval_data)
    if dry_run:
        for words in rehearse_conversion(
            model, recipe, ratios, out, layerwise=layerwise, overwrite=overwrite, **settings
        ):
            options.tell(words)
        options.rehearsed({})
        return
    announce(model, recipe, ratios, out, layerwise=layerwise, **settings)
    if len(ratios) > 1:
        record = convert_curve(model, recipe, ratios, out, overwrite=overwrite, **settings)
    elif out is not None and is_curve(out):
        record = convert_into(model, recipe, ratios[0], out, layerwise=layerwise, overwrite=overwrite, **settings)
    else:
        record = convert_checkpoint(model, recipe, ratios[0], out, layerwise=layerwise, overwrite=overwrite, **settings)
    for point in [record | point for point in record["points"]] if len(ratios) > 1 else [record]:
        print(
            f"{recipe} at {percent(point['kv_ratio'])} of the checkpoint's KV cache{unmet(point)}: held-out loss "
            f"{point['original_loss']:.3f} before, {point['loss']:.3f} after ({increase_of(point)} nats per token), "
            f"perplexity {point['original_perplexity']:.2f} before, {point['perplexity']:.2f} after, KL "
            f"{point['kl']:.3f}, on {text_of(point)}; {point['kv_bytes_per_token']} KV bytes per token, "
            f"{point['kv_bytes_per_token_original']} before"
        )
        for note in (*([point["format_note"]] if out is not None else []), *point.get("notes", ())):
            print(note)
    if out is not None:
        print(f"checkpoint: {record['out']}" if len(ratios) == 1 else f"checkpoints, curve.json and curve.png: {out}")
    options.finish(record, json)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint, converted or not; or a GGUF file.")],
    target: Annotated[
        str,
        typer.Option(help="What to export to: auto, gqa, vllm, gguf (llama.cpp), transformers, phi (for GPT-NeoX)."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the exported checkpoint.")],
    allow_larger_cache: Annotated[
        bool, typer.Option("--allow-larger-cache", help="Export even if the stock form takes more KV cache.")
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16; for gguf also q8_0.")
    ] = "auto",
    check: Annotated[
        bool, typer.Option("--check", help="Load the export in the engine itself; write it only if all is as promised.")
    ] = False,
    engine: Annotated[
        str | None, typer.Option(help="Of --check: llama.cpp, vLLM or transformers (by default the target's own).")
    ] = None,
    engine_python: Annotated[
        str | None, typer.Option(help="Of --check: the Python of the environment that has the engine.")
    ] = None,
    check_memory: Annotated[
        int, typer.Option(min=1, help="Of --check: GiB of cache whose capacity in tokens is told.")
    ] = 1,
    push: publishing.Push = None,
    dry_run: publishing.DryRun = True,
    overwrite: options.Overwrite = False,
    json: options.JsonFile = None,
    dequantize: options.Dequantize = False,
) -> None:
    """Write a checkpoint in a format that engines load. Tells whether it is exact, and KV bytes before and after."""
    from orchestrator.checkpoints import resolve_model
    from orchestrator.serving.export import export_checkpoint
    from orchestrator.serving.tables import print_check
    from orchestrator.storage.outputs import check_results
    from orchestrator.storage.records import percent

    check_results(json, folder=out)
    checkpoint = Path(resolve_model(checkpoint, dequantize=dequantize, key="checkpoint"))
    allowed = {"allow_larger_cache": allow_larger_cache, "overwrite": overwrite}
    asked = {"check": check, "engine": engine, "python": engine_python, "memory": check_memory * 2**30}
    record = export_checkpoint(checkpoint, target, out, dtype=dtype, **allowed, **asked)
    original = record["kv_bytes_per_token_original"]
    print(
        f"{record['model_type']} in {out}: {'exact' if record['exact'] else 'not exact'}, largest logit difference "
        f"{record['max_logit_difference']:.2g}; KV bytes per token {record['kv_bytes_per_token_before']} before, "
        f"{record['kv_bytes_per_token_after']} after"
        + ("" if original is None else f" ({percent(record['kv_bytes_per_token_after'] / original)} of the original's)")
    )
    print(record["format_note"])
    for note in record["notes"]:
        print(f"note: {note}")
    for name, why in record["other_targets"].items():
        print(f"not {name}: {why}")
    if record["check"]:
        print_check(record["check"])
    record |= publishing.publish(checkpoint, out, record["target"], push, dry_run)
    options.finish(record, json)
