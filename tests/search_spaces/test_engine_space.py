"""A search for an engine: every plan of the joint space is one that it holds exactly, at the plan's own bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_contexts import quick, random_context
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig, OPTConfig, PhiConfig, Qwen3Config

from attention.families import geometry_of
from attention.geometry import HeadGeometry
from attention.io.targets import TargetError, target, targets
from search_spaces.planning.budgets import check_budget
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import RECIPES, recipe
from search_spaces.recipes.engine_form import EngineForm
from search_spaces.space.joint_space import JointSpace

COUNTS = [(4, 4, 3), (8, 4, 3), (6, 3, 2)]  # query heads, KV heads, layers
FAMILIES: dict[str, Any] = {
    "gpt2": lambda heads, stored, layers: GPT2Config(n_head=heads, n_embd=8 * heads, n_layer=layers),
    "gpt_neox": lambda heads, stored, layers: GPTNeoXConfig(**_sizes(heads, layers)),
    "llama": lambda heads, stored, layers: LlamaConfig(**_sizes(heads, layers), num_key_value_heads=stored),
    "opt": lambda heads, stored, layers: OPTConfig(**_sizes(heads, layers)),
    "phi": lambda heads, stored, layers: PhiConfig(**_sizes(heads, layers), num_key_value_heads=stored),
    "qwen3": lambda heads, stored, layers: Qwen3Config(
        **_sizes(heads, layers), num_key_value_heads=stored, head_dim=8, tie_word_embeddings=False
    ),
}


def _sizes(heads: int, layers: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "hidden_size": 8 * heads, "num_hidden_layers": layers}


def config_of(family: str, heads: int, stored: int, layers: int) -> Any:
    return FAMILIES[family](heads, stored, layers)


def llama(heads: int, stored: int, layers: int) -> tuple[Any, HeadGeometry]:
    config = config_of("llama", heads, stored, layers)
    return config, geometry_of(config)


@pytest.mark.extended
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("name", sorted(set(targets()) - {"phi"}))
def test_every_plan_is_stored_at_its_own_bytes(name: str, counts: tuple[int, int, int]) -> None:
    heads, stored, layers = counts
    config, geometry = llama(*counts)
    context = random_context(heads, stored, layers, dim=geometry.head_dim)
    space = JointSpace([1 / stored, 2 / stored], geometry, engine=EngineForm.of(name, config, geometry))
    generator, seen = np.random.default_rng(0), set()
    for _ in range(20):
        drawn, ratio = space.to_recipe(space.sample(generator))
        plan = make_plan(quick(drawn, heads), ratio, context, np.random.default_rng(0))
        assert target(name).support_for(config, plan).bytes_per_token("float16") == plan.kv_bytes_per_token("float16")
        seen.add(drawn.allocation)
    one_count, by_layer = {"uniform", "single"}, {"layerwise", "knapsack", "dha"}
    assert seen & one_count
    assert (seen - one_count) <= {"gqa": set(), "transformers": by_layer}.get(name, {"layerwise"})
    assert name == "gqa" or seen & by_layer


@pytest.mark.parametrize(
    ("name", "own_counts", "own_unequal", "apart"),
    [
        ("gqa", False, False, False),
        ("vllm", True, False, False),
        ("gguf", True, True, False),
        ("transformers", True, True, True),
    ],
)
def test_what_each_target_holds_of_a_llama(name: str, own_counts: bool, own_unequal: bool, apart: bool) -> None:
    form = EngineForm.of(name, *llama(8, 8, 4))
    assert form.grouped and form.unequal and form.composed == (name == "transformers")
    assert (form.own_counts, form.own_unequal, form.apart) == (own_counts, own_unequal, apart)


@pytest.mark.extended
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("name", sorted(targets()))
def test_a_recipe_is_refused_where_its_plans_are(name: str, family: str) -> None:
    """A target's support of a recipe, against its support of the recipe's own plan."""
    config = config_of(family, 8, 8, 4)
    geometry = geometry_of(config)
    context, form = random_context(8, 8, 4, dim=geometry.head_dim), EngineForm.of(name, config, geometry)
    for known in ("gqa", "least_squares", "headfold_wide", "headfold_layers", "headfold", "asymgqa"):
        chosen = recipe(known)
        if chosen.objective == "layer":
            chosen = recipe(
                known, objective="pairs", similarity="weight", grouping="merge", **{"grouping.equal_sizes": False}
            )
        plan = make_plan(chosen, 0.5, context, np.random.default_rng(0))
        if not form.refusals(chosen.to_dict(), equal_groups=chosen.equal_groups):
            support = target(name).support_for(config, plan)
            assert support.bytes_per_token("float16") == plan.kv_bytes_per_token("float16")
            continue
        try:
            support = target(name).support_for(config, plan)
        except TargetError:
            continue
        # Refused for what such plans may be; this one may be a plain one by chance
        assert support.bytes_per_token("float16") >= plan.kv_bytes_per_token("float16")


def test_what_is_refused_says_why_and_the_space_is_never_empty() -> None:
    config, geometry = llama(8, 8, 4)
    form = EngineForm.of("vllm", config, geometry)
    chosen = RECIPES["headfold"]
    (reason,) = form.refusals(chosen.to_dict(), equal_groups=chosen.equal_groups)
    assert "stores a key head with each value head, so together must be true, got false" in reason
    unequal = recipe("headfold_layers", **{"grouping.equal_sizes": False})
    (reason,) = form.refusals(unequal.to_dict(), equal_groups=unequal.equal_groups)
    assert "no groups of unequal size with a different count in each layer" in reason
    stock = EngineForm.of("gqa", config, geometry)
    with pytest.raises(ValueError, match="allocation must be uniform, got layerwise"):
        JointSpace([0.5], geometry, choices={"allocation": ["layerwise"]}, engine=stock)
    with pytest.raises(ValueError, match="target must be one of.*did you mean vllm"):
        EngineForm.of("vlm", config, geometry)
    assert check_budget(recipe("headfold_layers"), 0.5, geometry) is None
