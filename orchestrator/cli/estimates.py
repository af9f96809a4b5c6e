"""What work will take, before it is done."""

from __future__ import annotations

import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli import runner
from orchestrator.cli.usage import BY_COMMA, NUMBERS
from orchestrator.config.options import ConvertOptions, EstimateOptions

if TYPE_CHECKING:
    from orchestrator.config.schema import SearchConfig

OF_SEARCH = "a search: headfold estimate CONFIG [KEY=VALUE]..."
OF_CONVERSION = "a conversion: headfold estimate --model M --kv-ratio 0.5,0.25 (or --kv-heads, --kv-bytes)"


def estimate(given: EstimateOptions, json: Path | None) -> None:
    """Estimate a search or a conversion, and print what it will take."""
    from orchestrator.config.schema import ConfigError
    from orchestrator.storage.outputs import check_results

    check_results(json)
    config, changes = given.config, list(given.search or [])
    if config is None and changes and "=" not in changes[0]:
        config = Path(changes.pop(0))
    if config is not None:
        of_conversion = (given.model, given.engine, given.kv_ratio, given.kv_heads, given.kv_bytes)
        if any(of_conversion) or given.recipe != "auto":
            listed = f" ({config}); {BY_COMMA}" if NUMBERS.fullmatch(str(config)) else ""
            raise ConfigError(
                f"estimate: expected one of two, {OF_SEARCH}, or {OF_CONVERSION}; got parts of both{listed}"
            )
        from orchestrator.config.schema import read_search_config
        from orchestrator.search.validation import open_models

        of_search = open_models(read_search_config(config, changes), weights=False)
        tell_search(of_search, json, given.gpu_memory * 2**30 if given.gpu_memory else None)
        return
    if given.model is None or not (given.kv_ratio or given.kv_heads or given.kv_bytes):
        raise ConfigError(f"estimate: expected {OF_SEARCH}, or {OF_CONVERSION}")
    from orchestrator.conversion.estimate import estimate_conversions
    from orchestrator.resources.estimate import Machine
    from orchestrator.tasks.convert import Convert

    elsewhere = Machine.named(given.device, given.gpus, given.gpu_memory)
    shared = {field.name: getattr(given, field.name) for field in fields(ConvertOptions) if hasattr(given, field.name)}
    options = ConvertOptions(**shared)
    if elsewhere is not None:
        options = replace(options, device="cpu")  # whose checks pass anywhere
    points = estimate_conversions(Convert(options, config_only=True).request, elsewhere=elsewhere)
    for number, point in enumerate(points):
        print("\n" * bool(number), end="")
        runner.tell(point.describe())
    records = [asdict(point) for point in points]
    runner.finish(records[0] if len(records) == 1 else {"points": records}, json)


def tell_search(settings: SearchConfig, json: Path | None = None, gpu_bytes: int | None = None) -> None:
    """Print what a search will take, and write it to `json` if given. `gpu_bytes`: memory of each GPU of the machine
    that it will run on. Raises ConfigError for what does not fit the GPU
    that it asks for."""
    from orchestrator.config.schema import ConfigError
    from orchestrator.search.estimate import estimate_search, local_parallel
    from orchestrator.storage.paths import storage_path

    parallel, storage = local_parallel(settings), storage_path(settings.storage)
    estimated = estimate_search(settings, storage, parallel=parallel, gpu_bytes=gpu_bytes)
    runner.tell(estimated.describe(settings))
    for warning in estimated.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    runner.finish(estimated.record(), json)
    if estimated.refusals:
        raise ConfigError("\n".join(estimated.refusals))
