"""The walk step by step, and chains of walks over a model's sites: the same decisions as in one loop, in any order."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_contexts import MeasuredContext
from transformers import LlamaConfig

from attention.families import geometry_of
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.plan import AttentionPlan
from search_spaces.grouping.chain import Chain, searched_sites
from search_spaces.grouping.steps import Walk
from search_spaces.grouping.walk import asym_walk
from search_spaces.partitions import Partition
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import recipe
from search_spaces.site import SIDES


class Scripted:
    """Stands in for a generator: hands out the given numbers in order."""

    def __init__(self, order: list[int], integers: list[int], randoms: list[float]) -> None:
        self._order, self._integers, self._randoms = order, iter(integers), iter(randoms)

    def permutation(self, count: int) -> list[int]:
        return self._order[:count]

    def integers(self, high: int) -> int:
        return next(self._integers)

    def random(self) -> float:
        return next(self._randoms)


NEAR = np.array([[9.0, 1.0, 3.0, 2.0], [1.0, 9.0, 2.0, 3.0], [3.0, 2.0, 9.0, 1.0], [2.0, 3.0, 1.0, 9.0]])


def by_hand(integers: list[int], randoms: list[float]) -> Walk:
    """Four heads in two groups, p_reset = p_accept = 0.1, p_preserve = 0.2, k = 1; starts at {01} {23}."""
    generator: Any = Scripted([0, 1, 2, 3], integers, randoms)
    return Walk(4, 2, generator, accept=0.1, reset=0.1, preserve=0.2, neighbours=1)


def test_a_walk_worked_by_hand() -> None:
    """Numbers drawn, in order: reset?, a, b, preserve?, [member], accept?."""
    walk = by_hand(
        #  a, b  | a, b, back | a, b  |  a, b
        integers=[0, 0, 3, 0, 0, 1, 0, 0, 0, 0],
        randoms=[*[0.5, 0.9, 0.5], *[0.5, 0.1, 0.5], *[0.5, 0.9, 0.05], *[0.05, 0.9, 0.5]],
    )
    # 1: head 0 goes to 2, the most similar outside its group; anything beats "none".
    assert walk.propose_next(NEAR) == ((0, 2, 3), (1,))
    assert walk.propose_next(NEAR) == ((0, 2, 3), (1,)), "the same again until its score comes"
    assert walk.tell(-3.0).accepted
    # 2: head 3 goes to 1; preserve (0.1 < 0.2), so a member of that group comes back: 1 itself. Worse: not accepted.
    assert walk.propose_next(NEAR) == ((0, 1, 2), (3,))
    assert not walk.tell(-4.0).accepted
    assert walk.current == ((0, 2, 3), (1,))
    # 3: head 1 is alone, so it is swapped though nothing is preserved. Worse, but accepted by chance (0.05 < 0.1).
    assert walk.propose_next(NEAR) == ((0,), (1, 2, 3))
    step = walk.tell(-5.0)
    assert step.accepted and not step.reset
    assert (walk.current, walk.best, walk.best_score) == (((0,), (1, 2, 3)), ((0, 2, 3), (1,)), -3.0)
    # 4: reset (0.05 < 0.1) to {01} {23} before the move of step 1.
    assert walk.propose_next(NEAR) == ((0, 2, 3), (1,))
    assert walk.tell(-3.0).reset
    assert walk.found == ((0, 2, 3), (1,))


def test_what_could_not_be_measured_is_rejected() -> None:
    """Even where chance would accept it."""
    walk = by_hand([0, 0], [0.5, 0.9, 0.01])
    walk.propose_next(NEAR)
    step = walk.tell(None)
    assert not step.accepted
    assert (walk.current, walk.best) == (((0, 1), (2, 3)), None)
    assert walk.found == walk.current


def test_scores_without_a_proposal_and_scores_that_are_not_numbers_are_refused() -> None:
    walk = Walk(6, 3, np.random.default_rng(0))
    with pytest.raises(ValueError, match="nothing was proposed"):
        walk.tell(1.0)
    walk.propose_next(np.eye(6))
    with pytest.raises(ValueError, match="not a number"):
        walk.tell(float("nan"))


@pytest.mark.parametrize("symmetric", [False, True])
def test_step_by_step_is_the_loop(symmetric: bool) -> None:
    matrix = np.random.default_rng(5).normal(size=(9, 9))

    def score(partition: Partition) -> float:
        return float(np.sin([sum(group) * len(group) for group in partition]).sum())

    knobs: dict[str, Any] = {"accept": 0.3, "reset": 0.2, "preserve": 0.4, "neighbours": 2, "symmetric": symmetric}
    loop = asym_walk(matrix, score, 3, iterations=40, generator=np.random.default_rng(7), **knobs)
    walk = Walk(9, 3, np.random.default_rng(7), **knobs)
    for _ in range(40):
        walk = pickle.loads(pickle.dumps(walk))
        tried = walk.propose_next(matrix)
        walk = pickle.loads(pickle.dumps(walk))
        walk.tell(score(tried))
    assert tuple(walk.trace) == loop.trace
    assert (walk.found, walk.best_score) == (loop.partition, loop.score)


# ---- chains -------------------------------------------------------------------------------------------------------


def tiny_geometry(layers: int = 2, heads: int = 6, stored: int | None = None) -> HeadGeometry:
    return geometry_of(
        LlamaConfig(
            hidden_size=heads * 4,
            num_attention_heads=heads,
            num_key_value_heads=stored or heads,
            num_hidden_layers=layers,
            head_dim=4,
        )
    )


def similarities(geometry: HeadGeometry, seed: int = 0) -> dict[tuple[int, str], np.ndarray]:
    generator, units = np.random.default_rng(seed), geometry.num_kv_heads
    return {
        (layer, side): generator.normal(size=(units, units)) for layer in range(geometry.num_layers) for side in SIDES
    }


def score_of(plan: AttentionPlan) -> float:
    """A deterministic stand-in for minus a loss: depends on every map of the plan."""
    return -(int(plan.digest, 16) % 9973) / 9973


def chain_of(geometry: HeadGeometry, counts: Any, moves: int, seed: int = 0, **knobs: Any) -> Chain:
    sites = searched_sites(counts, geometry.num_kv_heads)
    return Chain(geometry, counts, dict.fromkeys(sites, moves), np.random.default_rng(seed), knobs)


def run(chain: Chain, near: Any, save_at: int | None = None) -> tuple[Chain, list[AttentionPlan]]:
    plans = []
    while (plan := chain.propose_next(near)) is not None:
        plans.append(plan)
        if save_at == len(plans):  # saved while a score is awaited, restored elsewhere
            chain = pickle.loads(pickle.dumps(chain))
            assert chain.propose_next(near) == plan
        chain.tell(score_of(plan))
    return chain, plans


def test_sites_come_layer_by_layer_keys_before_values() -> None:
    geometry = tiny_geometry()
    chain, plans = run(chain_of(geometry, ((3, 2), (2, 3)), 4), similarities(geometry))
    assert [site for site, _ in chain.history] == [(0, "key"), (0, "value"), (1, "key"), (1, "value")]
    stored = [tuple((layer.key_heads, layer.value_heads) for layer in plan.layers) for plan in plans]
    assert stored == [((3, 6), (6, 6))] * 4 + [((3, 2), (6, 6))] * 4 + [((3, 2), (2, 6))] * 4 + [((3, 2), (2, 3))] * 4
    assert len({plan.layers[0].key_groups for plan in plans[4:]}) == 1, "what was found stays"
    assert (chain.moves, chain.done) == (16, True)
    assert chain.plan == max(plans[12:], key=score_of)
    assert chain.score == score_of(chain.plan)


def test_a_chain_decides_as_make_plan_does() -> None:
    """The same generator and score: the plan of the recipe with objective=model."""
    geometry = tiny_geometry(layers=3, heads=8)
    near = similarities(geometry)
    walk = recipe("asymgqa", objective="model", similarity="weight", settings={"grouping.iterations": 7})
    weights = [torch.zeros(8, 4, 32) for _ in range(3)]
    heads = [LayerHeads(w, w, w, torch.zeros(8, 32, 4)) for w in weights]
    context = MeasuredContext(geometry, heads, measure=lambda recipe, plan: -score_of(plan))
    knobs = tuple(sorted(walk.knobs("similarity").items()))
    context._similarities.update({("weight", knobs, *site): matrix for site, matrix in near.items()})
    for seed in range(3):
        expected = make_plan(walk, 0.375, context, np.random.default_rng(seed))
        knobs_of_walk = {k: v for k, v in walk.knobs("grouping").items() if k != "iterations"}
        chain, _ = run(chain_of(geometry, ((3, 3),) * 3, 7, seed, **knobs_of_walk), near)
        assert chain.plan == expected


@pytest.mark.parametrize("save_at", [1, 5, 6, 11, 15])
def test_saved_and_restored_a_chain_resumes_with_the_same_decisions(save_at: int) -> None:
    geometry = tiny_geometry()
    near = similarities(geometry)
    whole, plans = run(chain_of(geometry, ((3, 2), (2, 3)), 4, seed=3, accept=0.4, reset=0.3), near)
    again, same = run(chain_of(geometry, ((3, 2), (2, 3)), 4, seed=3, accept=0.4, reset=0.3), near, save_at)
    assert same == plans
    assert (again.plan, again.score) == (whole.plan, whole.score)
    assert [walk.trace for _, walk in again.history] == [walk.trace for _, walk in whole.history]


def test_nothing_measured_leaves_a_plan_all_the_same() -> None:
    geometry = tiny_geometry()
    chain, near = chain_of(geometry, ((3, 3), (2, 2)), 2), similarities(geometry)
    while chain.propose_next(near) is not None:
        chain.tell(None)
    assert [(layer.key_heads, layer.value_heads) for layer in chain.plan.layers] == [(3, 3), (2, 2)]
    assert chain.score == -np.inf


def test_sites_without_a_choice_are_passed() -> None:
    geometry = tiny_geometry(layers=3)
    chain, plans = run(chain_of(geometry, ((1, 6), (6, 2), (1, 1)), 3), similarities(geometry))
    assert [site for site, _ in chain.history] == [(1, "value")]
    assert len(plans) == 3
    assert [(layer.key_heads, layer.value_heads) for layer in chain.plan.layers] == [(1, 6), (6, 2), (1, 1)]


def test_moves_must_fit_the_sites() -> None:
    geometry = tiny_geometry()
    for wrong in ({(0, "key"): 1}, dict.fromkeys(searched_sites(((3, 3), (3, 3)), 6), 0)):
        with pytest.raises(ValueError, match="at least one move for each of the 4 sites"):
            Chain(geometry, ((3, 3), (3, 3)), wrong, np.random.default_rng(0))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_geometry_keeps_its_counts_and_loses_no_head(data: st.DataObject) -> None:
    stored = data.draw(st.integers(2, 16))
    geometry = tiny_geometry(data.draw(st.integers(1, 3)), stored * data.draw(st.integers(1, 4)), stored)
    count = st.integers(1, stored)
    counts = tuple(data.draw(st.tuples(count, count)) for _ in range(geometry.num_layers))
    symmetric, seed = data.draw(st.booleans()), data.draw(st.integers(0, 99))
    chain = chain_of(geometry, counts, data.draw(st.integers(1, 4)), seed, symmetric=symmetric, reset=0.3)
    chain, _ = run(chain, similarities(geometry, seed))
    final = chain.plan
    assert tuple((layer.key_heads, layer.value_heads) for layer in final.layers) == counts
    for layer in final.layers:
        for groups in (layer.key_groups, layer.value_groups):
            assert all(groups)
            assert sorted(h for group in groups for h in group) == list(range(geometry.num_heads))
    assert AttentionPlan.from_json(final.to_json()) == final
