"""Recipes: JSON, overrides, and combinations that are refused with a reason."""

from __future__ import annotations

import json
import pickle

import pytest

from search_spaces.recipes.catalogue import RECIPES, Recipe, RecipeError, recipe


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_json_round_trip_and_pickle(name: str) -> None:
    original = RECIPES[name]
    again = Recipe.from_dict(json.loads(json.dumps(original.to_dict())))
    assert again == original and hash(again) == hash(original)
    assert pickle.loads(pickle.dumps(original)) == original
    assert original.source


def test_the_named_recipes() -> None:
    papers = {"gqa", "mqa", "asymgqa", "align", "directshare", "postshare"}
    assert set(RECIPES) >= papers | {"least_squares", "headfold_gqa", "headfold"}


def test_faithful_settings_of_the_walk() -> None:
    """AsymGQA, sec. 3.1: n = 10, p_accept = p_reset = .1, p_preserve = .2, k = 3."""
    knobs = recipe("asymgqa").knobs("grouping")
    assert knobs == {"iterations": 10, "accept": 0.1, "reset": 0.1, "preserve": 0.2, "neighbours": 3}
    assert not recipe("asymgqa").together


def test_settings_are_completed_and_order_does_not_matter() -> None:
    a = Recipe("x", grouping="exact", objective="pairs", similarity="cka", settings=(("grouping.equal_sizes", False),))
    assert a.knobs("grouping") == {"equal_sizes": False}
    b = recipe("asymgqa", settings={"grouping.accept": 0.5, "grouping.reset": 0.0})
    c = recipe("asymgqa", **{"grouping.reset": 0.0, "grouping.accept": 0.5})
    assert b == c and b.digest == c.digest != recipe("asymgqa").digest


def test_overrides_drop_what_the_new_choice_does_not_use() -> None:
    plain = recipe("asymgqa", grouping="neighbour")
    assert plain.objective is None and plain.similarity is None and plain.knobs("grouping") == {"equal_sizes": True}
    symmetric = recipe("asymgqa", grouping="walk_symmetric")
    assert "preserve" not in symmetric.knobs("grouping")
    assert symmetric.objective == "layer"
    mean = recipe("align", alignment="none")
    assert not mean.knobs("alignment") and mean.similarity == "aligned"


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("least_squares", {"alignment": "procrustes"}, ["alignment=procrustes", "pointless", "must be none"]),
        ("least_squares", {"objective": "layer"}, ["additive", "objective=layer"]),
        ("gqa", {"objective": "pairs"}, ["neighbour", "scores nothing"]),
        ("gqa", {"grouping": "exact"}, ["needs an objective", "least_squares"]),
        ("align", {"similarity": None}, ["needs a similarity", "activation"]),
        ("least_squares", {"similarity": "cka"}, ["uses no similarity", "cka"]),
        ("gqa", {"allocation": "dha"}, ["dha", "group cost"]),
        ("least_squares", {"allocation": "knapsack"}, ["knapsack", "together to false"]),
        ("gqa", {"fusion": "median"}, ["fusion", "median", "least_squares"]),
        ("gqa", {"by": "query"}, ["by must be one of", "query"]),
        ("gqa", {"together": "yes"}, ["together", "yes"]),
        ("gqa", {"flavour": 1}, ["flavour", "grouping"]),
        ("asymgqa", {"grouping.accept": 2.0}, ["accept", "[0.0, 1.0]", "2.0"]),
        ("asymgqa", {"grouping.speed": 2}, ["speed"]),
        ("gqa", {"grouping.accept": 0.1}, ["grouping", "accept"]),
        ("dha", {"relaxation.regroup_steps": 5}, ["regroup_steps=5", "relaxation.halving"]),
        ("dha", {"grouping.start_temperature": 0.001}, ["start_temperature", "more than", "0.001"]),
        ("dcformer", {"composition.gate": False, "composition.projection": False}, ["composition", "gate must be on"]),
    ],
)
def test_impossible_recipes_say_why(name: str, overrides: dict, words: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        recipe(name, **overrides)
    for word in words:
        assert word in str(error.value)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(RecipeError, match="align.*headfold"):
        recipe("dhaa")


@pytest.mark.parametrize("record", [{"grouping": "exact"}, {"name": "x", "colour": 1}, {"name": "x", "settings": 3}])
def test_a_bad_record_is_a_recipe_error(record: dict) -> None:
    with pytest.raises(RecipeError):
        Recipe.from_dict(record)


def test_equal_groups() -> None:
    assert recipe("gqa").equal_groups and recipe("headfold_gqa").equal_groups and recipe("align").equal_groups
    assert not recipe("asymgqa").equal_groups
    assert not recipe("least_squares", **{"grouping.equal_sizes": False}).equal_groups
