"""The named recipes: which there are, which suits a checkpoint, and the verb that lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import runner
from orchestrator.config import options

if TYPE_CHECKING:
    pass


def recipes(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder with config.json, a GGUF file, or hub name (default: a Llama)."),
    ] = None,
    engine: options.Engine = None,
    json: options.JsonFile = None,
    dequantize: options.Dequantize = False,
) -> None:
    """List the recipes: what each does, its paper, what it costs, and which engines load it."""
    from transformers import LlamaConfig

    from attention.families import geometry_of
    from orchestrator import checkpoints
    from orchestrator.storage.outputs import check_results
    from search_spaces.recipes import choice
    from search_spaces.recipes.bibliography import PAPERS
    from search_spaces.recipes.catalogue import NAMED_RECIPES

    check_results(json)
    if model is None:
        config = LlamaConfig()
        geometry = geometry_of(config)
    else:
        model = checkpoints.resolve_model(model, dequantize=dequantize, weights=False)
        opened = checkpoints.open_checkpoint(model, weights=False)
        geometry, config = opened.geometry, opened.config
    chosen = choice.choose_recipe(config, geometry, engine and choice.engine_name(engine))
    rows: list[dict[str, Any]] = []
    for named in NAMED_RECIPES:
        engines = choice.engines_of(named.recipe, chosen.forms)
        rows.append(
            {
                "name": named.recipe.name,
                "summary": named.summary,
                "papers": [PAPERS[key].citation for key in named.papers],
                "cost": named.cost,
                "engines": list(engines),
            }
        )
    for row in rows:
        mark = " (auto)" if row["name"] == chosen.recipe else ""
        print(f"{row['name']}{mark}")
        print(f"    {row['summary']}")
        for paper in row["papers"]:
            print(f"    paper: {paper}")
        print(f"    cost: {row['cost']}")
        loads = ", ".join(choice.ENGINE_NAMES[name] for name in row["engines"])
        print(f"    loads in: {loads or 'Headfold alone'}")
    of = geometry.family if model is None else f"{model} ({geometry.family})"
    print(f"\nFor {of}, --recipe auto takes {chosen.recipe}: {chosen.reason}.")
    runner.finish({"model": model, "family": geometry.family, "auto": chosen.recipe, "recipes": rows}, json)
