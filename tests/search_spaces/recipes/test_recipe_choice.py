"""`auto`: the recipe that suits a checkpoint, by what the engines load of its family."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma2Config,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    Qwen3Config,
)

from attention.families import families, geometry_of
from attention.io.targets import TargetError, target
from attention.plan import AttentionPlan, LayerPlan
from search_spaces.planning.budgets import nearest_budget
from search_spaces.recipes.bibliography import PAPERS
from search_spaces.recipes.catalogue import NAMED_RECIPES, RECIPES, recipe
from search_spaces.recipes.choice import ENGINE_TARGETS, choose_recipe, engine_forms, engine_name, limited_geometry
from search_spaces.recipes.recipe import RecipeError
from search_spaces.recipes.rules import refused_by_family

LLAMA = LlamaConfig()
QWEN3 = Qwen3Config(tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("config", "engine", "name"),
    [
        (LLAMA, None, "headfold_layers"),
        (LLAMA, "vllm", "headfold_layers"),
        (LLAMA, "llama.cpp", "headfold_layers"),
        (LLAMA, "transformers", "headfold"),
        (QWEN3, None, "headfold_gqa"),
        (Qwen3Config(tie_word_embeddings=True), None, "headfold_layers"),
        (Qwen3Config(tie_word_embeddings=True), "llama.cpp", "headfold_layers"),
        (GraniteConfig(), None, "headfold_layers"),
        (Gemma2Config(), "transformers", "headfold_layers"),
        (Gemma2Config(), "vllm", "headfold_gqa"),
        (GPT2Config(), None, "headfold"),
    ],
)
def test_auto_takes_the_best_recipe_that_the_engine_loads(config: Any, engine: str | None, name: str) -> None:
    assert choose_recipe(config, geometry_of(config), engine).recipe == name


CONFIGS = {"glm4_moe": {"head_dim": 128}}
"""Fields of families whose config, without any, is of no model: GLM-4.5's 96 heads would have 42 dims."""


@pytest.mark.parametrize("family", sorted(families()))
def test_every_family_has_a_recipe_and_its_engines_hold_it(family: str) -> None:
    config = families()[family].config_class(**CONFIGS.get(family, {}))
    geometry = geometry_of(config)
    choice = choose_recipe(config, geometry)
    halves = tuple(head // 2 for head in range(geometry.num_heads))
    plan = AttentionPlan((LayerPlan(halves, halves),) * geometry.num_layers, geometry.head_dim)
    for engine in choice.engines:
        bytes_per_token = set()
        for name in ENGINE_TARGETS[engine]:
            with suppress(TargetError):
                bytes_per_token.add(target(name).support_for(config, plan).bytes_per_token("float16"))
        assert plan.kv_bytes_per_token("float16") in bytes_per_token


def test_choices_that_a_checkpoint_cannot_have_are_refused_by_its_config() -> None:
    composed = recipe("dcformer", **{"composition.groups": 3})
    assert refused_by_family(composed.to_dict(), geometry_of(LLAMA)) == [
        "composition.groups must divide the 32 query heads, got 3"
    ]
    wide = recipe("headfold_gqa", width=2).to_dict()
    assert not refused_by_family(wide, geometry_of(LLAMA))
    assert "values pass a norm" in refused_by_family(wide, geometry_of(Gemma4TextConfig()))[0]


@pytest.mark.parametrize(("engine", "budget"), [("llama.cpp", Fraction(1, 4)), ("transformers", Fraction(6, 16))])
def test_counts_are_those_that_the_engine_holds(engine: str, budget: Fraction) -> None:
    """Six of sixteen heads are groups of three and of two, which llama.cpp does not hold of this family."""
    config = GPTNeoXConfig(num_attention_heads=16, hidden_size=1024)
    geometry, chosen = geometry_of(config), recipe("headfold_gqa")
    limited = limited_geometry(chosen, geometry, [engine_forms(config, geometry)[engine]])
    assert nearest_budget(chosen, 0.4, limited) == budget


def test_an_engine_that_holds_no_grouped_heads_is_refused_with_the_reason() -> None:
    config = GPT2Config()
    with pytest.raises(RecipeError, match=r"no recipe suits vLLM: target vllm holds"):
        choose_recipe(config, geometry_of(config), "vllm")


def test_engines_have_the_names_that_people_write() -> None:
    assert [engine_name(n) for n in ("vLLM", "gguf", "hf")] == ["vllm", "llama.cpp", "transformers"]
    with pytest.raises(RecipeError, match=r"got 'vlm' \(did you mean vllm\?\)"):
        engine_name("vlm")


def test_each_recipe_says_what_it_is_what_it_costs_and_where_it_comes_from() -> None:
    assert [named.recipe.name for named in NAMED_RECIPES] == list(RECIPES)
    for named in NAMED_RECIPES:
        assert named.summary.endswith(".")
        assert named.cost
        assert set(named.papers) <= set(PAPERS)
        assert bool(named.papers) != named.recipe.source.startswith("ours")
    assert {key for named in NAMED_RECIPES for key in named.papers} == set(PAPERS)
    assert len({paper.arxiv for paper in PAPERS.values()}) == len(PAPERS)


def test_the_bibliography_of_the_documents_has_the_same_titles_and_numbers() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "methods.md").read_text(encoding="utf-8")
    for paper in PAPERS.values():
        assert f"| {paper.title} | arXiv {paper.arxiv} |" in page, paper.key
