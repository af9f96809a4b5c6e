"""Grouping by estimates of a cost: exact at the end, the same every time, and near to what the cost itself finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from parameters import extended

from attention.conversion.fusion.costs import ValueCost
from attention.conversion.fusion.estimates import LeadingValueCost, PooledValueCost
from benchmarks.planning import made_layer
from search_spaces.costs import GroupCost
from search_spaces.grouping.estimated import by_estimates, screened
from search_spaces.grouping.exact import AFFORDABLE, exact
from search_spaces.grouping.merge_anneal import merge_anneal
from search_spaces.grouping.problem import GroupingProblem
from search_spaces.objectives import least_squares
from search_spaces.partitions import canonical, random_partition
from search_spaces.planning.context import PlanningContext
from search_spaces.planning.prices import StoredPrices
from search_spaces.recipes.catalogue import RECIPES
from search_spaces.site import Site


def table_cost(heads: int, seed: int) -> GroupCost:
    table = np.random.default_rng(seed).uniform(0, 1, 1 << heads)
    return GroupCost(lambda members: table[sum(1 << h for h in members)])


@pytest.fixture(scope="module")
def layer_cost() -> GroupCost:
    """18 value heads of 8."""
    heads, statistics = made_layer(18, 8)
    whole, pooled = ValueCost(heads, statistics), PooledValueCost(heads, statistics)
    rungs = pooled, LeadingValueCost(pooled, statistics, 36)
    makers = [lambda rung=rung: GroupCost(rung.cost, lambda groups: rung.costs(groups).numpy()) for rung in rungs]
    effort = {"effort": lambda _: AFFORDABLE, "estimates": makers}
    return GroupCost(whole.cost, lambda groups: whole.costs(groups).numpy(), **effort)


@pytest.mark.heavy
@pytest.mark.parametrize("equal_sizes", [True, extended(False)])
def test_the_grouping_costs_within_two_percent_of_the_search_by_the_cost_itself(
    equal_sizes: bool, layer_cost: GroupCost
) -> None:
    problem = GroupingProblem(18, 6, objective=layer_cost)
    slow = merge_anneal(problem, np.random.default_rng(0), equal_sizes=equal_sizes)
    priced = layer_cost.priced
    quick = exact(problem, np.random.default_rng(0), equal_sizes=equal_sizes)
    assert layer_cost.priced == priced  # the cost itself was not called
    assert quick.score == pytest.approx(layer_cost.score(quick.partition), rel=0.05)
    assert slow.score is not None and layer_cost.score(quick.partition) >= 1.02 * slow.score
    random = random_partition(18, 6, np.random.default_rng(0))
    assert layer_cost.score(random) < 1.2 * slow.score  # far from flat
    again = exact(problem, np.random.default_rng(0), equal_sizes=equal_sizes)
    fresh = exact(replace(problem, objective=layer_cost.afresh()), np.random.default_rng(0), equal_sizes=equal_sizes)
    assert again == quick and fresh.partition == quick.partition


@pytest.mark.parametrize("may_move", [True, False])
def test_screened_changes_only_improve(may_move: bool) -> None:
    cost, guide = table_cost(10, 1), table_cost(10, 2)
    start = random_partition(10, 4, np.random.default_rng(0))
    result = canonical(screened(cost, guide, list(start), may_move=may_move))
    assert cost.score(result) > cost.score(start)
    assert len(result) == 4 and sorted(h for group in result for h in group) == list(range(10))
    if not may_move:
        assert sorted(map(len, result)) == sorted(map(len, start))
    assert canonical(screened(cost, guide, list(result), may_move=may_move)) == result


def test_estimates_are_made_when_they_are_needed_and_not_before() -> None:
    created: list[int] = []

    def maker(rung: int, cost: GroupCost):
        def make() -> GroupCost:
            created.append(rung)
            return cost

        return make

    cost = table_cost(8, 0)
    ladder = [maker(rung, table_cost(8, 0)) for rung in range(2)]
    affordable = GroupCost(cost.cost, effort=lambda _: 1.0, estimates=ladder)
    problem = GroupingProblem(8, 4, objective=affordable)
    best = exact(problem, np.random.default_rng(0), equal_sizes=False)
    assert not created
    dear = GroupCost(cost.cost, effort=lambda _: 1.0, estimates=ladder, preparation=2 * AFFORDABLE)
    near = exact(replace(problem, objective=dear), np.random.default_rng(0), equal_sizes=False)
    assert created == [0, 1] and dear.priced == 0
    assert near.score is not None and best.score is not None and near.score <= best.score
    assert near.score == cost.score(near.partition)
    assert by_estimates(replace(problem, objective=dear), np.random.default_rng(0), equal_sizes=False) == near


def site_of(context: PlanningContext, by: tuple[str, ...]) -> Site:
    assert context.calibration is not None
    statistics = context.calibration.layers[0]
    return Site(0, by, by, context.units, context.heads[0], context.geometry, statistics)


@pytest.mark.parametrize("by", [("value",), ("key", "value")])
def test_the_objective_of_dear_values_has_estimates_and_the_same_prices(
    by: tuple[str, ...], demo_context: PlanningContext, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """Stored prices stay those of the objective, with estimates or without."""
    site = site_of(demo_context, by)
    plain = least_squares.least_squares(site)
    assert plain.estimates == () and RECIPES["headfold"].objective == "least_squares"
    monkeypatch.setattr(least_squares, "DEAR", 0.0)
    dear = least_squares.least_squares(site)
    assert len(dear.estimates) == 2
    plain.stored_prices = dear.stored_prices = StoredPrices(tmp_path / "prices.safetensors")
    assert np.array_equal(plain.table(8, (2, 4)), dear.table(8, (2, 4)))
    assert dear.priced == 0  # all were stored
    groups = [(0, 1), (2, 5), (0, 1, 2, 3), (4, 5, 6, 7)]
    rough, close = ([make().cost(group) for group in groups] for make in dear.estimates)
    if len(by) == 1:  # else the scale between keys and values is another
        own = np.array([plain.cost(group) for group in groups])
        distances = [np.abs(np.log(np.array(prices) / own)).max() for prices in (rough, close)]
        assert distances[1] < distances[0]


def test_keys_alone_need_no_estimates(demo_context: PlanningContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_squares, "DEAR", 0.0)
    assert least_squares.least_squares(site_of(demo_context, ("key",))).estimates == ()
