"""A KV ratio is a ceiling: the largest budget at or below it that a recipe can keep."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.geometry import HeadGeometry, RotaryLayout
from attention.ratios import ceiling_note, own_heads
from search_spaces.allocation.knapsack import reachable, usual_counts
from search_spaces.planning.budgets import BelowLeast, admissible_counts, check_budget, nearest_budget
from search_spaces.recipes.catalogue import RECIPES, recipe

NAMES = sorted(name for name, known in RECIPES.items() if known.sharing == "none")


def geometry_of(heads: int, stored: int, layers: int, *, pads: bool = True) -> HeadGeometry:
    rotary = RotaryLayout(64, 64)
    biases = (False, False, False, False, False)
    return HeadGeometry("llama", layers, 1024, heads, stored, 64, rotary, *biases, 2048, 1000, pads_queries=pads)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), name=st.sampled_from(NAMES), pads=st.booleans())
def test_the_largest_budget_at_or_below(data: st.DataObject, name: str, pads: bool) -> None:
    """At most what is requested, the same when it is requested itself, and nothing between the two can be met."""
    stored, layers = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    geometry = geometry_of(stored * data.draw(st.integers(1, 4)), stored, layers, pads=pads)
    heads, requested = own_heads(geometry), data.draw(st.integers(1, 99)) / 100
    between = range(1, int(requested * heads + 1e-6) + 1)
    try:
        used = nearest_budget(RECIPES[name], requested, geometry)
    except ValueError as error:
        used = Fraction(0)
        assert stored == 1 or isinstance(error, BelowLeast) or "can meet no kv_ratio" in str(error)
    else:
        assert used <= requested + 1e-6
        assert nearest_budget(RECIPES[name], float(used), geometry) == used
        check_budget(RECIPES[name], used, geometry)
    for total in between:
        if total > used * heads:
            with pytest.raises(ValueError):
                check_budget(RECIPES[name], Fraction(total, heads), geometry)


@pytest.mark.parametrize(("ratio", "used"), [(0.333, 1), (0.3333, 1), (1 / 3, 1), (0.666, 2), (0.667, 2), (0.66, 1)])
def test_a_third_is_a_third_however_it_is_typed(ratio: float, used: int) -> None:
    assert nearest_budget(recipe("gqa"), ratio, geometry_of(9, 3, 30)) == Fraction(used, 3)


@pytest.mark.parametrize(
    ("name", "heads", "ratio", "used"),
    [
        ("headfold_layers", (9, 3, 30), 0.5, Fraction(45, 90)),
        ("headfold_layers", (9, 3, 30), 0.4, Fraction(36, 90)),
        ("gqa", (9, 3, 30), 0.7, Fraction(2, 3)),
        ("least_squares", (24, 8, 28), 0.375, Fraction(3, 8)),
        ("headfold_gqa", (24, 8, 28), 0.3, Fraction(2, 8)),
        ("mqa", (24, 8, 28), 0.5, Fraction(1, 8)),
        ("headfold_layers", (15, 5, 32), 0.5, Fraction(80, 160)),
    ],
)
def test_budgets_by_hand(name: str, heads: tuple[int, int, int], ratio: float, used: Fraction) -> None:
    assert nearest_budget(recipe(name), ratio, geometry_of(*heads)) == used


def test_families_without_padding_keep_equal_groups() -> None:
    stock = geometry_of(24, 8, 4, pads=False)
    assert admissible_counts(recipe("headfold_gqa"), stock) == (1, 2, 4, 8)
    assert nearest_budget(recipe("headfold_gqa"), 0.4, stock) == Fraction(1, 4)
    assert admissible_counts(recipe("headfold"), stock) == tuple(range(1, 9))  # keys and values apart: no stock form


@pytest.mark.parametrize(
    ("stored", "heads", "counts"),
    [
        (8, 32, (1, 2, 4, 8)),
        (6, 6, (1, 2, 3, 6)),
        (2, 14, (1, 2)),
        (3, 9, (1, 2, 3)),  # 12 query heads
        (5, 15, (1, 2, 3, 5)),  # 30; with four KV heads it would be 60
        (7, 28, (1, 2, 3, 7)),  # 42
    ],
)
def test_the_usual_counts_of_a_layer(stored: int, heads: int, counts: tuple[int, ...]) -> None:
    assert usual_counts(stored, heads) == counts


def test_every_count_where_it_is_requested() -> None:
    geometry = geometry_of(8, 8, 3)
    with pytest.raises(ValueError, match="no choice of head counts"):
        check_budget(recipe("headfold_layers"), Fraction(23, 24), geometry)
    check_budget(recipe("headfold_layers", **{"allocation.counts": "all"}), Fraction(23, 24), geometry)


def test_a_large_model_is_quick() -> None:
    started = time.process_time()
    for name in NAMES:
        for ratio in (0.9, 0.77, 0.5, 0.31):
            assert nearest_budget(RECIPES[name], ratio, geometry_of(64, 8, 80)) <= ratio
    assert time.process_time() - started < 5


def test_reachable_totals_against_all_choices() -> None:
    totals = {a + b + c for a in (1, 2, 5) for b in (1, 2, 5) for c in (1, 2, 5)}
    assert reachable([1, 2, 5], 3) == sorted(totals)


def test_a_model_of_one_kv_head_has_nothing_to_share() -> None:
    with pytest.raises(ValueError, match="one KV head: nothing to share"):
        nearest_budget(recipe("headfold_gqa"), 0.5, geometry_of(8, 1, 4))


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        ("share", "requested 50%, using 48.89%: 44 of 90 KV heads"),
        ("heads", "requested 1.5 KV heads per layer, using 1.467: 44 of 90 KV heads"),
        ("bytes", "requested 11,520 KV bytes per token, using 11,264: 44 of 90 KV heads"),
    ],
)
def test_the_answer_is_in_the_unit_of_the_question(unit: str, words: str) -> None:
    geometry = geometry_of(9, 3, 30)
    assert ceiling_note(0.5, 44 / 90, unit, geometry, "bfloat16") == words
    assert ceiling_note(0.5, 0.5, unit, geometry, "bfloat16") == ""
    assert "89 of 180 key and value heads" in ceiling_note(0.5, 89 / 180, unit, geometry, "bfloat16")
