"""Plans: exact budgets, the same plan for a seed in any process, GQA checkpoints, refusals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_contexts import MeasuredContext

from attention.base.progress import show_progress
from attention.conversion.convert import lift
from attention.families import geometry_of
from attention.plan import AttentionPlan
from search_spaces.axes import GROUPING, OBJECTIVE
from search_spaces.grouping.problem import GroupingProblem
from search_spaces.partitions import random_partition
from search_spaces.planning.planner import PlanningContext, make_plan
from search_spaces.recipes.catalogue import Recipe, recipe
from search_spaces.site import Site

REPOSITORY = Path(__file__).resolve().parents[3]


def planned(name: str, ratio: float, context: PlanningContext, seed: int = 0, **overrides) -> AttentionPlan:
    return make_plan(recipe(name, **overrides), ratio, context, np.random.default_rng(seed))


@pytest.mark.parametrize("ratio", [0.5, 0.25])
@pytest.mark.parametrize("name", ["gqa", "asymgqa", "align", "least_squares"])
def test_named_recipes_meet_the_budget(name: str, ratio: float, demo_context) -> None:
    plan = planned(name, ratio, demo_context)
    assert plan.kv_ratio == ratio
    assert plan.is_uniform_gqa == (name != "asymgqa")
    assert AttentionPlan.from_json(plan.to_json()) == plan


def test_neighbour_groups_are_consecutive(demo_context) -> None:
    plan = planned("gqa", 0.25, demo_context)
    assert {layer.key_map for layer in plan.layers} == {(0, 0, 0, 0, 1, 1, 1, 1)}


def test_what_a_plan_expects_of_each_layer_and_how_far_it_has_come(make_context) -> None:
    context, lines = make_context(), []
    with show_progress("convert", lines.append, every=0):
        plan = planned("headfold", 0.5, context, **{"allocation.fit_steps": 2, "allocation.tokens": 48})
    stages = list(dict.fromkeys(line.partition(":")[0] for line in lines))
    assert stages.index("sensitivity of the outputs") < stages.index("what each head count costs")
    assert re.search(r"what each head count costs: (\d+) of \1 head counts", " ".join(lines))
    (points,) = context.curves.values()
    expected = [
        sum(
            points[f"{i}/{side}/{count}"].increase
            for side, count in (("key", layer.key_heads), ("value", layer.value_heads))
            if count < 4
        )
        for i, layer in enumerate(plan.layers)
    ]
    assert context.increases[plan] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "sets"),
    [({"fit_steps": 0}, 1), ({"fit_steps": 2}, 2), ({"fit_steps": 2, "increases": "measured"}, 1)],
)
def test_curves_serve_any_number_of_refinement_steps_unless_they_are_scaled_to_it(
    settings: dict[str, Any], sets: int, make_context
) -> None:
    context = make_context()
    knobs = {"tokens": 48, "finalists": 1} | settings
    own = {f"allocation.{name}": setting for name, setting in knobs.items()}
    for steps in (4, 40):
        planned("headfold", 0.5, context, **own, **{"refinement.fit_steps": steps})
    assert len(context.curves) == sets


def test_mqa_is_one_group_and_says_which_ratio(demo_context) -> None:
    assert {layer.key_heads for layer in planned("mqa", 0.125, demo_context).layers} == {1}
    with pytest.raises(ValueError, match="admissible ratios are 0.125"):
        planned("mqa", 0.25, demo_context)


def test_exact_is_never_worse_than_a_walk_under_its_own_objective(demo_context) -> None:
    walked = recipe("least_squares", grouping="walk_symmetric", similarity="weight", **{"grouping.iterations": 30})
    for together in (True, False):
        best = planned("least_squares", 0.5, demo_context, together=together)
        other = make_plan(walked.with_changes(together=together), 0.5, demo_context, np.random.default_rng(0))
        for layer in range(4):
            for side in ("key", "value"):
                sides = ("key", "value") if together else (side,)
                cost = OBJECTIVE.get("least_squares")(_site(demo_context, layer, sides))
                groups = [getattr(plan.layers[layer], f"{side}_groups") for plan in (best, other)]
                assert cost.score(groups[0]) >= cost.score(groups[1]) - 1e-9


def _site(context: PlanningContext, layer: int, sides: tuple[str, ...]) -> Site:
    assert context.calibration is not None
    statistics = context.calibration.layers[layer]
    return Site(layer, sides, sides, context.units, context.heads[layer], context.geometry, statistics)


def test_unequal_groups_where_allowed(make_context) -> None:
    context = make_context("llama", num_attention_heads=8, num_key_value_heads=8, hidden_size=64)
    plan = planned("least_squares", 0.375, context, together=False, **{"grouping.equal_sizes": False})
    assert plan.kv_ratio == 0.375
    assert all(len({len(g) for g in layer.key_groups}) > 1 for layer in plan.layers)
    assert planned("asymgqa", 0.375, context).kv_ratio == 0.375


@pytest.mark.parametrize("name", ["gqa", "align", "least_squares"])
def test_a_budget_that_heads_cannot_divide_is_refused(name: str, demo_context) -> None:
    with pytest.raises(ValueError) as error:
        planned(name, 0.4, demo_context)
    for word in ("0.4", "8 KV heads per layer", "can meet is 0.375"):
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["gqa", "align", "least_squares"])
def test_three_of_eight_heads_in_groups_as_equal_as_can_be(name: str, demo_context) -> None:
    plan = planned(name, 0.375, demo_context)
    assert plan.kv_ratio == 0.375
    assert all(sorted(map(len, layer.key_groups)) == [2, 3, 3] for layer in plan.layers)


@pytest.mark.parametrize("ratio", [0.0, 1.5, -1.0])
def test_ratios_outside_the_range_are_refused(ratio: float, demo_context) -> None:
    with pytest.raises(ValueError, match="kv_ratio"):
        planned("gqa", ratio, demo_context)


def test_seeds_matter_and_repeat(make_context) -> None:
    context = make_context("llama", num_attention_heads=8, num_key_value_heads=8, hidden_size=64)
    plans = [planned("asymgqa", 0.5, context, seed).digest for seed in (0, 1, 0)]
    assert plans[0] == plans[2] != plans[1]


@pytest.mark.extended
def test_the_same_plan_in_any_process(tmp_path: Path) -> None:
    """Two fresh interpreters with other hash seeds; a walk, annealing and exact grouping, and a sampled point."""
    script = tmp_path / "plan.py"
    script.write_text(
        "import numpy as np, torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "torch.set_num_threads(1)\n"
        "torch.manual_seed(0)\n"
        "config = LlamaConfig(vocab_size=32, hidden_size=48, intermediate_size=16, num_hidden_layers=2,\n"
        "                     num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=64)\n"
        "model = LlamaForCausalLM(config).eval()\n"
        "from attention.calibration.calibrate import calibrate\n"
        "from attention.conversion.convert import lift\n"
        "from attention.families import geometry_of\n"
        "from search_spaces.planning.planner import PlanningContext, make_plan\n"
        "from search_spaces.recipes.catalogue import recipe\n"
        "from search_spaces.space.joint_space import JointSpace\n"
        "tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 32, (3, 16)))\n"
        "calibration = calibrate(model, tokens)\n"
        "geometry = geometry_of(config)\n"
        "context = PlanningContext(geometry, lift(model), calibration, model, tokens)\n"
        "for name in ('asymgqa', 'align', 'headfold'):\n"
        "    print(make_plan(recipe(name), 0.5, context, np.random.default_rng(3)).to_json())\n"
        "space = JointSpace([0.5, 1 / 3], geometry)\n"
        "point = space.sample(np.random.default_rng(5))\n"
        "print(point, space.to_recipe(point)[0].to_dict())\n"
    )
    runs = []
    for seed in ("0", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        runs.append(subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 4


def test_a_gqa_checkpoint_keeps_its_shared_heads_together(make_context) -> None:
    context = make_context("qwen2", num_attention_heads=8, num_key_value_heads=4, head_dim=8, hidden_size=64)
    for name in ("gqa", "asymgqa", "align", "least_squares"):
        plan = planned(name, 0.5, context)
        assert plan.kv_heads == 2 * 2 * 2  # half of the four KV heads that it has
        for layer in plan.layers:
            for head_map in (layer.key_map, layer.value_map):
                assert all(head_map[2 * unit] == head_map[2 * unit + 1] for unit in range(4))
    assert planned("least_squares", 1.0, context).layers[0].key_map == (0, 0, 1, 1, 2, 2, 3, 3)


def test_a_refusal_reports_what_the_checkpoint_has_and_the_nearest(make_context) -> None:
    context = make_context("llama", num_attention_heads=8, num_key_value_heads=4, hidden_size=64)
    for ratio, nearest in ((0.375, "0.25 or 0.5"), (0.9, "0.75"), (0.1, "0.25")):
        with pytest.raises(ValueError, match=f"4 KV heads per layer for 8 query heads.*can meet is {nearest}$"):
            planned("gqa", ratio, context)
    with pytest.raises(ValueError, match="the least is 0.25"):
        planned("asymgqa", 0.125, context)


def test_heads_are_shared_across_layers_in_multi_head_checkpoints_only(make_context) -> None:
    with pytest.raises(ValueError, match="2 KV heads for 4 query heads; it takes a multi-head checkpoint"):
        planned("directshare", 1.0, make_context("llama", num_key_value_heads=2))


def test_parts_without_what_they_need_say_so(demo_context) -> None:
    bare = PlanningContext(demo_context.geometry, demo_context.heads)
    for name, word in (("align", "calibrat"), ("least_squares", "calibrat"), ("asymgqa", "calibrat")):
        with pytest.raises(ValueError, match=word):
            planned(name, 0.5, bare)
    assert planned("gqa", 0.5, bare).kv_ratio == 0.5
    without_model = PlanningContext(demo_context.geometry, demo_context.heads, demo_context.calibration)
    with pytest.raises(ValueError, match="the model"):
        planned("asymgqa", 0.5, without_model)
    with pytest.raises(ValueError, match="model and sequences"):
        planned("asymgqa", 0.5, without_model, objective="model")


def test_a_context_that_does_not_fit_is_refused(demo_context) -> None:
    with pytest.raises(ValueError, match="lifted"):
        PlanningContext(demo_context.geometry, demo_context.heads[:2])


def test_the_walk_on_the_whole_model_lowers_the_loss(make_context) -> None:
    """The full-model score: what is found is, at each site in turn, the best measured."""
    context = make_context("llama")
    seen: list[float] = []

    def measure(chosen: Recipe, plan: AttentionPlan) -> float:
        assert chosen.name == "asymgqa" and chosen.objective == "model"
        seen.append(loss_of(chosen, plan))
        return seen[-1]

    loss_of = context.loss_of
    counted = MeasuredContext(
        context.geometry, context.heads, context.calibration, context.model, context.sequences, measure=measure
    )
    plan = planned("asymgqa", 0.5, counted, objective="model")
    assert plan.kv_ratio == 0.5
    # The last site searched saw the final plan, and it was the best of that site.
    final = loss_of(recipe("asymgqa", objective="model"), plan)
    assert final in seen
    assert len(seen) <= 4 * 10


def test_knapsack_measures_and_moves_heads_between_sites(make_context) -> None:
    context = make_context("llama")
    knobs = {"grouping.equal_sizes": False, "allocation.increases": "measured"}
    apart = recipe("least_squares", together=False, allocation="knapsack", **knobs)
    plan = make_plan(apart, 0.5, context, np.random.default_rng(0))
    even = recipe("least_squares", together=False, **{"grouping.equal_sizes": False})
    uniform = make_plan(even, 0.5, context, np.random.default_rng(0))
    assert plan.kv_ratio == uniform.kv_ratio == 0.5
    assert context.loss_of(apart, plan) < context.loss_of(apart, uniform)


def test_dha_allocation_gives_more_heads_where_one_group_costs_more(demo_context) -> None:
    chosen = recipe("least_squares", together=False, allocation="dha", **{"grouping.equal_sizes": False})
    plan = make_plan(chosen, 0.25, demo_context, np.random.default_rng(0))
    assert plan.kv_ratio == 0.25
    costs = [OBJECTIVE.get("least_squares")(_site(demo_context, i, ("key",))).cost(tuple(range(8))) for i in range(4)]
    heads = [layer.key_heads for layer in plan.layers]
    assert sum(heads) == 8
    assert heads[int(np.argmax(costs))] == max(heads) > heads[int(np.argmin(costs))]


def test_dha_with_equal_groups_is_refused(demo_context) -> None:
    with pytest.raises(ValueError, match="equal_sizes to false"):
        planned("least_squares", 0.5, demo_context, together=False, allocation="dha")


# ---- contracts of the axes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUPING.names())
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_grouping_makes_the_requested_groups(name: str, data: st.DataObject) -> None:
    """A partition into so many groups, equal if the part says so, deterministic for a seed, for any head count."""
    part = GROUPING.get(name)
    heads = data.draw(st.integers(2, 40))
    few = {"iterations": 20, "moves": 2, "restarts": 2, "max_passes": 5}
    knobs = part.settings({knob.name: few[knob.name] for knob in part.knobs if knob.name in few})
    equal = "equal_groups" in part.needs or knobs.get("equal_sizes", False)
    if name in ("exact", "merge"):
        heads = min(heads, 14)
    if name == "merge" or heads > 16:
        knobs |= {"max_passes": 1} if "max_passes" in knobs else {}
    counts = [g for g in range(1, heads + 1) if not equal or heads % g == 0]
    if "few_heads" in part.needs:
        heads = min(heads, 8)
    groups = data.draw(st.sampled_from([g for g in counts if g <= heads]))
    similarity = np.random.default_rng(heads).normal(size=(heads, heads))
    similarity = similarity + similarity.T
    from search_spaces.costs import PairCost

    problem = GroupingProblem(heads, groups, similarity, PairCost.from_similarity(similarity))
    runs = [part(problem, np.random.default_rng(7), **knobs) for _ in range(2)]
    assert runs[0] == runs[1]
    partition = runs[0].partition
    assert sorted(h for group in partition for h in group) == list(range(heads))
    assert partition == tuple(sorted(tuple(sorted(group)) for group in partition))
    assert len(partition) == groups
    if equal:
        assert {len(group) for group in partition} == {heads // groups}
    if runs[0].score is not None:
        assert runs[0].score == pytest.approx(problem.need_cost().score(partition))


@pytest.mark.parametrize("sides", [("key",), ("value",), ("key", "value")])
@pytest.mark.parametrize("name", OBJECTIVE.names())
def test_every_objective_prefers_a_group_of_copies(name: str, sides: tuple[str, ...], make_context) -> None:
    """The contract of the axis: pooling two identical heads is free, pooling two others is not; repeatable."""
    context = make_context("llama", num_hidden_layers=1)
    # Heads 1 and 3 become copies in queries, keys, values and outputs.
    heads = context.heads[0]
    copied = type(heads)(*(t[[0, 1, 2, 1]] for t in (heads.q, heads.k, heads.v, heads.o)))
    from attention.calibration.calibrate import calibrate
    from attention.conversion.convert import assemble, convert

    identity = AttentionPlan.identity(1, 4, 8)
    model = assemble(context.model, identity, [copied]).eval()
    calibration = calibrate(model, context.sequences)
    copy = PlanningContext(geometry_of(model.config), lift(model), calibration, model, context.sequences)
    chosen = recipe("asymgqa")
    similarity = sum(copy.similarity(chosen, 0, side) for side in sides)

    def plan_with(partition):
        own = tuple((h,) for h in range(4))
        from attention.plan import LayerPlan

        groups = (partition if side in sides else own for side in ("key", "value"))
        return AttentionPlan((LayerPlan.from_groups(*groups, 4),), 8)

    def measure(plan):
        from attention.modeling.losses import language_loss

        with torch.no_grad():
            gap = convert(model, plan)(context.sequences).logits - model(context.sequences).logits
        assert np.isfinite(language_loss(model, context.sequences))
        return float(gap.pow(2).mean())

    # What a search phase may find: copies at no distance, others by how their weights differ
    distance = (copied.v.flatten(1)[:, None] - copied.v.flatten(1)[None]).square().mean(-1).numpy()
    site = Site(
        0, sides, sides, copy.units, copy.heads[0], copy.geometry, calibration.layers[0],
        similarity=np.asarray(similarity), model=model, plan_with=plan_with, measure=measure,
        fusion_distance=distance,
    )  # fmt: skip
    part = OBJECTIVE.get(name)
    objective = part(site, **part.settings())
    copies, others = ((0,), (1, 3), (2,)), ((0, 1), (2,), (3,))
    assert objective.score(copies) > objective.score(others)
    assert objective.score(copies) == objective.score(copies)
    assert objective.score(copies) == pytest.approx(0.0, abs=1e-3 * abs(objective.score(others)))


def test_random_partitions_are_uniform_over_seeds() -> None:
    """Each of the three ways to pair four heads comes up about equally often."""
    rng = np.random.default_rng(0)
    drawn = [random_partition(4, 2, rng) for _ in range(600)]
    counts = [drawn.count(p) for p in sorted(set(drawn))]
    assert len(counts) == 3 and min(counts) > 150
