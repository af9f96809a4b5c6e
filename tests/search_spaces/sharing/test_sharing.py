"""Which heads share weights: a worked example, a slow reference, ties, chains, counts, recipes and the joint space."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from space_points import points

from attention.heads import LayerHeads
from attention.modeling.mlp import MlpWeights, mlp_sites, read_mlp
from attention.plan import AttentionPlan, HeadShare, resolve_shares
from search_spaces.axes import SHARING
from search_spaces.planning.budgets import check_budget
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import Recipe, RecipeError, recipe
from search_spaces.sharing.matching import best_matches, match_blocks, match_heads, share_count, similarities
from search_spaces.sharing.problem import SharingProblem
from search_spaces.space.joint_space import JointSpace


def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None) -> LayerHeads:
    return LayerHeads(q, k, q if v is None else v, q.transpose(1, 2))


def random_layers(num_layers: int, heads: int, seed: int) -> list[LayerHeads]:
    generator = torch.Generator().manual_seed(seed)
    return [layer(*torch.randn(2, heads, 3, 5, generator=generator)) for _ in range(num_layers)]


def slow_shares(heads: list[LayerHeads], count: int) -> list[HeadShare]:
    """Algorithm 1 as it is printed, loop by loop (but layers and heads from 0); then each chain is followed."""
    buffer = []
    for later in range(1, len(heads)):
        for i in range(heads[0].num_heads):
            best, score = (0, 0), -1.0
            for earlier in range(later):
                for j in range(heads[0].num_heads):
                    a = torch.cat([heads[later].q[i].flatten(), heads[later].k[i].flatten()]).double()
                    b = torch.cat([heads[earlier].q[j].flatten(), heads[earlier].k[j].flatten()]).double()
                    cosine = round(float(a @ b) / math.sqrt(float(a @ a) * float(b @ b)), 9)
                    if cosine > score:
                        best, score = (earlier, j), cosine
            buffer.append(((later, i), best, score))
    buffer.sort(key=lambda entry: -entry[2])
    source = {later: earlier for later, earlier, _ in buffer[:count]}
    result = []
    for later, earlier in source.items():
        while earlier in source:
            earlier = source[earlier]
        result.append(HeadShare(*later, *earlier))
    return sorted(result)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(1, 7), st.integers(0, 1000), st.floats(0, 1))
def test_as_the_slow_reference(num_layers: int, heads: int, seed: int, part: float) -> None:
    layers = random_layers(num_layers, heads, seed)
    alpha = Fraction(int(part * (num_layers - 1) * heads), num_layers * heads)
    result = match_heads(layers, alpha)
    assert list(result) == slow_shares(layers, int(alpha * num_layers * heads))
    assert len(result) == alpha * num_layers * heads
    assert (
        all(isinstance(s, HeadShare) and s.source_layer < s.layer for s in result) and resolve_shares(result) == result
    )


def test_worked_example() -> None:
    """Two heads of one row in two layers. [Q‖K]: A = (1,0,0,0), B = (0,0,0,2); later C = (3,0,4,0), D = (0,1,0,1).

    cos(C,A) = 3/5, cos(C,B) = 0, cos(D,A) = 0, cos(D,B) = 2/(2√2) = 0.7071: D comes first, at α = 1/4 alone.
    """
    one = layer(torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]]), torch.tensor([[[0.0, 0.0]], [[0.0, 2.0]]]))
    two = layer(torch.tensor([[[3.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([[[4.0, 0.0]], [[0.0, 1.0]]]))
    cosines = similarities([(h.q, h.k) for h in (one, two)])
    assert cosines[2:, :2].tolist() == pytest.approx(np.array([[0.6, 0], [0, math.sqrt(0.5)]]), abs=1e-12)
    assert best_matches(cosines, 2) == [HeadShare(1, 1, 0, 1), HeadShare(1, 0, 0, 0)]
    assert match_heads([one, two], 0.25) == (HeadShare(1, 1, 0, 1),)
    assert match_heads([one, two], 0.5) == (HeadShare(1, 0, 0, 0), HeadShare(1, 1, 0, 1))


def test_ties_go_to_the_lowest_and_chains_to_their_roots() -> None:
    """All heads are copies up to scale: every later one goes to head 0 of layer 0, directly or by a chain."""
    x = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0))
    layers = [layer(torch.cat([x, x * 3]) * (n + 1), torch.cat([x, x * 3]) * (n + 1)) for n in range(3)]
    assert best_matches(similarities([(h.q, h.k) for h in layers]), 2) == [
        HeadShare(i, j, 0, 0) for i in (1, 2) for j in (0, 1)
    ]
    # Layer 2 is nearest to layer 1, and that to layer 0.
    turn = lambda angle: torch.tensor([[[math.cos(angle), math.sin(angle)]]])  # noqa: E731
    chain = [layer(turn(a), turn(a)) for a in (0.0, 0.3, 0.5)]
    assert match_heads(chain, Fraction(1, 3)) == (HeadShare(2, 0, 1, 0),)
    assert match_heads(chain, Fraction(2, 3)) == (HeadShare(1, 0, 0, 0), HeadShare(2, 0, 0, 0))


def test_values_and_zero_heads_do_not_decide() -> None:
    layers = random_layers(3, 4, 0)
    other = [layer(h.q, h.k, torch.randn_like(h.v)) for h in layers]
    assert match_heads(layers, 0.5) == match_heads(other, 0.5)
    empty = layer(torch.zeros(4, 3, 5), torch.zeros(4, 3, 5))
    assert np.isfinite(similarities([(h.q, h.k) for h in (empty, *layers)])).all()


@pytest.mark.parametrize(
    ("alpha", "layers", "heads", "count"),
    [(0.3, 4, 8, 9), (0.3, 32, 32, 307), (0.29, 10, 10, 29), (0.3, 10, 10, 30), (0, 4, 8, 0), (0.75, 4, 8, 24)],
)
def test_count(alpha: float, layers: int, heads: int, count: int) -> None:
    assert share_count(alpha, layers, heads) == count


@pytest.mark.parametrize(("alpha", "layers"), [(0.76, 4), (-0.1, 4), (0.1, 1)])
def test_more_than_there_is_cannot_be_shared(alpha: float, layers: int) -> None:
    with pytest.raises(ValueError, match=r"alpha must lie in \[0, .*got"):
        share_count(alpha, layers, 8)


def test_grouped_heads_are_refused() -> None:
    q, k = torch.randn(4, 3, 5), torch.randn(2, 3, 5)
    with pytest.raises(ValueError, match="layer 0.*2 key and 2 value heads for 4 query heads"):
        match_heads([LayerHeads(q, k, k, q.transpose(1, 2))], 0.2)


def test_mlp_blocks_match_by_their_input_side() -> None:
    """Block 1 of the later MLP is block 2 of the earlier one with another output; the two neurons over are ignored."""
    generator = torch.Generator().manual_seed(0)
    mlps = [
        MlpWeights(tuple(torch.randn(2, 14, 6, generator=generator)), torch.randn(6, 14), (None,) * 3) for _ in range(2)
    ]
    for ours, theirs in zip(mlps[1].inputs, mlps[0].inputs, strict=True):
        ours[3:6] = theirs[6:9]
        ours[12:] = theirs[12:]
    assert match_blocks(mlps, 4, Fraction(1, 8)) == (HeadShare(1, 1, 0, 2),)


def test_the_six_matching_functions() -> None:
    """The paper's ablation: each projection points to another earlier head, and each function follows what it reads."""
    far, other = torch.eye(4)[:3].view(3, 1, 4), torch.eye(4)[[3, 3]].view(2, 1, 4)
    one = LayerHeads(far, far, far, far.transpose(1, 2))
    # One later head whose query is like head 0 of the earlier layer, its key like head 1, its value like head 2
    two = LayerHeads(*(torch.cat([n * far[[j]], other]) for j, n in enumerate((1, 3, 4))), far.transpose(1, 2))
    part = SHARING.get("direct")

    def found(match: str, output: bool = False) -> Any:
        knobs = part.settings({"alpha": 0.17, "match": match, "output": output})
        return part(SharingProblem([one, two], lambda: ()), **knobs)

    def to(head: int) -> tuple[HeadShare, ...]:
        return (HeadShare(1, 0, 0, head),)

    # ‖: the lengths decide, as 1, 3 and 4 are concatenated
    assert {m: found(m)["shares"] for m in ("q", "k", "v", "qk", "qkv")} == {
        "q": to(0), "k": to(1), "v": to(2), "qk": to(1), "qkv": to(2),
    }  # fmt: skip
    apart = found("apart", output=True)
    assert apart == {  # the output reads the values
        "query_shares": to(0), "key_shares": to(1), "value_shares": to(2), "output_shares": to(2), "mlp_shares": (),
    }  # fmt: skip
    assert found("qk", output=True)["output_shares"] == to(1) and found("qk")["output_shares"] == ()


@pytest.mark.parametrize("name", SHARING.names())
def test_every_part_gives_shares_that_a_plan_takes(name: str, tiny_model) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    mlps = [read_mlp(site) for site in mlp_sites(model)]
    part = SHARING.get(name)
    knobs = part.settings({"mlp": True} if part.knobs else {})
    result = part(SharingProblem(random_layers(3, 4, 1), lambda: mlps), **knobs)
    plan = replace(AttentionPlan.identity(3, 4, 8), **result)
    assert AttentionPlan.from_json(plan.to_json()) == plan
    assert len(plan.shares) == len(plan.mlp_shares) == (0 if name == "none" else 3)  # 0.3 · 12 = 3.6


@pytest.mark.parametrize("name", ["directshare", "postshare"])
def test_recipes_make_plans_that_keep_the_cache(name: str, demo_context) -> None:
    chosen = recipe(name)
    plan = make_plan(chosen, 1.0, demo_context, np.random.default_rng(0))
    assert plan.kv_ratio == 1 and len(plan.shares) == 9 and not plan.mlp_shares
    assert list(plan.shares) == slow_shares(list(demo_context.heads), 9)
    with_mlp = make_plan(recipe(name, **{"sharing.mlp": True}), 1, demo_context, np.random.default_rng(1))
    assert with_mlp.shares == plan.shares and len(with_mlp.mlp_shares) == 9
    assert (
        len(make_plan(recipe(name, **{"sharing.alpha": 0.5}), 1, demo_context, np.random.default_rng(0)).shares) == 16
    )
    with pytest.raises(ValueError, match="saves weights and no KV cache.*got 0.5"):
        check_budget(chosen, 0.5, demo_context.geometry)


@pytest.mark.extended
def test_the_same_plan_in_another_process() -> None:
    code = (
        "import torch; from attention.heads import LayerHeads; from search_spaces.sharing.matching import match_heads\n"
        "g = torch.Generator().manual_seed(3); x = [torch.randn(2, 6, 3, 5, generator=g) for _ in range(4)]\n"
        "print(match_heads([LayerHeads(a, b, a, a.transpose(1, 2)) for a, b in x], 0.5))"
    )
    outs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert outs == {f"{match_heads(random_layers(4, 6, 3), 0.5)}\n"}


@pytest.mark.parametrize(
    "other", [{"fusion": "least_squares"}, {"alignment": "procrustes"}, {"grouping": "exact", "objective": "pairs"}]
)
def test_shared_heads_are_not_grouped_as_well(other: dict[str, Any]) -> None:
    similarity: dict[str, Any] = {"similarity": "cka"} if "grouping" in other else {}
    with pytest.raises(RecipeError, match=f"sharing=direct needs all heads.*so {next(iter(other))} must be"):
        Recipe("x", sharing="direct", **other, **similarity)


def test_the_joint_space_shares_at_full_cache_only(demo_context) -> None:
    choices = {"relaxation": ["none", "pull_together"], "grouping": ["neighbour", "exact"]}
    space = JointSpace([1.0, 0.25], demo_context.geometry, choices=choices)
    result = [space.to_recipe(point) for point in points(space)]
    assert {ratio for chosen, ratio in result if chosen.sharing != "none"} == {1.0}
    assert {chosen.name for chosen, _ in result} >= {"directshare", "postshare", "least_squares"}
    assert sum(chosen.sharing == "direct" for chosen, _ in result) == 1
    alphas = set()
    rng = np.random.default_rng(0)
    for _ in range(60):
        chosen, ratio = space.to_recipe(space.sample(rng))
        check_budget(chosen, ratio, demo_context.geometry)
        if chosen.sharing != "none":
            alphas.add(chosen.knobs("sharing")["alpha"])
    assert len(alphas) > 5 and all(0.05 <= alpha <= 0.5 for alpha in alphas)
    with pytest.raises(ValueError, match="kv_ratio must be 1"):
        JointSpace([0.5], demo_context.geometry, choices={"sharing": ["direct"]})
