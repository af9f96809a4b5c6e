"""The joint space: what is declared, that nothing impossible is proposed, and that all that is possible can be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from space_points import Path, domains, paths, points

from attention.axes import Knob
from attention.families import geometry_of
from attention.geometry import HeadGeometry
from search_spaces.axes import GROUPING
from search_spaces.planning.budgets import check_budget
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import AXES, Recipe, RecipeError, recipe
from search_spaces.recipes.rules import broken_rules, keeps_everything, makes_equal_groups
from search_spaces.space.domains import FIELD_ORDER, Domain
from search_spaces.space.joint_space import NOT_UNASKED, JointSpace


@pytest.fixture(scope="module")
def geometry(demo_model) -> HeadGeometry:
    return geometry_of(demo_model.config)


@pytest.fixture(scope="module")
def space(geometry) -> JointSpace:
    return JointSpace([0.5, 0.25], geometry)


@pytest.fixture(scope="module")
def at_half(geometry) -> JointSpace:
    """One budget: the other decisions are the same at each."""
    return JointSpace([0.5], geometry)


@pytest.fixture(scope="module")
def all_paths(at_half) -> list[Path]:
    return list(paths(at_half))


@pytest.fixture(scope="module")
def grid(at_half, all_paths) -> list[tuple[Recipe, float]]:
    return [at_half.to_recipe({d.name: value for d, value in path if "." not in d.field}) for path in all_paths]


def test_measured_increases_of_wide_heads_are_refused_before_anything_is_measured() -> None:
    measured = {"width": 2, "fusion": "least_squares", "allocation.increases": "measured"}
    with pytest.raises(ValueError, match="heads of width 2 are estimated, not measured"):
        recipe("headfold_layers", **measured)
    assert recipe("headfold_layers", **measured | {"allocation.increases": "estimated"}).width == 2


def test_what_a_family_has_no_form_for_is_not_drawn(geometry) -> None:
    plain = {"kv_ratios": [0.5], "geometry": geometry}
    walks = {"grouping": ["walk_symmetric"], "objective": ["layer", "least_squares"]}
    rng = np.random.default_rng(0)
    for changes, name, choices, left in (
        ({"head_norms": True}, "objective", walks, {"least_squares"}),
        ({"window": 8}, "composition", {"composition": ["none", "dcmha"]}, {"none"}),
    ):
        every = JointSpace(**plain, choices=choices)
        some = JointSpace(**plain | {"geometry": replace(geometry, **changes)}, choices=choices)
        drawn = [{getattr(space.to_recipe(space.sample(rng))[0], name) for _ in range(30)} for space in (every, some)]
        assert drawn[0] == set(choices[name]) and drawn[1] == left


def test_every_sampled_point_is_a_valid_recipe(space, geometry) -> None:
    rng = np.random.default_rng(0)
    seen: dict[str, set] = {}
    for _ in range(300):
        chosen, ratio = space.to_recipe(space.sample(rng))
        assert not broken_rules(chosen.to_dict())
        check_budget(chosen, ratio, geometry)
        for name in (*AXES, "together", "width"):
            seen.setdefault(name, set()).add(getattr(chosen, name))
    # Every part can come up, but for those that fit no budget here and those that must be requested.
    for name, plain in NOT_UNASKED.items():
        assert seen.pop(name) == {plain}
    assert seen.pop("together") == {False, True}
    for name in seen:
        assert set(AXES[name].names()) - {"single", "direct", "post", "fusion_loss", "brute_force"} <= seen[name], name


def test_refinement_is_searched_when_requested(geometry) -> None:
    space = JointSpace([0.5], geometry, choices={"refinement": ["none", "heal"], "grouping": ["neighbour"]})
    drawn = [space.to_recipe(point)[0] for point in points(space)]
    assert {chosen.refinement for chosen in drawn} == {"none", "heal"}
    healed = next(chosen for chosen in drawn if chosen.refinement == "heal")
    assert healed.knobs("refinement")["ridge"] > 0
    assert "sequences" in healed.needs


def test_grid_covers_the_valid_combinations_once(grid) -> None:
    result = grid
    keys = {(chosen.digest, ratio) for chosen, ratio in result}
    assert len(keys) == len(result)
    # By brute force over alignment and fusion for one grouping: all pairs but an alignment + least squares.
    pairs = {(r.alignment, r.fusion) for r, _ in result if r.grouping == "neighbour"}
    assert pairs == {(a, f) for a in AXES["alignment"].names() for f in AXES["fusion"].names()} - {
        (a, "least_squares") for a in AXES["alignment"].names() if a != "none"
    }
    assert {r.objective for r, _ in result if r.grouping == "exact"} == {"pairs", "least_squares"}
    assert {r.objective for r, _ in result if r.grouping == "neighbour"} == {None}
    assert all((r.similarity is None) == ("similarity" not in r.needs) for r, _ in result)


def test_named_recipes_are_points_of_the_space(grid) -> None:
    assert {"gqa", "asymgqa", "least_squares"} <= {chosen.name for chosen, _ in grid}
    assert recipe("least_squares") in [chosen for chosen, _ in grid]


def test_decisions_have_one_set_of_choices_a_name_and_one_order(all_paths) -> None:
    seen: dict[str, Domain] = {}
    for path in all_paths:
        assert all(seen.setdefault(domain.name, domain) == domain for domain, _ in path)
        ranks = [
            FIELD_ORDER.index(domain.field) if domain.field in FIELD_ORDER else len(FIELD_ORDER) for domain, _ in path
        ]
        assert ranks == sorted(ranks)


def test_a_searched_knob_is_read_from_its_declaration(all_paths) -> None:
    every = {domain for path in all_paths for domain, _ in path}
    (domain,) = [d for d in every if d.field == "grouping.preserve"]
    knob = next(k for k in GROUPING.get("walk_asymmetric").knobs if k.name == "preserve")
    assert (domain.kind, domain.low, domain.high, domain.default) == ("float", knob.low, knob.high, knob.default)
    for path in all_paths:
        grouping = {d.field: value for d, value in path}.get("grouping")
        assert (domain in [d for d, _ in path]) == (grouping == "walk_asymmetric")
    assert not [d for d in every if d.field == "grouping.accept"]  # declared, but not searched


def test_a_new_part_on_an_axis_is_in_the_space_by_itself(geometry, monkeypatch) -> None:
    monkeypatch.setattr(GROUPING, "_parts", dict(GROUPING._parts))
    knob = Knob("stride", "int", "test", low=1, high=3, searched=True, default=2)
    GROUPING.part("striped", source="a test", knobs=(knob,), needs=("equal_groups",))(lambda problem, generator: None)
    space = JointSpace([0.5], geometry, choices={"grouping": ["striped", "neighbour"], "fusion": ["mean"]})
    assert any("striped" in domain.choices for domain in domains(space))
    (stride,) = {d for d in domains(space) if d.field == "grouping.stride"}
    assert (stride.low, stride.high) == (1, 3)
    assert {stride.sample(np.random.default_rng(s)) for s in range(30)} == {1, 2, 3}


def test_choices_and_settings_restrict(geometry) -> None:
    space = JointSpace(
        [0.5],
        geometry,
        choices={
            "grouping": ["walk_asymmetric"],
            "objective": ["layer"],
            "fusion": ["mean"],
            "allocation": ["uniform"],
        },
        settings={"grouping.iterations": 50, "grouping.preserve": 0.4},
    )
    for point in points(space):
        chosen, _ = space.to_recipe(point)
        assert chosen.knobs("grouping")["iterations"] == 50
        assert chosen.knobs("grouping")["preserve"] == 0.4
        assert chosen.objective == "layer"
    assert not [d for d in domains(space) if d.field == "grouping.preserve"]


def test_parts_that_lack_what_they_need_are_left_out(geometry) -> None:
    bare = JointSpace([0.5], geometry, provided=())
    for point in points(bare):
        assert not bare.to_recipe(point)[0].needs & {"statistics", "model"}


def test_nothing_that_changes_nothing_is_proposed(geometry) -> None:
    space = JointSpace([1.0, 0.5], geometry, choices={"sharing": ["none", "direct"]})
    generator, whole = np.random.default_rng(0), 0
    for _ in range(100):
        drawn, ratio = space.to_recipe(space.sample(generator))
        assert keeps_everything(drawn.sharing, drawn.composition, ratio) is None
        whole += ratio == 1
    assert whole, "at 1 there are those that share scores"


def test_groups_are_equal_only_where_the_grouping_says_so() -> None:
    fixed = {"grouping.equal_sizes": True}
    assert makes_equal_groups("exact", fixed) and not makes_equal_groups("walk_asymmetric", fixed)
    assert not makes_equal_groups("exact", {"grouping.equal_sizes": False})


def test_budgets_that_only_some_groupings_meet(geometry) -> None:
    choices = {"allocation": ["uniform"], "fusion": ["mean"], "alignment": ["none"], "similarity": ["cka"]}
    geometry = replace(geometry, pads_queries=False)  # a family whose groups are of one size
    space = JointSpace([0.5, 0.375], geometry, choices=choices)
    result = {(ratio, chosen.grouping) for chosen, ratio in map(space.to_recipe, points(space))}
    assert (0.375, "walk_asymmetric") in result and (0.5, "neighbour") in result
    assert (0.375, "walk_symmetric") not in result


def test_a_ratio_that_nothing_meets_exactly_is_a_ceiling(geometry) -> None:
    choices = {
        "allocation": ["uniform", "single"],
        "fusion": ["mean"],
        "alignment": ["none"],
        "grouping": ["neighbour"],
    }
    space = JointSpace([0.5, 0.3], geometry, choices=choices)
    result = {(ratio, chosen.allocation) for chosen, ratio in map(space.to_recipe, points(space))}
    assert result == {(0.5, "uniform"), (0.3, "uniform"), (0.3, "single")}  # a half is met: one head is no half
    with pytest.raises(ValueError, match="nothing can be proposed"):
        JointSpace([0.3], geometry, choices=choices, strict=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kv_ratios": []}, "at least one"),
        ({"kv_ratios": [1.2]}, r"\(0, 1\]"),
        ({"kv_ratios": [0.5], "choices": {"grouping": ["tree"]}}, "tree"),
        ({"kv_ratios": [0.5], "choices": {"colour": ["red"]}}, "colour"),
        (
            {"kv_ratios": [0.05], "choices": {"grouping": ["neighbour"], "allocation": ["uniform"]}},
            "nothing can be proposed.*keeps at least 12.5%",
        ),
        ({"kv_ratios": [0.5], "settings": {"grouping.accept": 3.0}}, "accept"),
        ({"kv_ratios": [0.5], "settings": {"grouping.none": 3.0}}, "axis.knob"),
        (
            {"kv_ratios": [0.5], "settings": {"composition.groups": 3}, "choices": {"composition": ["dcmha"]}},
            "nothing can be proposed.*groups must divide",
        ),
        (
            {
                "kv_ratios": [0.5],
                "settings": {"grouping.start_temperature": 1e-4},
                "choices": {"grouping": ["anneal"], "objective": ["least_squares"]},
            },
            "nothing can be proposed.*start_temperature must be more",
        ),
    ],
)
def test_bad_spaces_are_refused(arguments: dict, words: str, geometry) -> None:
    with pytest.raises(ValueError, match=words):
        JointSpace(geometry=geometry, **arguments)


def test_points_that_break_a_rule_are_refused(space) -> None:
    with pytest.raises(RecipeError, match="pointless"):
        space.to_recipe({"kv_ratio": 0.5, "fusion": "least_squares", "alignment": "procrustes"})
    with pytest.raises(RecipeError, match="does not decide"):
        space.to_recipe({"kv_ratio": 0.5})


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_sampled_point_of_any_geometry_can_be_planned(data: st.DataObject) -> None:
    """Random tiny checkpoints, head counts that are no powers of two: every proposal meets its budget exactly."""
    from random_contexts import random_context

    from search_spaces.planning.planner import PlanningContext

    heads = data.draw(st.integers(2, 12))
    stored = data.draw(st.sampled_from([g for g in range(1, heads + 1) if heads % g == 0]))
    layers = data.draw(st.integers(1, 3))
    context: PlanningContext = random_context(heads, stored, layers)
    total = data.draw(st.integers(2 * layers, 2 * layers * stored))
    ratio = total / (2 * layers * stored)
    try:
        space = JointSpace([ratio], context.geometry, choices={"objective": ["pairs", "least_squares", "layer"]})
    except ValueError as error:
        assert "nothing can be proposed" in str(error)
        return
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    chosen, ratio = space.to_recipe(space.sample(rng))
    cheap = {
        k: min(v, 5) for k, v in chosen.settings if k in ("grouping.iterations", "grouping.moves", "grouping.restarts")
    }
    chosen = chosen.with_changes(settings=cheap)
    plan = make_plan(chosen, ratio, context, rng)
    assert plan.kv_heads == total
    assert isinstance(chosen, Recipe)
