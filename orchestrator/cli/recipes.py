"""The named recipes: which there are, which suits a checkpoint, and the verb that lists them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import options

if TYPE_CHECKING:
    from orchestrator.checkpoints import Source
    from search_spaces.recipes.choice import RecipeChoice
    from search_spaces.recipes.recipe import Recipe


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
    from search_spaces.recipes.recipes import NAMED

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
    for named in NAMED:
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
    options.finish({"model": model, "family": geometry.family, "auto": chosen.recipe, "recipes": rows}, json)


def chosen_recipe(model: Source, recipe: str, engine: str | None, overrides: dict[str, Any]) -> str:
    """Return the name of the recipe to convert by, and report on stderr what `auto` stands for.

    Only config.json is read. Raises RecipeError or ConfigError where `engine` cannot hold the recipe
    with its `overrides`, and for unknown names.
    """
    from orchestrator import checkpoints
    from search_spaces.recipes import choice
    from search_spaces.recipes.recipes import recipe as named_recipe

    if recipe != choice.AUTO and engine is None:
        return recipe
    engine = engine and choice.engine_name(engine)
    named = None if recipe == choice.AUTO else named_recipe(recipe, **overrides)
    opened = checkpoints.open_checkpoint(model, weights=False)
    best = choice.choose_recipe(opened.config, opened.geometry, engine)
    if named is None:
        print(f"recipe: {best.recipe} (auto: {best.reason}; `headfold recipes` lists all)", file=sys.stderr, flush=True)
        named = named_recipe(best.recipe, **overrides)
    if engine is not None:
        _check_engine(named, engine, best)
    return named.name


def _check_engine(named: Recipe, engine: str, best: RecipeChoice) -> None:
    from orchestrator.config.parsing import ConfigError
    from search_spaces.recipes.choice import ENGINE_NAMES, refusals

    if reasons := refusals(named, best.forms[engine]):
        raise ConfigError(
            f"for: {ENGINE_NAMES[engine]} cannot load what recipe {named.name} makes of this checkpoint: {reasons[0]}; "
            f"take --recipe {best.recipe}, or leave out --for"
        )
