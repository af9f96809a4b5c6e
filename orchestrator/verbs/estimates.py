"""What work will take, before it is done."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.verbs.options import SIZES, JsonFile, Overrides, finish, recipe_settings, with_options

OF_SEARCH = "a search: headfold estimate CONFIG [KEY=VALUE]..."
OF_CONVERSION = "a conversion: headfold estimate --model M --recipe R --kv-ratio X"


@with_options(*SIZES)
def estimate(
    search: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="Of a search: its YAML file and changes to it."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The same YAML file.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Of a conversion: folder with config.json, or hub name; no weights are read.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Named recipe, e.g. gqa, asymgqa, align, headfold.")] = None,
    kv_ratio: Annotated[
        float | None, typer.Option(help="Share of the KV cache of multi-head attention to keep, in (0, 1].")
    ] = None,
    overrides: Overrides = None,
    json: JsonFile = None,
    *,
    options: dict[str, Any],
) -> None:
    """Say what a search or a conversion will take before it runs: tokens, hours, peak memory, disk."""
    from orchestrator.config import ConfigError

    given = list(search or [])
    if config is None and given and "=" not in given[0]:
        config = Path(given.pop(0))
    if config is not None:
        if model or recipe or kv_ratio:
            raise ConfigError(f"estimate: expected one of two, {OF_SEARCH}, or {OF_CONVERSION}; got parts of both")
        finish(_search(config, given), json)
        return
    if model is None or recipe is None or kv_ratio is None:
        raise ConfigError(f"estimate: expected {OF_SEARCH}, or {OF_CONVERSION}")
    from orchestrator.estimate import describe, estimate_conversion

    found = estimate_conversion(model, recipe, kv_ratio, recipe_settings=recipe_settings(overrides), **options)
    for name, value in describe(found).items():
        print(f"{name}: {value}")
    finish(found.to_dict(), json)


def _search(file: Path, changes: list[str]) -> dict[str, Any]:
    from orchestrator.config import load_config
    from orchestrator.folders import storage_path
    from orchestrator.search_estimate import describe_search, estimate_search, local_parallel

    settings = load_config(file, changes)
    found = estimate_search(settings, storage_path(settings.storage), parallel=local_parallel(settings))
    for name, value in describe_search(found, settings).items():
        print(f"{name}: {value}")
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return found.to_dict()
