"""Plans of every named recipe, for geometries of 2 to 64 heads: exact budgets or a refusal that helps, JSON, and the
same plan in any process. A new recipe is collected by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parameters import extended
from random_contexts import quick, random_context, ratio_of

from attention.plan import AttentionPlan
from attention.ratios import own_heads
from attention.ratios import ratio_of as share_of
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import RECIPES, recipe

REPOSITORY = Path(__file__).resolve().parents[3]
PLANNED_ALIKE = ("dcformer", "headfold_gqa", "headfold")  # as least_squares, or as headfold_layers
KINDS = ("divisor", "count", "total", "broken")
NEAREST = re.compile(r"nearest kv_ratio that recipe \S+ can meet is (\S+)(?: or (\S+))?$")


@pytest.mark.parametrize("name", [extended(n) if n in PLANNED_ALIKE else n for n in sorted(RECIPES)])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_plan_meets_its_budget_or_is_refused_with_budgets_that_can_be_met(name: str, data: st.DataObject) -> None:
    heads = data.draw(st.one_of(st.integers(2, 8), st.integers(9, 64)))
    stored = data.draw(st.sampled_from([g for g in range(1, heads + 1) if heads % g == 0][::-1]))
    layers = data.draw(st.integers(1, 3))
    if heads > 16:
        layers = min(layers, 2)
    seed = data.draw(st.integers(0, 2**32 - 1))
    if RECIPES[name].sharing != "none":
        stored, layers = heads, layers + 1  # a head is shared with one of an earlier layer
    ratio = ratio_of(data.draw(st.sampled_from(KINDS)), stored, layers, np.random.default_rng(seed))
    chosen = quick(RECIPES[name], heads)
    context = random_context(heads, stored, layers)
    try:
        plan = make_plan(chosen, ratio, context, np.random.default_rng(seed))
    except ValueError as error:
        for text in re.findall(r"the admissible ratios are ([^;]*)", str(error))[:1]:
            for named in map(float, text.split(", ")):  # suggested values can be requested
                if chosen.sharing == "none" and not (named == 1 and chosen.relaxation != "none"):
                    assert make_plan(chosen, named, context, np.random.default_rng(seed)).kv_heads
        nearest = NEAREST.search(str(error))
        if nearest is None:
            assert "can meet no kv_ratio on this checkpoint" in str(error)
            return
        for text in filter(None, nearest.groups()):
            met = make_plan(chosen, float(text), context, np.random.default_rng(seed))
            assert met.kv_heads / (2 * layers * stored) == pytest.approx(float(text), abs=1e-7)
        return
    assert plan.kv_heads == round(ratio * own_heads(context.geometry))
    assert share_of(plan, own_heads(context.geometry)) == pytest.approx(ratio, abs=1e-9)
    assert (plan.num_layers, plan.num_heads) == (layers, heads)
    for layer in plan.layers:
        for head_map in (layer.key_map, layer.value_map):
            assert max(head_map) < stored
            assert all(len({head_map[h] for h in unit}) == 1 for unit in context.units)
    if chosen.equal_groups and chosen.together:
        assert all(layer.is_uniform_gqa for layer in plan.layers if stored % layer.key_heads == 0)
        width = heads // stored
        assert all(max(map(len, x.key_groups)) == width * -(-stored // x.key_heads) for x in plan.layers)
    again = AttentionPlan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest
    assert again.to_json() == plan.to_json()


@pytest.mark.heavy
def test_every_recipe_can_be_planned_at_its_usual_budgets() -> None:
    """The property above could hold by refusing everything; these must be plans. Own searches, no shortcuts."""
    context = random_context(8, 8, 4)
    for name, chosen in RECIPES.items():
        ratios = [1.0] if chosen.sharing != "none" else [0.125] if name == "mqa" else [0.5, 0.25, 0.125]
        for ratio in ratios:
            assert make_plan(chosen, ratio, context, np.random.default_rng(0)).kv_heads == 64 * ratio, name


def test_exact_grouping_hands_over_above_sixteen_heads() -> None:
    chosen = recipe("least_squares", objective="pairs", similarity="weight")
    for heads, ratio in ((18, 1 / 3), (33, 1 / 11)):
        plan = make_plan(chosen, ratio, random_context(heads, heads, 1), np.random.default_rng(0))
        assert plan.kv_heads == 2 * round(heads * ratio) and plan.is_uniform_gqa


PLAN_MANY = """
import sys
import numpy as np, torch
torch.set_num_threads(1)
from parameters import extended
from random_contexts import quick, random_context, ratio_of
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import RECIPES
rng = np.random.default_rng(11)
for name in sorted(RECIPES):
    for kind in ("divisor", "divisor", "count", "total", "broken"):
        heads, layers, seed = int(rng.integers(2, 25)), int(rng.integers(2, 4)), int(rng.integers(1 << 30))
        ratio = 1.0 if RECIPES[name].sharing != "none" else ratio_of(kind, heads, layers, rng)
        chosen = quick(RECIPES[name], heads)
        try:
            plan = make_plan(chosen, ratio, random_context(heads, heads, layers), np.random.default_rng(seed))
            print(name, heads, ratio, plan.digest, plan.to_json())
        except ValueError as error:
            print(name, heads, ratio, "refused:", error)
    context = random_context(6, 6, 2)
    ratio = 1.0 if RECIPES[name].sharing != "none" else 1 / 6 if name == "mqa" else 0.5
    print(name, make_plan(RECIPES[name], ratio, context, np.random.default_rng(3)).to_json())
"""


@pytest.mark.extended
def test_the_same_plans_in_two_processes_with_other_hash_seeds() -> None:
    runs = []
    for seed in ("1", "271828"):
        path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "helpers")])
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        runs.append(
            subprocess.Popen([sys.executable, "-c", PLAN_MANY], env=environment, stdout=subprocess.PIPE, text=True)
        )
    first, second = (run.communicate(timeout=600)[0].splitlines() for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert first == second
    assert len(first) == 6 * len(RECIPES)
    assert sum("refused" not in line for line in first) > 3 * len(RECIPES)
