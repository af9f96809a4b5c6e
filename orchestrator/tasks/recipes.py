"""`headfold recipes`: the named recipes, and the one that suits a checkpoint."""

from __future__ import annotations

from typing import TypedDict

from transformers import LlamaConfig

from attention.families import geometry_of
from orchestrator import checkpoints
from orchestrator.config.options import RecipesOptions
from orchestrator.tasks.task import Task
from search_spaces.recipes import choice
from search_spaces.recipes.bibliography import PAPERS
from search_spaces.recipes.catalogue import NAMED_RECIPES


class RecipeRow(TypedDict):
    """A named recipe."""

    name: str
    summary: str
    papers: list[str]
    cost: str
    engines: list[str]
    """Engines that load its conversion of the checkpoint."""


class RecipesRecord(TypedDict):
    """The JSON of `headfold recipes`."""

    model: str | None
    family: str
    auto: str
    """The recipe that `--recipe auto` uses."""
    recipes: list[RecipeRow]


class Recipes(Task[RecipesOptions, RecipesRecord]):
    """The list of recipes for a checkpoint; without one, for a Llama."""

    reason: str

    def check(self) -> None:
        """Check nothing: only a config is read."""

    def run(self) -> RecipesRecord:
        """Choose for the checkpoint, and list."""
        options = self.options
        if options.model is None:
            path, config = None, LlamaConfig()
            geometry = geometry_of(config)
        else:
            opened = checkpoints.open_model(
                options.model, "model", dequantize=options.dequantize, weights=False
            )
            path = opened.path
            config = opened.config
            geometry = opened.geometry
        chosen = choice.choose_recipe(
            config, geometry, options.engine and choice.engine_name(options.engine)
        )
        self.reason = chosen.reason
        rows: list[RecipeRow] = [
            {
                "name": named.recipe.name,
                "summary": named.summary,
                "papers": [PAPERS[key].citation for key in named.papers],
                "cost": named.cost,
                "engines": list(choice.engines_of(named.recipe, chosen.forms)),
            }
            for named in NAMED_RECIPES
        ]
        return {"model": path, "family": geometry.family, "auto": chosen.recipe, "recipes": rows}

    def show(self, record: RecipesRecord) -> None:
        for row in record["recipes"]:
            mark = " (auto)" if row["name"] == record["auto"] else ""
            print(f"{row['name']}{mark}")
            print(f"    {row['summary']}")
            for paper in row["papers"]:
                print(f"    paper: {paper}")
            print(f"    cost: {row['cost']}")
            loads = ", ".join(choice.ENGINE_NAMES[name] for name in row["engines"])
            print(f"    loads in: {loads or 'Headfold alone'}")
        model, family = record["model"], record["family"]
        about = family if model is None else f"{model} ({family})"
        print(f"\nFor {about}, --recipe auto takes {record['auto']}: {self.reason}.")
