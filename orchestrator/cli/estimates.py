"""What work will take, before it is done."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import options
from orchestrator.cli.recipes import chosen_recipe
from orchestrator.cli.usage import BY_COMMA, NUMBERS

if TYPE_CHECKING:
    from orchestrator.config.schema import SearchConfig

OF_SEARCH = "a search: headfold estimate CONFIG [KEY=VALUE]..."
OF_CONVERSION = "a conversion: headfold estimate --model M --kv-ratio 0.5,0.25 (or --kv-heads, --kv-bytes)"


def estimate(
    search: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="Of a search: its YAML file and changes to it."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The same YAML file.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Of a conversion: folder with config.json, a GGUF file, or hub name; no weights are read."),
    ] = None,
    recipe: options.Recipe = "auto",
    engine: options.Engine = None,
    kv_ratio: options.KVRatios = None,
    kv_heads: options.KVHeads = None,
    kv_bytes: options.KVBytes = None,
    strict: options.Strict = False,
    overrides: options.Overrides = None,
    json: options.JsonFile = None,
    calibration_tokens: options.CalibrationTokens = None,
    eval_tokens: options.EvalTokens = None,
    sequence_length: options.SequenceLength = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    dequantize: options.Dequantize = False,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of the machine that it will run on, where that is not this one.")
    ] = None,
    gpu_memory: Annotated[int | None, typer.Option(min=1, help="GiB of memory of each of them.")] = None,
) -> None:
    """Say what a search or a conversion will take. Before it runs: tokens, hours, peak memory, disk."""
    from orchestrator.config.schema import ConfigError
    from orchestrator.storage.outputs import check_results

    check_results(json)
    given = list(search or [])
    if config is None and given and "=" not in given[0]:
        config = Path(given.pop(0))
    if config is not None:
        if model or recipe != "auto" or engine or kv_ratio or kv_heads or kv_bytes:
            listed = f" ({config}); {BY_COMMA}" if NUMBERS.fullmatch(str(config)) else ""
            raise ConfigError(
                f"estimate: expected one of two, {OF_SEARCH}, or {OF_CONVERSION}; got parts of both{listed}"
            )
        from orchestrator.config.schema import read_search_config
        from orchestrator.search.validation import open_models

        of_search = open_models(read_search_config(config, given), weights=False)
        tell_search(of_search, json, gpu_memory * 2**30 if gpu_memory else None)
        return
    if model is None or not (kv_ratio or kv_heads or kv_bytes):
        raise ConfigError(f"estimate: expected {OF_SEARCH}, or {OF_CONVERSION}")
    from orchestrator.checkpoints import resolve_model
    from orchestrator.conversion.estimates.estimate import Elsewhere, describe, estimate_conversions
    from orchestrator.conversion.request import asked_ratios, unit_of

    model = resolve_model(model, dequantize=dequantize, weights=False)
    ratios = asked_ratios(model, kv_ratio, kv_heads, kv_bytes, dtype=dtype)
    recipe_settings = options.recipe_settings(overrides)
    recipe = chosen_recipe(model, recipe, engine, recipe_settings)
    settings: dict[str, Any] = {
        "calibration_tokens": calibration_tokens,
        "eval_tokens": eval_tokens,
        "sequence_length": sequence_length,
        "dtype": dtype,
        "device": device,
        "recipe_settings": recipe_settings,
        "strict": strict,
        "unit": unit_of(kv_heads, kv_bytes),
    }
    there = Elsewhere.of(device, gpus, gpu_memory)
    points = estimate_conversions(model, recipe, ratios, elsewhere=there, **settings)
    for number, point in enumerate(points):
        print("\n" * bool(number), end="")
        options.tell(describe(point))
    records = [asdict(point) for point in points]
    options.finish(records[0] if len(records) == 1 else {"points": records}, json)


def tell_search(settings: SearchConfig, json: Path | None = None, gpu_bytes: int | None = None) -> None:
    """Print what a search will take, and write it to `json` if given. `gpu_bytes`: memory of each GPU of the machine
    that it will run on. Raises ConfigError for what does not fit the GPU
    that it asks for."""
    from orchestrator.config.schema import ConfigError
    from orchestrator.search.estimate import describe_search, estimate_search, local_parallel
    from orchestrator.storage.paths import storage_path

    parallel, storage = local_parallel(settings), storage_path(settings.storage)
    estimated = estimate_search(settings, storage, parallel=parallel, gpu_bytes=gpu_bytes)
    options.tell(describe_search(estimated, settings))
    for warning in estimated.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    options.finish(asdict(estimated), json)
    if estimated.refusals:
        raise ConfigError("\n".join(estimated.refusals))
