"""The layer-output score against the real model, its increments, and its memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from attention.conversion.convert import convert
from attention.families import family_of
from attention.geometry import RotaryLayout
from attention.modeling.losses import language_loss
from attention.modeling.rotary import apply_rotary, rotary_tables
from attention.plan import AttentionPlan, LayerPlan
from search_spaces.grouping.walk import asym_walk
from search_spaces.partitions import Partition, random_partition
from search_spaces.planning.planner import PlanningContext
from search_spaces.recipes.catalogue import AXES
from search_spaces.scores import LayerOutputScore, ModelScore
from search_spaces.site import Site

GROUPS: Partition = ((0, 2, 3), (1,))


def site_of(context: PlanningContext, layer: int, sides: tuple[str, ...]) -> Site:
    assert context.calibration is not None
    return Site(
        layer,
        sides,
        sides,
        context.units,
        context.heads[layer],
        context.geometry,
        context.calibration.layers[layer],
        model=context.model,
    )


@torch.no_grad()
def attention_output(model: PreTrainedModel, tokens: Tensor, layer: int) -> Tensor:
    seen: list[Tensor] = []
    module = family_of(model.config).attention_modules(model)[layer]
    handle = module.register_forward_hook(lambda _, __, output: seen.append(output[0]))
    try:
        model(tokens, use_cache=False)
    finally:
        handle.remove()
    return seen[0]


@pytest.mark.parametrize("sides", [("key",), ("value",), ("key", "value")])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 10}),  # as in Mixtral and Phi-3 it is in the config alone
        ("qwen2", {}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_the_score_is_the_error_of_the_converted_model(
    family: str, changes: dict[str, Any], sides: tuple[str, ...], make_context
) -> None:
    """Mean-pool one site of layer 0 in a real conversion and compare the attention outputs of both models."""
    context = make_context(family, **changes)
    model = context.model
    score = LayerOutputScore.from_site(site_of(context, 0, sides)).score(GROUPS)

    own = ((0,), (1,), (2,), (3,))
    first = LayerPlan.from_groups(*(GROUPS if side in sides else own for side in ("key", "value")), 4)
    plan = AttentionPlan((first, LayerPlan.identity(4)), context.geometry.head_dim)
    # The tokens of the calibration, as the fixture draws them.
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 64, (4, 24)))
    before, after = attention_output(model, tokens, 0), attention_output(convert(model, plan), tokens, 0)
    constant = context.heads[0].o_bias
    energy = before if constant is None else before - constant
    expected = -float((after - before).pow(2).sum() / energy.pow(2).sum())
    assert expected < -0.01
    assert score == pytest.approx(expected, rel=1e-3)


def test_identity_scores_zero_and_is_best(demo_context) -> None:
    score = LayerOutputScore.from_site(site_of(demo_context, 1, ("key",)), tokens=256)
    assert score.score(tuple((h,) for h in range(8))) == 0.0
    assert score.score(((0, 1), (2,), (3,), (4,), (5,), (6,), (7,))) < 0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_increments_agree_with_a_fresh_score_and_forget_on_request(seed: int, demo_context) -> None:
    """A walk's scores, with a cache so small that groups are forgotten, equal those of a score that knows nothing."""
    site = site_of(demo_context, 2, ("key",))
    small = LayerOutputScore.from_site(site, tokens=128)
    small.cache_bytes = 0
    result = asym_walk(np.eye(8), small.score, 4, iterations=6, generator=np.random.default_rng(seed))
    assert len(small._effects) <= 4
    fresh = LayerOutputScore.from_site(site, tokens=128)
    for step in result.trace:
        assert step.score == pytest.approx(fresh.score(step.partition), rel=1e-6)


@torch.no_grad()
def slow_score(score: LayerOutputScore, partition: Partition) -> float:
    """The same from scratch, head by head, by the definition of attention; remembers nothing."""
    heads, x = score.heads, score.inputs
    after = score.heads.k.float().clone(), score.heads.v.float().clone()
    for group in partition:
        members = list(group)
        for side, weight in zip(("key", "value"), after, strict=True):
            if side in score.sides:
                weight[members] = weight[members].mean(0)

    def output(k: Tensor, v: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        for h in range(heads.num_heads):
            queries, keys = (score._rotated(x @ w[h].float().T, None) for w in (heads.q, k))
            weights = torch.softmax(queries @ keys.transpose(1, 2) / k.shape[1] ** 0.5 + mask, -1)
            total += weights @ (x @ v[h].T) @ heads.o[h].float().T
        return total

    before = output(heads.k.float(), heads.v.float())
    return -float((output(*after) - before).pow(2).sum() / before.pow(2).sum())


@pytest.mark.extended
@pytest.mark.parametrize("sides", [("key",), ("key", "value")])
def test_thousands_of_iterations_stay_within_the_memory_bound(sides: tuple[str, ...], demo_context) -> None:
    """2,000 iterations meet hundreds of groups; eight are remembered, and the scores stay those from scratch."""
    score = LayerOutputScore.from_site(site_of(demo_context, 1, sides), tokens=16, length=16)
    score.cache_bytes = 8 * score.inputs.numel() * 4
    seen: set[tuple[int, ...]] = set()

    def watched(partition: Partition) -> float:
        value = score.score(partition)
        seen.update(group for group in partition if len(group) > 1)
        assert len(score._effects) <= score.limit == 8
        assert sum(effect.numel() * 4 for effect in score._effects.values()) <= score.cache_bytes
        return value

    rng = np.random.default_rng(0)
    result = asym_walk(rng.normal(size=(8, 8)), watched, 4, iterations=2000, generator=rng)
    assert len(seen) > 100
    for step in result.trace[::40]:
        assert step.score == pytest.approx(slow_score(score, step.partition), rel=1e-4)


def test_many_at_once_are_scored_as_one_by_one(demo_context) -> None:
    """For whole partitions and additive costs alike; a memo too small for all of them changes nothing."""
    rng = np.random.default_rng(0)
    partitions = [random_partition(8, groups, rng) for groups in (2, 3, 4, 5) for _ in range(10)]
    site = site_of(demo_context, 2, ("key", "value"))
    layer, small = (LayerOutputScore.from_site(site, tokens=64) for _ in range(2))
    small.cache_bytes = 0
    expected = [slow_score(layer, partition) for partition in partitions]
    for scored in (layer, small):
        np.testing.assert_allclose(scored.scores(partitions), expected, rtol=1e-4)
    assert len(small._effects) <= 5
    for name in ("least_squares", "pairs"):
        shared = dataclasses.replace(site, similarity=rng.normal(size=(8, 8)))
        cost = AXES["objective"].get(name)(shared)
        np.testing.assert_allclose(cost.scores(partitions), [cost.score(p) for p in partitions], rtol=1e-9)


def test_only_changed_groups_are_computed(demo_context) -> None:
    """By the operations that torch counts: of four groups, two or none are new."""
    score = LayerOutputScore.from_site(site_of(demo_context, 0, ("value",)), tokens=128)

    def operations(partition: Partition) -> int:
        with FlopCounterMode(display=False) as counter:
            score.score(partition)
        return counter.get_total_flops()

    four = operations(((0, 1), (2, 3), (4, 5), (6, 7)))
    assert four > 0
    assert operations(((0, 2), (1, 3), (4, 5), (6, 7))) == four / 2
    assert operations(((0, 1), (2, 3), (4, 5), (6, 7))) == 0


def test_tokens_and_lengths_are_bounded(demo_context) -> None:
    score = LayerOutputScore.from_site(site_of(demo_context, 0, ("key",)), tokens=300, length=100)
    assert score.inputs.shape[:2] == (3, 100)
    assert LayerOutputScore.from_site(site_of(demo_context, 0, ("key",)), tokens=20).inputs.shape[:2] == (1, 20)


def test_what_is_missing_is_named(demo_context) -> None:
    site = site_of(demo_context, 0, ("key",))
    bare = {**site.__dict__, "statistics": None}
    with pytest.raises(ValueError, match="calibrat"):
        LayerOutputScore.from_site(Site(**bare))
    with pytest.raises(ValueError, match="needs the model"):
        LayerOutputScore.from_site(Site(**{**site.__dict__, "model": None}))


def test_model_score_measures_each_partition_once() -> None:
    measured = []
    score = ModelScore(lambda partition: partition, lambda plan: measured.append(plan) or 2.5)  # type: ignore[arg-type,return-value]
    assert score.score(((0,), (1,))) == score.score(((0,), (1,))) == -2.5
    assert len(measured) == 1


def test_language_loss_is_the_models_own(demo_model, demo_context) -> None:
    tokens = demo_context.sequences
    with torch.no_grad():
        expected = demo_model(tokens, labels=tokens).loss.item()
    assert language_loss(demo_model, tokens, batch_size=1) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rotary_on_plain_tensors(style: str) -> None:
    """Position 0 stays, lengths stay, and a product depends on the distance alone; free dims are not touched."""
    layout = RotaryLayout(8, 4, style)
    angles = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1])
    table = torch.cat([angles, angles], 1) if style == "half" else angles.repeat_interleave(2, 1)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    turned_q, turned_k = (apply_rotary(x.expand(6, 8), table.cos(), table.sin(), layout) for x in (q, k))
    torch.testing.assert_close(turned_q[0], q)
    torch.testing.assert_close(turned_q[:, 4:], q[4:].expand(6, 4))
    torch.testing.assert_close(turned_q.norm(dim=1), q.norm().expand(6))
    products = turned_q @ turned_k.T
    torch.testing.assert_close(products[1:, 1:], products[:-1, :-1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(products[0, 0], products[3, 0])


def test_rotary_agrees_with_transformers(demo_model) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = rotary_tables(demo_model, 10)
    x = torch.randn(1, 2, 10, 32, generator=torch.Generator().manual_seed(0))
    expected, _ = apply_rotary_pos_emb(x, x, cos[None], sin[None])
    torch.testing.assert_close(apply_rotary(x, cos, sin, RotaryLayout(32, 32)), expected)


def test_rotary_refuses_tables_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="tables"):
        apply_rotary(torch.ones(3, 8), torch.ones(2, 8), torch.ones(2, 8), RotaryLayout(8, 8))
