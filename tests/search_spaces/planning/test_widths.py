"""Plans of heads wider than the checkpoint's: budgets in its heads, and what no plan can be."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from random_contexts import random_context

from attention.families import geometry_of
from attention.plan import AttentionPlan, LayerPlan
from attention.ratios import own_heads
from search_spaces.planning.budgets import admissible_counts, nearest_budget, possible_totals
from search_spaces.planning.planner import PlanningContext, make_plan
from search_spaces.planning.widths import widest, with_width
from search_spaces.recipes.catalogue import RECIPES, recipe
from search_spaces.recipes.recipe import WIDEST, Recipe, RecipeError
from search_spaces.space.joint_space import JointSpace

WIDE = recipe("headfold_wide", refinement="none")
ONE = (0,) * 8


def planned(chosen: Recipe, ratio: float | Fraction, context: PlanningContext) -> AttentionPlan:
    return make_plan(chosen, ratio, context, np.random.default_rng(0))


@pytest.mark.parametrize("count", range(1, 8))
def test_the_widest_heads_that_a_count_makes(count: int) -> None:
    """Eight KV heads: all bytes in one head, which every query head reads."""
    context = random_context(8, 8, 2)
    plan = planned(WIDE, Fraction(count, 8), context)
    assert plan.layers == (LayerPlan(ONE, ONE, count, count),) * 2
    assert plan.kv_heads == 2 * 2 * count


@pytest.mark.extended
def test_no_head_is_wider_than_kernels_take() -> None:
    """Heads of 128: two side by side make 256, so that four of them are two groups."""
    context = random_context(8, 8, 1, dim=128, width=16)
    assert [widest(count, context.geometry) for count in range(1, 8)] == [1, 2, 1, 2, 1, 2, 1]
    (layer,) = planned(WIDE, 0.5, context).layers
    assert layer.widths == (2, 2) and layer.key_heads == 2 and layer.key_map == layer.value_map
    assert {len(group) for group in layer.key_groups} == {4}


def test_a_ratio_is_a_ceiling_in_heads_of_the_checkpoint() -> None:
    context = random_context(9, 3, 3)
    chosen = recipe("headfold_wide", width=2)
    assert admissible_counts(chosen, context.geometry) == (2,)
    assert nearest_budget(WIDE, 0.7, context.geometry) == Fraction(2, 3)
    assert list(possible_totals(WIDE, context.geometry)) == [6, 12, 18]
    assert planned(WIDE, Fraction(2, 3), context).layers[0].widths == (2, 2)
    assert planned(WIDE, Fraction(1, 3), context).layers[0].widths == (1, 1)


def test_counts_of_each_layer(make_context) -> None:
    """Four KV heads and a width of two: layers of one head and of two, which hold all."""
    context = make_context()
    chosen = recipe("headfold_layers", width=2, refinement="none", **{"allocation.tokens": 48})
    plan = planned(chosen, 0.75, context)
    counts = [layer.key_slices for layer in plan.layers]
    assert sorted(counts) == [2, 4] and {layer.widths for layer in plan.layers} == {(2, 2)}
    assert plan.kv_heads == 0.75 * own_heads(context.geometry)


def test_keys_under_a_norm_stay_as_wide_as_they_are(make_context) -> None:
    context = make_context("qwen3")
    plan = planned(WIDE, 0.5, context)
    for layer in plan.layers:
        assert layer.widths == (1, 2)
        assert (layer.key_heads, layer.value_heads) == (2, 1)
    assert with_width(WIDE, 0.5, context.geometry).together is False


def test_what_cannot_be_combined() -> None:
    for changes, reason in (
        ({"fusion": "mean"}, "fusion=least_squares alone"),
        ({"allocation": "layerwise"}, "give allocation=layerwise a number"),
        ({"allocation": "single"}, "allocation=uniform, where every layer has one count"),
        ({"composition": "dcmha", "width": 2}, "composes heads of the checkpoint's width"),
        ({"width": 0}, "at least 1, or 'widest', got 0"),
        ({"width": "wide"}, "got 'wide'"),
    ):
        with pytest.raises(RecipeError, match=reason):
            recipe("headfold_wide", **changes)


def test_recipes_of_width_one_have_the_digests_that_they_had() -> None:
    """Records of earlier searches are still valid."""
    assert RECIPES["headfold_gqa"].digest == "1f74fda50872b64e"
    assert "width" not in RECIPES["headfold_gqa"].to_dict()
    wide = RECIPES["headfold_wide"]
    assert Recipe.from_dict(wide.to_dict()) == wide and wide.width == WIDEST


def test_the_joint_space_has_widths_where_they_are_requested(tiny_model) -> None:
    geometry = geometry_of(tiny_model("llama").config)
    generator = np.random.default_rng(0)

    def widths(**choices: list[object]) -> set[object]:
        space = JointSpace([0.5], geometry, choices=choices)
        return {space.to_recipe(space.sample(generator))[0].width for _ in range(60)}

    assert widths() == {1}
    wide = widths(width=[1, 2, WIDEST], fusion=["least_squares", "mean"])
    assert wide == {1, 2, WIDEST}
    with pytest.raises(ValueError, match="width must be among"):
        JointSpace([0.5], geometry, choices={"width": [9]})
