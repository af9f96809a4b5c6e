"""Relaxations: the equations as printed, and what every part promises. A new part is collected by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.axes import Part
from attention.conversion.convert import convert, lift
from attention.families import FUSED_PROJECTIONS
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan, HeadShare, LayerPlan, PlanError
from trainers.losses import objective
from trainers.relaxations import RELAXATION_TRAINING, is_coarser, lifted
from trainers.relaxations.base import coarser_groups, open_projections
from trainers.relaxations.hard_concrete import (
    alive,
    certain_mask,
    faded,
    nearest_to_mean,
    sampled_mask,
    size_constraint,
    target_size,
)
from trainers.relaxations.lagrangian import (
    ascending,
    fusion_loss,
    group_blocks,
    head_distances,
    identity_coefficients,
    margin,
    mix,
)
from trainers.relaxations.pull_together import from_centre
from trainers.relaxations.stage import RelaxationSpec, relaxed_objective

FAMILIES = ("llama", "gpt2", "gpt_neox", "opt", "qwen3")
GROUPED = AttentionPlan((LayerPlan((0, 0, 1, 0), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
SHARED = AttentionPlan((LayerPlan.identity(4),) * 2, 8, (HeadShare(1, 0, 0, 2), HeadShare(1, 3, 0, 2)))
PARTS = list(RELAXATION_TRAINING)
STEPS = 20


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 64, (6, 16), generator=torch.Generator().manual_seed(0))


def plan_for(part: Part) -> AttentionPlan:
    """A plan that the part can reach from a tiny model."""
    return SHARED if "shares" in part.needs else GROUPED


def made(part: Part, model: Any, plan: AttentionPlan | None = None, **knobs: Any) -> Any:
    plan = plan_for(part) if plan is None else plan
    return part(model, plan, steps=STEPS, generator=torch.Generator().manual_seed(3), **part.settings(knobs))


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def optimise(relaxation: Any, ids: Tensor, steps: int, rate: float = 1e-3) -> list[float]:
    """A few plain AdamW steps with the relaxation's own rates; the losses."""
    own = relaxation.parameter_groups()
    special = {id(p) for group in own for p in group.parameters}
    groups = [{"params": [p for p in relaxation.model.parameters() if id(p) not in special], "lr": rate}]
    for group in own:
        scale, decay = group.options(rate)
        groups.append({"params": list(group.parameters), "lr": scale * rate, "weight_decay": decay})
    optimizer, losses, done = torch.optim.AdamW(groups), [], 0
    loss_fn = relaxed_objective(relaxation, objective(), lambda: done)
    relaxation.model.train()
    for done in range(steps):  # noqa: B007 - read by the loss
        loss = loss_fn(relaxation.model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    relaxation.model.eval()
    return losses


@pytest.mark.parametrize("fused", [False, True])
def test_projections_are_opened_where_a_folder_fuses_them(fused: bool, tiny_model: Any, ids: Tensor) -> None:
    """As the config of a per-layer export of Phi-3 says."""
    model = tiny_model("phi3")
    setattr(model.config, FUSED_PROJECTIONS, fused)
    start = lifted(model)
    opened, _ = open_projections(start, GROUPED)
    torch.testing.assert_close(logits(opened, ids), logits(start, ids))
    before = logits(opened, ids)
    with torch.no_grad():
        for name, parameter in opened.named_parameters():
            if "k_proj" in name:
                parameter.zero_()
    assert not torch.allclose(logits(opened, ids), before), "they are what the model computes with"


# ---- the contract of every part -------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
def test_what_it_adds_to_the_loss_is_known(part: Part, tiny_model: Any, ids: Tensor) -> None:
    relaxation = made(part, tiny_model("llama"))
    optimise(relaxation, ids, 3)
    relaxation.model.train()
    loss = relaxed_objective(relaxation, objective(), lambda: STEPS // 2)(relaxation.model, ids).item()
    added = float(relaxation.last_penalty)
    assert (added != 0) == (part.name != "pull_together")
    plain = objective()(relaxation.model, ids).item()
    assert loss - added == pytest.approx(plain, abs=1e-6 * (10 + abs(added)))


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
def test_it_starts_from_any_given_heads(part: Part, tiny_model: Any, ids: Tensor) -> None:
    grouped = tiny_model("llama", num_key_value_heads=2, attention_bias=True)
    model = lifted(grouped)
    assert plan_of(model).kv_ratio == 1
    torch.testing.assert_close(logits(model, ids), logits(grouped, ids), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(made(part, model).model, ids), logits(grouped, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
def test_collapse_gives_the_plan(part: Part, tiny_model: Any, ids: Tensor) -> None:
    relaxation = made(part, tiny_model("llama", attention_bias=True))
    plan = plan_for(part)
    optimise(relaxation, ids, 3)
    for heads, layer in zip(relaxation.collapse(), plan.layers, strict=True):
        assert heads.k.shape == (layer.key_heads, 8, 32)
        assert heads.v.shape == (layer.value_heads, 8, 32)
        assert heads.k_bias is not None and heads.k_bias.shape == (layer.key_heads, 8)
        assert not heads.k.requires_grad
    collapsed = relaxation.collapsed_model()
    assert plan_of(collapsed) == plan
    assert not any("relax" in name or "coefficients" in name for name in collapsed.state_dict())
    assert logits(collapsed, ids).isfinite().all()


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
def test_penalty_and_metrics_are_finite_and_reach_what_is_learned(part: Part, tiny_model: Any, ids: Tensor) -> None:
    relaxation = made(part, tiny_model("llama"))
    relaxation.begin(STEPS // 2)
    penalty = relaxation.penalty(STEPS // 2)
    assert penalty.shape == ()
    assert penalty.isfinite()
    (objective()(relaxation.model.train(), ids) + penalty).backward()
    learned = [p for group in relaxation.parameter_groups() for p in group.parameters]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in learned)
    assert all(math.isfinite(value) for value in relaxation.metrics().values())
    inside = {id(p) for p in relaxation.model.parameters()}
    assert all(id(p) in inside for p in learned)
    assert not relaxation.finished()


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
def test_its_state_is_in_the_weights(part: Part, tiny_model: Any, ids: Tensor) -> None:
    model = tiny_model("llama")
    first, second = made(part, model), made(part, model)
    optimise(first, ids, 4)
    second.model.load_state_dict(first.model.state_dict())
    for relaxation in (first, second):
        relaxation.model.train()
        relaxation.begin(5)
    assert torch.equal(logits(first.model, ids), logits(second.model, ids))
    assert torch.equal(first.penalty(5), second.penalty(5))
    assert first.metrics() == second.metrics()


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
def test_a_plan_that_does_not_fit_or_changes_nothing_is_refused(part: Part, tiny_model: Any) -> None:
    model = tiny_model("llama")
    plan = plan_for(part)
    with pytest.raises(PlanError, match="the plan has 3 layers"):
        made(part, model, replace(plan, layers=(*plan.layers, plan.layers[0])))
    with pytest.raises(ValueError, match=r"fuses nothing|needs a plan with shared"):
        made(part, model, AttentionPlan.identity(2, 4, 8))


# ---- DHA: Eq. 5, 7, 8 -----------------------------------------------------------------------------------------


def test_eq_5_by_hand_and_against_loops() -> None:
    omega = torch.tensor([[1.0, 0.5], [2.0, 0.0], [0.0, 1.0], [1.0, 1.0], [3.0, 3.0]])
    groups = ((0, 2), (1,))
    rows = torch.tensor([[[1.0], [10.0]], [[2.0], [20.0]], [[3.0], [30.0]]])  # [S=3, d=2, D=1]
    # head 0: (1, .5) ∘ row 0 + (2, 0) ∘ row 2; head 2: (0, 1) ∘ row 0 + (1, 1) ∘ row 2; head 1: 3 x row 1
    expected = torch.tensor([[[7.0], [5.0]], [[6.0], [60.0]], [[3.0], [40.0]]])
    assert torch.equal(mix(omega, groups, rows), expected)
    assert torch.equal(mix(omega, groups, rows[..., 0]), expected[..., 0])  # biases mix alike
    groups = ((0, 3, 4), (1,), (2, 5))
    omega, rows = normal(14, 8), normal(6, 8, 5, seed=1)
    slow = torch.zeros_like(rows)
    for block, group in zip(group_blocks(omega, groups), groups, strict=True):
        for i, h in enumerate(group):
            for j, other in enumerate(group):
                slow[h] += torch.diag(block[i, j]) @ rows[other]
    torch.testing.assert_close(mix(omega, groups, rows), slow)
    assert torch.equal(mix(identity_coefficients(groups, 8), groups, rows), rows)
    assert torch.equal(mix(identity_coefficients(groups, 1), groups, rows), rows)


def test_eq_7_by_hand_and_against_loops() -> None:
    block = torch.tensor([[[1.0], [0.0]], [[0.5], [0.5]]])  # g = 2: 1/2 ((1 - .5)² + (0 - .5)²) = 1/4
    assert float(head_distances(block)[0, 1]) == 0.25
    assert float(fusion_loss(block)) == 0.25
    block, slow = normal(4, 4, 3), 0.0
    for h in range(4):
        for other in range(h + 1, 4):
            pair = sum(float((block[h, j] - block[other, j]).square().mean()) for j in range(4)) / 4
            assert float(head_distances(block)[h, other]) == pytest.approx(pair, rel=1e-5)
            slow += pair
    assert float(fusion_loss(block)) == pytest.approx(slow, rel=1e-5)


def test_the_normalised_fusion_loss_of_identity_is_two_over_g(tiny_model: Any) -> None:
    single = LayerPlan((0,) * 4, (0,) * 4)
    plan = AttentionPlan((single, LayerPlan.identity(4)), head_dim=8)  # the untouched layer does not count
    for per_dimension in (True, False):
        relaxation = made(RELAXATION_TRAINING.get("lagrangian"), tiny_model("llama"), plan, per_dimension=per_dimension)
        assert relaxation.fusion_loss().item() == pytest.approx(2 / 4)


def test_margin_of_eq_8() -> None:
    assert margin(0, 200) == 1
    assert margin(100, 200) == pytest.approx(0.999**100 / 2)
    assert margin(100, 200) == pytest.approx(0.4524, abs=1e-4)
    assert margin(200, 200) == margin(300, 200) == margin(0, 0) == 0


def test_eq_8_is_minimised_by_all_and_maximised_by_the_multiplier(tiny_model: Any) -> None:
    relaxation = made(
        RELAXATION_TRAINING.get("lagrangian"), tiny_model("llama"), margin_fraction=0.5, multiplier_start=2.0
    )
    loss = relaxation.fusion_loss().item()
    assert relaxation.penalty(5).item() == pytest.approx(2 * (loss - margin(5, 10)))
    relaxation.penalty(5).backward()
    # The optimiser goes against the gradient: a negative one lets the multiplier increase by as much as Eq. 8 is
    # violated.
    assert float(relaxation.multiplier.value.grad) == pytest.approx(-(loss - margin(5, 10)))
    assert relaxation.penalty(0).item() == 0  # the margin is 1, the loss is not
    x = torch.tensor([3.0], requires_grad=True)
    (ascending(x) * 5).sum().backward()
    assert x.grad is not None and float(x.grad) == -5


def test_dha_draws_heads_together_and_ends_by_itself(tiny_model: Any, ids: Tensor) -> None:
    relaxation = made(
        RELAXATION_TRAINING.get("lagrangian"),
        tiny_model("llama"),
        rate=0.05,
        margin_fraction=0.2,
        multiplier_start=50.0,
    )
    before = relaxation.metrics()
    optimise(relaxation, ids, 60)
    after = relaxation.metrics()
    assert after["multiplier"] > before["multiplier"] + 0.5
    assert after["fusion_loss"] < 0.05 < before["fusion_loss"]
    assert after["own_share"] < 0.7


@torch.no_grad()
def equalise(relaxation: Any) -> None:
    """Give all heads of a group the same coefficients."""
    for layer in relaxation.stand_ins:
        for projection in layer.values():
            for block in group_blocks(projection.coefficients.value, projection.groups):
                block.copy_(block.mean(0, keepdim=True).expand_as(block))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("per_dimension", [True, False])
def test_without_fusion_loss_dha_collapses_exactly(
    family: str, per_dimension: bool, tiny_model: Any, ids: Tensor
) -> None:
    model = tiny_model(family)
    relaxation = made(RELAXATION_TRAINING.get("lagrangian"), model, per_dimension=per_dimension)
    with torch.no_grad():
        for group in relaxation.parameter_groups():
            for p in group.parameters:
                p += 0.2 * normal(*p.shape)
    unequal = (logits(relaxation.model, ids) - logits(relaxation.collapsed_model(), ids)).abs().max()
    equalise(relaxation)
    assert relaxation.fusion_loss().item() < 1e-12
    relaxation.penalty(0)
    assert relaxation.finished()
    torch.testing.assert_close(
        logits(relaxation.collapsed_model(), ids), logits(relaxation.model, ids), atol=1e-5, rtol=1e-5
    )
    assert unequal > 0.1
    assert (logits(relaxation.model, ids) - logits(model, ids)).abs().max() > 0.1


def test_what_collapse_changes_falls_with_the_fusion_loss(tiny_model: Any, ids: Tensor) -> None:
    """The change is of the order of the square root of the loss, a distance of coefficients."""
    changes, losses = [], []
    for size in (1e-1, 1e-2, 1e-3):
        relaxation = made(RELAXATION_TRAINING.get("lagrangian"), tiny_model("llama"))
        equalise(relaxation)
        with torch.no_grad():
            for p in relaxation.parameter_groups()[0].parameters:
                p += size * normal(*p.shape)
        losses.append(relaxation.fusion_loss().item())
        changes.append(float((logits(relaxation.model, ids) - logits(relaxation.collapsed_model(), ids)).std()))
    for (a, b), (x, y) in zip(zip(changes, changes[1:]), zip(losses, losses[1:])):  # noqa: B905, RUF007
        assert a / b == pytest.approx(math.sqrt(x / y), rel=0.3)


def test_stages_of_ever_fewer_heads(tiny_model: Any, ids: Tensor) -> None:
    part, model = RELAXATION_TRAINING.get("lagrangian"), tiny_model("llama", attention_bias=True)
    halved = AttentionPlan((LayerPlan((0, 1, 0, 1), (0, 0, 1, 1)),) * 2, head_dim=8)
    single = AttentionPlan((LayerPlan((0,) * 4, (0, 0, 1, 1)),) * 2, head_dim=8)
    first = made(part, model, halved)
    optimise(first, ids, 2)
    between = first.collapsed_model()
    second = made(part, between, single)
    torch.testing.assert_close(logits(second.model, ids), logits(between, ids), atol=1e-5, rtol=0)
    assert second.distances("k")[0].shape == (2, 2)
    assert second.distances("v") == [None, None]
    assert plan_of(second.collapsed_model()) == single
    assert is_coarser(halved, single)
    assert not is_coarser(single, halved)
    with pytest.raises(PlanError, match=r"layer 0, key_map: .*must share it in the new plan.*lift the model"):
        made(part, second.collapsed_model(), halved)


def test_coarser_groups() -> None:
    assert coarser_groups((0, 1, 2, 2), (0, 0, 1, 1), "") == ((0, 1), (2,))
    assert coarser_groups((0, 1, 0), (0, 1, 0), "") == ((0,), (1,))


# ---- Align: Eq. 27 to 29 --------------------------------------------------------------------------------------


def test_hard_concrete_by_hand() -> None:
    log_alpha = torch.tensor([0.0, math.log(11), -math.log(11), 20.0])
    # (ζ - γ) σ + γ: 1.2 / 2 - .1 = .5; σ(log 11) = 11/12 gives 1.1 - .1 = 1, and its mirror image 0
    torch.testing.assert_close(certain_mask(log_alpha), torch.tensor([0.5, 1.0, 0.0, 1.0]), atol=1e-6, rtol=0)
    uniform = torch.tensor([0.5, 0.9, 0.1])
    expected = [1.2 / (1 + math.exp(-math.log(u / (1 - u)) * 1.5)) - 0.1 for u in uniform.tolist()]
    expected = [min(1.0, max(0.0, x)) for x in expected]
    torch.testing.assert_close(sampled_mask(torch.zeros(3), uniform), torch.tensor(expected), atol=1e-6, rtol=0)
    assert float(alive(torch.tensor(0.0))) == pytest.approx(1 / (1 + math.exp(-2 / 3 * math.log(11))))
    samples = sampled_mask(torch.full((20_000,), -1.0), torch.rand(20_000, generator=torch.Generator().manual_seed(0)))
    assert float((samples > 0).float().mean()) == pytest.approx(float(alive(torch.tensor(-1.0))), abs=0.02)


def test_eq_27_and_eq_29_by_hand() -> None:
    z, own = torch.tensor([1.0, 0.25, 0.0]), torch.tensor([[4.0], [8.0], [2.0]])
    mixed = faded(z, own, torch.tensor([[0.0], [1.0]]), torch.tensor([0, 0, 1]))
    assert torch.equal(mixed, torch.tensor([[4.0], [2.0], [1.0]]))
    assert float(size_constraint(torch.tensor(0.75), 0.25)) == 0.5 + 0.25
    assert float(size_constraint(torch.tensor(0.25), 0.75)) == -0.5 + 0.25  # negative, as printed
    assert [target_size(s, 30.0) for s in (0, 15, 30, 90)] == [1, 0.5, 0, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_masks_collapse_exactly(family: str, tiny_model: Any, ids: Tensor) -> None:
    relaxation = made(RELAXATION_TRAINING.get("hard_concrete"), tiny_model(family))
    optimise(relaxation, ids, 3)
    collapsed = logits(relaxation.collapsed_model(), ids)
    assert not relaxation.finished()
    assert (collapsed - logits(relaxation.model, ids)).abs().max() > 0.1
    relaxation.begin(16)  # 80 % of 20 steps
    assert relaxation.finished()
    assert relaxation.penalty(16).item() == 0
    torch.testing.assert_close(collapsed, logits(relaxation.model, ids), atol=1e-5, rtol=1e-5)


def test_align_starts_at_the_group_means_and_masks_fall(tiny_model: Any, ids: Tensor) -> None:
    model = tiny_model("llama")
    relaxation = made(RELAXATION_TRAINING.get("hard_concrete"), model, rate=1.0)
    for fresh, own, layer in zip(relaxation.collapse(), lift(model), GROUPED.layers, strict=True):
        for index, group in enumerate(layer.key_groups):
            torch.testing.assert_close(fresh.k[index], own.k[list(group)].mean(0))
    mean = logits(convert(model, GROUPED), ids)
    torch.testing.assert_close(logits(relaxation.collapsed_model(), ids), mean, atol=1e-5, rtol=1e-5)
    assert relaxation.metrics()["mean_mask"] == 1
    optimizer = torch.optim.Adam(relaxation.parameter_groups()[0].parameters, lr=1.0)
    for step in range(12):  # Eq. 29 alone: with the loss of a random model on random text masks may stay open
        optimizer.zero_grad()
        relaxation.penalty(step).backward()
        optimizer.step()
    assert relaxation.metrics()["masks_open"] == 0


def test_new_heads_may_start_as_the_head_nearest_to_the_mean(tiny_model: Any, ids: Tensor) -> None:
    """Heads 0, 4, 5 have the mean 3, to which 4 is nearest: the second of the three."""
    weight = torch.tensor([0.0, 4.0, 5.0, 7.0]).reshape(4, 1, 1)
    assert nearest_to_mean(weight, ((0, 1, 2), (3,))) == ((1,), (3,))
    model = tiny_model("llama")
    relaxation = made(RELAXATION_TRAINING.get("hard_concrete"), model, new_heads="nearest")
    torch.testing.assert_close(logits(relaxation.model, ids), logits(model, ids), atol=1e-5, rtol=1e-5)
    for fresh, own, layer in zip(relaxation.collapse(), lift(model), GROUPED.layers, strict=True):
        for index, group in enumerate(layer.value_groups):
            distances = [float((own.v[head] - own.v[list(group)].mean(0)).norm()) for head in group]
            assert torch.equal(fresh.v[index], own.v[group[distances.index(min(distances))]])


def test_masks_are_reported_by_layer(tiny_model: Any) -> None:
    relaxation = made(RELAXATION_TRAINING.get("hard_concrete"), tiny_model("llama"))
    with torch.no_grad():
        relaxation.log_alpha.value[0] = 0.0  # a mask of 1/2, by Eq. 13; the others are 1
    metrics = relaxation.metrics()
    by_layer = [metrics[f"mean_mask_layer_{index}"] for index in range(len(GROUPED.layers))]
    assert by_layer == pytest.approx([0.5] + [1.0] * (len(GROUPED.layers) - 1))
    assert metrics["mean_mask"] == pytest.approx(sum(by_layer) / len(by_layer))


def test_noise_is_a_function_of_generator_and_step(tiny_model: Any, ids: Tensor) -> None:
    part, model = RELAXATION_TRAINING.get("hard_concrete"), tiny_model("llama")

    def sample(seed: int, step: int) -> Tensor:
        relaxation = part(model, GROUPED, steps=STEPS, generator=torch.Generator().manual_seed(seed), **part.settings())
        relaxation.model.train()
        torch.rand(seed + 1)  # the global generator has no say
        relaxation.begin(step)
        return relaxation.masks().detach()

    assert torch.equal(sample(1, 4), sample(1, 4))
    assert not torch.equal(sample(1, 4), sample(1, 5))
    assert not torch.equal(sample(1, 4), sample(2, 4))


def test_align_needs_one_head_per_query_head(tiny_model: Any) -> None:
    with pytest.raises(PlanError, match="lift the model first"):
        made(RELAXATION_TRAINING.get("hard_concrete"), tiny_model("llama", num_key_value_heads=2))


# ---- PostShare ------------------------------------------------------------------------------------------------


def test_the_coordinates_of_a_star_by_hand() -> None:
    """Weights 6, 3, 0 with the first as the earlier one: mean 3, differences -3, -6; relative to the mean 3, 0, -3."""
    assert from_centre(torch.tensor([[-3.0], [-6.0]])).flatten().tolist() == [3.0, 0.0, -3.0]


def test_what_shrinks_is_the_distance_of_the_pairs(tiny_model: Any) -> None:
    model = tiny_model("llama", attention_bias=True)
    relaxation = made(RELAXATION_TRAINING.get("pull_together"), model)
    heads, slow = lift(model), 0.0
    for share in SHARED.shares:
        for name in ("q", "k", "v", "q_bias", "k_bias", "v_bias"):
            later, earlier = getattr(heads[1], name)[share.head], getattr(heads[0], name)[share.source_head]
            slow += float((later - earlier).square().sum())
    assert sum(star.distance().item() for star in relaxation.stars) == pytest.approx(slow, rel=1e-5)
    assert relaxation.metrics() == {"distance": 1.0}


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_the_pull_is_as_strong_as_its_rate_says_at_any_model_rate(rate: float, tiny_model: Any, ids: Tensor) -> None:
    """(1 - rate)^2n of the squared distance remains after n steps, up to the moves of Adam meanwhile; added to the loss
    under Adam, a penalty of any weight leaves nearly all of it at such a small learning rate."""
    relaxation = made(RELAXATION_TRAINING.get("pull_together"), tiny_model("llama"), rate=rate)
    optimise(relaxation, ids, 10, rate=1e-5)
    assert relaxation.metrics()["distance"] == pytest.approx((1 - rate) ** 20, rel=0.1)


def test_the_mean_of_a_star_stays_under_the_pull_alone(tiny_model: Any) -> None:
    """A head of layer 0 and the two that are to share it, as the relaxed model uses them: both sides move."""
    relaxation = made(RELAXATION_TRAINING.get("pull_together"), tiny_model("llama"))
    layers = relaxation.model.model.layers

    def used() -> Tensor:
        rows = [layer.self_attn.k_proj(torch.eye(32)).T.unflatten(0, (4, 8)) for layer in layers]
        return torch.stack([rows[0][2], rows[1][0], rows[1][3]]).detach()

    before = used()
    with torch.no_grad():
        for star in relaxation.stars:
            star.value.mul_(0.5)
    torch.testing.assert_close(used(), before.mean(0) + (before - before.mean(0)) / 2, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_pulled_pairs_meet_and_then_sharing_changes_nothing(family: str, tiny_model: Any, ids: Tensor) -> None:
    plan = replace(SHARED, mlp_shares=(HeadShare(1, 1, 0, 1),))
    relaxation = made(RELAXATION_TRAINING.get("pull_together"), tiny_model(family), plan, rate=0.5)
    apart = (logits(relaxation.model, ids) - logits(relaxation.collapsed_model(), ids)).abs().max()
    optimise(relaxation, ids, 20)
    assert relaxation.metrics()["distance"] < 0.05
    with torch.no_grad():
        for star in relaxation.stars:
            star.value.zero_()
    assert relaxation.metrics()["distance"] == 0 and relaxation.finished()
    collapsed = relaxation.collapsed_model()
    assert plan_of(collapsed) == plan
    torch.testing.assert_close(logits(collapsed, ids), logits(relaxation.model, ids), atol=1e-5, rtol=1e-5)
    assert apart > 0.1


def test_outputs_and_single_projections_are_pulled_as_they_are_shared(tiny_model: Any, ids: Tensor) -> None:
    layers = (LayerPlan.identity(4),) * 2
    share = (HeadShare(1, 0, 0, 2),)
    model = tiny_model("llama")
    heads = lift(model)
    plan = AttentionPlan(layers, 8, key_shares=share, output_shares=share)
    relaxation = made(RELAXATION_TRAINING.get("pull_together"), model, plan)
    torch.testing.assert_close(logits(relaxation.model, ids), logits(model, ids), atol=1e-5, rtol=0)
    slow = sum(float((getattr(heads[1], s)[0] - getattr(heads[0], s)[2]).square().sum()) for s in "ko")
    assert sum(star.distance().item() for star in relaxation.stars) == pytest.approx(slow, rel=1e-5)
    with torch.no_grad():
        for star in relaxation.stars:
            star.value.zero_()
    collapsed = relaxation.collapsed_model()
    assert plan_of(collapsed) == plan
    torch.testing.assert_close(logits(collapsed, ids), logits(relaxation.model, ids), atol=1e-5, rtol=1e-5)


# ---- stages ---------------------------------------------------------------------------------------------------


def test_a_spec_is_json_and_checked() -> None:
    spec = RelaxationSpec("lagrangian", (GROUPED.to_json(),), 10, {"rate": 0.05})
    assert RelaxationSpec.from_dict(spec.to_dict()) == spec
    assert spec.knobs["base"] == 0.999
    with pytest.raises(ValueError, match="has no setting 'speed'"):
        RelaxationSpec("lagrangian", (GROUPED.to_json(),), 10, {"speed": 1})
    with pytest.raises(ValueError, match="relaxation must be one of"):
        RelaxationSpec("magic", (GROUPED.to_json(),), 10)
    single = AttentionPlan((LayerPlan((0,) * 4, (0,) * 4),) * 2, head_dim=8)
    with pytest.raises(ValueError, match="whole groups of the one before"):
        RelaxationSpec("lagrangian", (single.to_json(), GROUPED.to_json()), 10)
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        RelaxationSpec("lagrangian", (single.to_json(),), 0)


def test_a_spec_lifts_a_model_whose_heads_the_plan_splits(tiny_model: Any, ids: Tensor) -> None:
    model = tiny_model("llama", num_key_value_heads=2)
    crossing = AttentionPlan((LayerPlan((0, 1, 0, 1), (0, 1, 1, 0)),) * 2, head_dim=8)
    relaxation = RelaxationSpec("lagrangian", (crossing.to_json(),), 10).install(model, 0, 0)
    torch.testing.assert_close(logits(relaxation.model, ids), logits(model, ids), atol=1e-5, rtol=0)
    assert plan_of(relaxation.collapsed_model()) == crossing
