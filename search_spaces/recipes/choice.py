"""Which recipe suits a checkpoint.

Which plans of the named recipes each engine supports, and the best recipe for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attention.base.messages import one_of
from attention.geometry import HeadGeometry
from search_spaces.recipes.catalogue import RECIPES
from search_spaces.recipes.engine_form import EngineForm
from search_spaces.recipes.recipe import Recipe, RecipeError

AUTO_RECIPE = "auto"
# By loss at equal bytes, docs/papers.md.
BEST_FIRST = ("headfold", "headfold_layers", "headfold_gqa")
ENGINE_TARGETS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm",),
    "llama.cpp": ("gguf",),
    "transformers": ("transformers", "per_layer", "gqa"),
}
"""Engines, and the export targets that they load, the one that holds most plans first."""

ENGINE_NAMES = {"vllm": "vLLM", "llama.cpp": "llama.cpp", "transformers": "transformers"}
SERVERS = ("vllm", "llama.cpp")  # what a recipe is chosen for where no engine is named


@dataclass(frozen=True)
class RecipeChoice:
    """The recipe that suits a checkpoint, the engines that load its results, and why it was taken.

    Attributes:
        forms: What each engine holds of the family (`engine_forms`).
    """

    recipe: str
    engines: tuple[str, ...]
    reason: str
    forms: Mapping[str, list[EngineForm]] = field(repr=False)


def engine_name(name: str) -> str:
    """Return the engine of a name as people write it. Raises RecipeError for an unknown one."""
    plain = {"gguf": "llama.cpp", "llamacpp": "llama.cpp", "hf": "transformers"}.get(
        name.lower(), name.lower()
    )
    if plain not in ENGINE_TARGETS:
        raise RecipeError(one_of("engine", ENGINE_TARGETS, name))
    return plain


def engine_forms(config: Any, geometry: HeadGeometry) -> dict[str, list[EngineForm]]:
    """Return what each engine holds of a family, one form per export target that it loads."""
    return {
        engine: [EngineForm.of(target, config, geometry) for target in targets]
        for engine, targets in ENGINE_TARGETS.items()
    }


def refusals(recipe: Recipe, forms: list[EngineForm]) -> list[str]:
    """Return why an engine cannot hold the plans of a recipe at their own bytes; empty if it can.

    Args:
        forms: Of the export targets that it loads; the reasons are those of the first one.
    """
    reasons = [form.refusals(vars(recipe), equal_groups=recipe.equal_groups) for form in forms]
    return min(reasons, key=bool)


def limited_geometry(
    recipe: Recipe, geometry: HeadGeometry, engines: Iterable[list[EngineForm]]
) -> HeadGeometry:
    """Return the geometry with the head counts that all of these engines hold of a recipe.

    Args:
        recipe: The recipe.
        geometry: Of the checkpoint.
        engines: Of each engine the forms of the export targets that it loads.
    """
    for forms in engines:
        holding = [
            form
            for form in forms
            if not form.refusals(vars(recipe), equal_groups=recipe.equal_groups)
        ]
        if holding and not any(form.limited(geometry) == geometry for form in holding):
            geometry = holding[0].limited(geometry)
    return geometry


def engines_of(recipe: Recipe, forms: Mapping[str, list[EngineForm]]) -> tuple[str, ...]:
    """Return the engines that hold all plans of a recipe at their own bytes."""
    return tuple(engine for engine in forms if not refusals(recipe, forms[engine]))


def choose_recipe(config: Any, geometry: HeadGeometry, engine: str | None = None) -> RecipeChoice:
    """Return the best recipe for a checkpoint, by the order of `BEST_FIRST`.

    With `engine` the first that it holds; else the first that all servers hold which hold any, so
    that the result is not tied to one of them. A family that no engine holds in groups gets the
    best recipe in Headfold's own format.

    Raises:
        RecipeError: Where the named engine holds none.
    """
    forms = engine_forms(config, geometry)
    engines = {name: engines_of(RECIPES[name], forms) for name in BEST_FIRST}
    if engine is not None:
        for name in BEST_FIRST:
            if engine in engines[name]:
                return RecipeChoice(
                    name, engines[name], f"the best that {ENGINE_NAMES[engine]} loads", forms
                )
        reason = refusals(RECIPES[BEST_FIRST[-1]], forms[engine])[0]
        raise RecipeError(f"no recipe suits {ENGINE_NAMES[engine]}: {reason}")
    servers = [server for server in SERVERS if any(server in names for names in engines.values())]
    for name in BEST_FIRST:
        if servers and all(server in engines[name] for server in servers):
            loads = " and ".join(ENGINE_NAMES[server] for server in servers)
            return RecipeChoice(
                name, engines[name], f"the best that {loads} load{'s' * (len(servers) == 1)}", forms
            )
    for name in BEST_FIRST:
        if engines[name]:
            return RecipeChoice(
                name, engines[name], f"the best that {ENGINE_NAMES[engines[name][0]]} loads", forms
            )
    return RecipeChoice(
        BEST_FIRST[0],
        (),
        f"no engine loads grouped heads of the {geometry.family} family, so the best is taken",
        forms,
    )
