"""Allocations: worked example of the greedy one, knapsack against brute force, budgets met exactly or refused."""

from __future__ import annotations

import dataclasses
import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.allocation.dha import dha_greedy
from search_spaces.allocation.knapsack import knapsack, towards_even
from search_spaces.allocation.problem import AllocationProblem, Counts
from search_spaces.allocation.uniform import uniform
from search_spaces.axes import ALLOCATION


def test_uniform() -> None:
    assert uniform(3, 8, 0.25) == ((2, 2), (2, 2), (2, 2))
    assert uniform(1, 6, 1 / 3) == ((2, 2),)
    assert uniform(1, 3, 0.333333) == uniform(1, 3, 0.3333333) == ((1, 1),), "as typed"
    assert uniform(2, 5, 1.0) == ((5, 5), (5, 5))


@pytest.mark.parametrize("ratio", [0.375, 0.3, 0.01])
def test_uniform_refuses_what_heads_cannot_divide(ratio: float) -> None:
    with pytest.raises(ValueError) as error:
        uniform(4, 8, ratio)
    for part in (f"{ratio:.4g}", "8 heads", "0.125, 0.25, 0.5, 1"):
        assert part in str(error.value)


def test_uniform_with_other_counts_allowed() -> None:
    assert uniform(2, 8, 0.375, admissible=range(1, 9)) == ((3, 3), (3, 3))


def test_dha_by_hand() -> None:
    """Three layers, total 32, quanta (4, 16): all start with 4, 20 remain; the loss 9 gets 12 more (8 remain). Then
    loss / heads is 5/4, 2/4, 9/16: +4 to the first (5/8); then 5/8, 2/4, 9/16: +4 to the first again."""
    assert dha_greedy([5.0, 2.0, 9.0], 32) == (12, 4, 16)


def test_dha_gives_on_loss_per_head_and_ties_to_the_earlier_layer() -> None:
    assert dha_greedy([1.0, 1.0, 1.0], 20, first=0) == (8, 8, 4)
    assert dha_greedy([1.0, 1.0, 1.0], 28) == (16, 8, 4)  # 16 left: one large, which takes 12


@pytest.mark.parametrize("remaining", [12, 13, 14, 15, 16])
def test_dha_raises_as_printed_only_where_16_are_left(remaining: int) -> None:
    """Alg. 5, line 10: M16 = R // 16, so that with 12 <= R < 16 no layer gets 16, though the raise would take 12."""
    if remaining % 4:
        with pytest.raises(ValueError, match=f"{remaining % 4} of {8 + remaining} heads left"):
            dha_greedy([1.0, 9.0], 8 + remaining)
        return
    # R = 12: loss / heads are 1/4, 9/4: +4; 1/4, 9/8: +4; 1/4, 9/12: +4. R = 16: 12 to the second, then 1/4 < 9/16.
    assert dha_greedy([1.0, 9.0], 8 + remaining) == {12: (4, 16), 16: (4, 20)}[remaining]
    assert dha_greedy([3.0, 4.0], 8 + remaining) == {12: (8, 12), 16: (8, 16)}[remaining]


def test_dha_without_room_for_a_large_one() -> None:
    assert dha_greedy([1.0, 3.0], 16) == (4, 12)  # 8 left: less than the 12 that a large one takes


def test_dha_caps_and_reports_a_remainder() -> None:
    assert dha_greedy([1.0, 100.0], 24, cap=16) == (8, 16)
    with pytest.raises(ValueError, match="8 of 40 heads left"):
        dha_greedy([1.0, 2.0], 40, cap=16)
    with pytest.raises(ValueError, match="2 of 18 heads left"):
        dha_greedy([1.0, 2.0], 18)
    with pytest.raises(ValueError, match="at least 4"):
        dha_greedy([1.0, 2.0, 3.0], 8)


@settings(max_examples=60, deadline=None)
@given(
    losses=st.lists(st.floats(0, 10), min_size=1, max_size=8),
    more=st.integers(0, 20),
    cap=st.integers(1, 12),
)
def test_dha_meets_the_total_or_refuses(losses: list[float], more: int, cap: int) -> None:
    total = 2 * len(losses) + 2 * more
    try:
        given_out = dha_greedy(losses, total, (2, 8), 2 * cap)
    except ValueError:
        assert total > 2 * cap * len(losses)
        return
    assert sum(given_out) == total
    assert all(2 <= count <= 2 * cap for count in given_out)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_knapsack_against_brute_force(data: st.DataObject) -> None:
    sites = data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    curves = []
    for _ in range(sites):
        counts = sorted(rng.choice(np.arange(1, 9), size=rng.integers(1, 5), replace=False).tolist())
        curves.append({int(count): float(rng.uniform()) for count in counts})
    budget = data.draw(st.integers(1, 8 * sites))
    exact = data.draw(st.booleans())
    choices = [c for c in product(*curves) if (sum(c) == budget if exact else sum(c) <= budget)]
    if not choices:
        with pytest.raises(ValueError, match="no choice of head counts"):
            knapsack(curves, budget, exact=exact)
        return
    result = knapsack(curves, budget, exact=exact)
    assert result in choices

    def error(choice):
        return sum(curve[count] for curve, count in zip(curves, choice, strict=True))

    assert error(result) == pytest.approx(min(map(error, choices)))


def test_knapsack_puts_heads_where_they_count() -> None:
    curves = [{1: 5.0, 2: 1.0, 4: 0.0}, {1: 0.1, 2: 0.05, 4: 0.0}]
    assert knapsack(curves, 5) == (4, 1)
    with pytest.raises(ValueError, match="finite"):
        knapsack([{1: float("nan")}], 2)


def problem(heads: int, layers: int, ratio: float, admissible: list[int]) -> AllocationProblem:
    rng = np.random.default_rng(heads * layers)
    losses = rng.uniform(size=(layers, 2))
    return AllocationProblem(
        layers,
        heads,
        ratio,
        tuple(admissible),
        loss=lambda layer, side: float(losses[layer, ("key", "value").index(side)]),
        curves=lambda sites, counts: [
            {g: float(losses[at, int(side == "value")]) / g for g in counts} for at, side in sites
        ],
    )


@pytest.mark.parametrize("name", ALLOCATION.names())
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_allocation_meets_the_budget_exactly_or_refuses(name: str, data: st.DataObject) -> None:
    """The contract of the axis, for head counts that are no powers of two as well."""
    heads, layers = data.draw(st.integers(2, 64)), data.draw(st.integers(1, 6))
    part = ALLOCATION.get(name)
    every = list(range(1, heads + 1))
    divisors = [g for g in every if heads % g == 0]
    admissible = every if "any_count" in part.needs else data.draw(st.sampled_from([every, divisors]))
    total = data.draw(st.integers(2 * layers, 2 * layers * heads))
    task = problem(heads, layers, total / (2 * layers * heads), admissible)
    try:
        counts = part(task, **part.settings())
    except ValueError as error:
        assert name != "dha", error  # its own quanta always fit
        assert any(word in str(error) for word in ("admissible", "no choice of head counts"))
        return
    assert len(counts) == layers
    assert sum(keys + values for keys, values in counts) == total == task.total
    assert {count for pair in counts for count in pair} <= set(admissible)


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.01])
def test_ratios_outside_the_range_are_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        _ = problem(8, 4, ratio, [1, 2]).total


def test_a_ratio_of_no_whole_head_is_refused() -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        _ = problem(8, 4, 0.26, [1, 2]).total


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_plans_lead_from_the_knapsack_to_the_even_one(data: st.DataObject) -> None:
    sites, heads = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([2, 4, 8, 12]))
    counts = [g for g in range(1, heads + 1) if heads % g == 0 or data.draw(st.booleans())]
    increases = data.draw(st.lists(st.floats(0, 3), min_size=sites * len(counts), max_size=sites * len(counts)))
    curves = [dict(zip(counts, increases[i::sites], strict=True)) for i in range(sites)]
    budget = sites * data.draw(st.sampled_from(counts))
    plans = towards_even(curves, budget, data.draw(st.integers(1, 5)))
    assert plans[0] == knapsack(curves, budget, exact=True)
    assert len(set(plans)) == len(plans) <= 5
    assert all(sum(plan) == budget and set(plan) <= set(counts) for plan in plans)
    summed = [sum(curve[g] for curve, g in zip(curves, plan, strict=True)) for plan in plans]
    spread = [sum(math.log(g * sites / budget) ** 2 for g in plan) for plan in plans]
    assert summed == pytest.approx(sorted(summed)), "evenness is paid for, never won with a smaller sum"
    assert spread == pytest.approx(sorted(spread, reverse=True))


def test_the_measured_best_of_the_finalists_is_taken() -> None:
    # Sum of increases: site 0 gets everything. Half and half costs 0.2 more by that sum; the whole model disagrees.
    curves = [{1: 1.0, 2: 0.3, 3: 0.0}, {1: 0.4, 2: 0.3, 3: 0.0}]
    assert towards_even(curves, 4, 5) == [(3, 1), (2, 2)]
    requested: list[Counts] = []

    def final(counts: Counts) -> float:
        requested.append(counts)
        return {3: 2.7, 2: 2.5}[counts[0][0]]

    problem = AllocationProblem(1, 4, 0.5, (1, 2, 3), curves=lambda *_: curves, final=final)
    part = ALLOCATION.get("knapsack")
    assert part(problem) == ((2, 2),)
    assert requested == [((3, 1),), ((2, 2),)]
    assert part(problem, finalists=1) == ((3, 1),)
    assert len(requested) == 2, "one finalist is not measured"
    assert part(dataclasses.replace(problem, final=None)) == ((3, 1),)


@pytest.mark.parametrize(("share", "keys", "values"), [(0.5, 16, 16), (0.75, 24, 8), (0.25, 8, 24), (0.7, 23, 9)])
def test_dha_gives_keys_and_values_budgets_of_their_own(share: float, keys: int, values: int) -> None:
    """Half of the 64 heads of 4 layers of 8; what is no whole head (22.4) goes to the keys."""
    part = ALLOCATION.get("dha")
    counts = part(problem(8, 4, 0.5, list(range(1, 9))), **part.settings({"key_share": share}))
    assert (sum(k for k, _ in counts), sum(v for _, v in counts)) == (keys, values)


@pytest.mark.parametrize(("ratio", "share", "words"), [(0.25, 0.9, "1 value heads"), (0.75, 0.9, "44 key heads")])
def test_dha_refuses_a_split_that_a_side_cannot_have(ratio: float, share: float, words: str) -> None:
    part = ALLOCATION.get("dha")
    with pytest.raises(ValueError, match=words):
        part(problem(8, 4, ratio, list(range(1, 9))), **part.settings({"key_share": share}))
