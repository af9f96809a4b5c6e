"""Which heads of a checkpoint matter and which are alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.verbs.options import CALIBRATED, JsonFile, Overrides, finish, recipe_settings, with_options


@with_options(*CALIBRATED)
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Folder with safetensors, or hub name.")],
    kv_ratio: Annotated[str, typer.Option(help="Budgets to lay out, e.g. 0.5,0.25.")] = "0.5,0.25",
    recipe: Annotated[str, typer.Option(help="Recipe whose grouping and fusion the single places get.")] = "headfold",
    compare: Annotated[
        str | None, typer.Option(help="Recipes to convert by, e.g. gqa,headfold; 'none' converts by none.")
    ] = None,
    counts: Annotated[
        str | None,
        typer.Option(help="Head counts to measure: any, powers_of_two or divisors (default: any up to 16 KV heads)."),
    ] = None,
    agreement: Annotated[
        bool, typer.Option("--agreement", help="Also compare the layer-output score's ranks with the whole model's.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("inspection.html"),
    overrides: Overrides = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder where measurements are kept (default: headfold in the user's cache).")
    ] = None,
    json: JsonFile = None,
    *,
    options: dict[str, Any],
) -> None:
    """Which heads matter and which are alike, what budgets would keep, what recipes would cost: one page."""
    from orchestrator.config import ConfigError
    from orchestrator.curve import parse_ratios
    from orchestrator.inspection import COMPARED, inspect_checkpoint
    from orchestrator.inspection_page import print_inspection, write_inspection

    if out.is_dir():
        raise ConfigError(f"out: {str(out)!r} is a folder; name a file, e.g. {str(out / 'inspection.html')!r}")
    names = COMPARED if compare is None else [name.strip() for name in compare.split(",") if name.strip() != "none"]
    record = inspect_checkpoint(
        checkpoint,
        kv_ratios=parse_ratios(kv_ratio),
        recipe=recipe,
        compare=names,
        counts=counts,
        agreement=agreement,
        recipe_settings=recipe_settings(overrides),
        cache_dir=cache,
        **options,
    )
    print_inspection(record)
    print(f"page: {write_inspection(record, out)}")
    finish(record, json)
