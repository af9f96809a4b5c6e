"""The change by `collapse` is at most what the remaining penalty explains, for every part of the axis.

The relaxed weights are seen from outside: a projection's response to unit vectors. The bounds are those of the
equations, derived at each function of `EXPLAINED`; a new part without one fails here, and has to say what its penalty
bounds. Legend: g heads of a group, d head dim, F fusion loss of a group (Eq. 7 summed over its pairs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.axes import Part
from attention.conversion.convert import read_layers
from attention.families import families, family_of
from attention.plan import AttentionPlan, HeadShare, LayerPlan
from trainers.losses import objective
from trainers.relaxations import RELAXATION_TRAINING
from trainers.relaxations.lagrangian import group_blocks
from trainers.relaxations.stage import relaxed_objective

GROUPED = AttentionPlan((LayerPlan((0, 0, 1, 0), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
SHARED = AttentionPlan((LayerPlan.identity(4),) * 2, 8, (HeadShare(1, 0, 0, 2), HeadShare(1, 3, 0, 2)))
PARTS = list(RELAXATION_TRAINING)
STEPS = 40
# Rates at which the penalty falls within STEPS steps on a tiny model.
KNOBS: dict[str, dict[str, Any]] = {
    "lagrangian": {"rate": 0.05, "multiplier_start": 50.0, "tolerance": 0.0},
    "hard_concrete": {"rate": 0.5},
    "pull_together": {"rate": 0.05},
}


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 64, (6, 16), generator=torch.Generator().manual_seed(0))


def made(part: Part, model: Any, plan: AttentionPlan | None = None) -> Any:
    plan = plan or (SHARED if "shares" in part.needs else GROUPED)
    knobs = part.settings(KNOBS.get(part.name, {}))
    return part(model, plan, steps=STEPS, generator=torch.Generator().manual_seed(3), **knobs)


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


def trained(relaxation: Any, ids: Tensor, stops: tuple[int, ...], rate: float = 1e-3) -> Iterator[int]:
    """Plain AdamW with the relaxation's own rates; yields at each number of steps in `stops`."""
    own = relaxation.parameter_groups()
    special = {id(p) for group in own for p in group.parameters}
    groups = [{"params": [p for p in relaxation.model.parameters() if id(p) not in special], "lr": rate}]
    for group in own:
        scale, decay = group.options(rate)
        groups.append({"params": list(group.parameters), "lr": scale * rate, "weight_decay": decay})
    optimizer, done = torch.optim.AdamW(groups), 0
    loss_fn = relaxed_objective(relaxation, objective(), lambda: done)
    for done in range(stops[-1]):
        if done in stops:
            yield done
        relaxation.model.train()
        optimizer.zero_grad()
        loss_fn(relaxation.model, ids).backward()
        optimizer.step()
    relaxation.begin(stops[-1])
    yield stops[-1]


# ---- the weights that are computed with -----------------------------------------------------------------------


@torch.no_grad()
def response(projection: Any, width: int) -> Tensor:
    """`[S·d, D + 1]`: the weight that a projection computes with, its bias as last column."""
    shift = projection(torch.zeros(1, width))
    return torch.cat([(projection(torch.eye(width)) - shift).T, shift.T], 1)


def used_heads(relaxation: Any) -> list[dict[str, Tensor]]:
    """For each layer, by "q", "k", "v": `[S, d, D + 1]` as the relaxed model uses them."""
    relaxation.model.eval()
    width, dim = relaxation.model.config.hidden_size, relaxation.plan.head_dim
    return [
        {s: response(getattr(module, f"{s}_proj"), width).unflatten(0, (-1, dim)) for s in ("q", "k", "v")}
        for module in family_of(relaxation.model.config).attention_modules(relaxation.model)
    ]


def with_bias(heads: Any, side: str) -> Tensor:
    rows, bias = getattr(heads, side), getattr(heads, f"{side}_bias")
    return torch.cat([rows, (torch.zeros(rows.shape[:2]) if bias is None else bias)[..., None]], -1)


def collapsed_heads(relaxation: Any) -> list[dict[str, Tensor]]:
    """The same of the collapsed heads, one a query head."""
    pairs = zip(relaxation.collapse(), relaxation.plan.layers, strict=True)
    return [
        {
            "q": with_bias(heads, "q"),
            "k": with_bias(heads, "k")[list(layer.key_map)],
            "v": with_bias(heads, "v")[list(layer.value_map)],
        }
        for heads, layer in pairs
    ]


def changes(relaxation: Any) -> list[float]:
    """Squared change of each layer's q, k and v weights and biases by collapsing."""
    pairs = zip(used_heads(relaxation), collapsed_heads(relaxation), strict=True)
    return [sum(float((a[s] - b[s]).square().sum()) for s in a) for a, b in pairs]


# ---- the remaining penalty explains the change ----------------------------------------------------------------


def fusion_loss_explains(relaxation: Any) -> list[float]:
    """Collapsing puts mean coefficients ω̄_j for ω_hj. Row r of head h moves by Σ_j (ω_hj - ω̄_j)_r K_jr, by Cauchy
    and Schwarz at most sqrt(Σ_j (ω_hj - ω̄_j)_r²) · sqrt(Σ_j ‖K_jr‖²). Summed over h and r, with F = Σ_h Σ_j
    mean_d (ω_hj - ω̄_j)²: the squares are at most d F max_r Σ_j ‖K_jr‖². The reported loss is F summed, over pairs.
    """
    result, losses = [], iter(relaxation.layer_losses())
    for heads, layer in zip(read_layers(relaxation.model), relaxation.plan.layers, strict=True):
        fused = [
            (side, [g for g in groups if len(g) > 1])
            for side, groups in (("k", layer.key_groups), ("v", layer.value_groups))
            if len(groups) < layer.num_heads
        ]
        if not fused:
            result.append(0.0)
            continue
        pairs = sum(len(g) * (len(g) - 1) // 2 for _, groups in fused for g in groups)
        energy = max(
            float(with_bias(heads, side)[list(g)].square().sum((0, 2)).max()) for side, groups in fused for g in groups
        )
        result.append(relaxation.plan.head_dim * energy * pairs * next(losses).item())
    return result


def masks_explain(relaxation: Any) -> list[float]:
    """z W + (1 - z) W~ becomes W~: head h moves by z_h ‖W_h - W~‖, and z² <= z on [0, 1]: the squares are at most
    Σ_h z_h times the farthest head's ‖W_h - W~‖², keys and values."""
    z = relaxation.masks()
    rows, result = iter(z), []
    for heads, layer, new in zip(
        read_layers(relaxation.model), relaxation.plan.layers, collapsed_heads(relaxation), strict=True
    ):
        if layer.is_identity:
            result.append(0.0)
            continue
        apart = sum((with_bias(heads, s) - new[s]).square().sum((1, 2)) for s in ("k", "v"))
        result.append((next(rows).sum() * apart.max()).item())
    return result


def distance_explains(relaxation: Any) -> list[float]:
    """All blocks of a star become their mean: the squares are Σ‖W - C‖², at most Σ‖W_later - W_earlier‖², the distance
    (the mean is nearer than any member), in layer 0 and layer 1 together."""
    return [sum(star.distance().item() for star in relaxation.stars)] * 2


EXPLAINED: dict[str, Callable[[Any], list[float]]] = {
    "lagrangian": fusion_loss_explains,
    "hard_concrete": masks_explain,
    "pull_together": distance_explains,
}


@torch.no_grad()
def draw_together(relaxation: Any, factor: float) -> None:
    """Scale the remaining difference between the relaxed and the collapsed weights; 0 leaves no penalty."""
    if relaxation.plan.is_shared:
        for star in relaxation.stars:
            star.value.mul_(factor)
    elif hasattr(relaxation, "log_alpha"):
        z = factor * relaxation.masks()  # without noise σ(log α) · 1.2 - 0.1
        relaxation.log_alpha.value.copy_(((z + 0.1) / 1.2).logit())
    else:
        for layer in relaxation.stand_ins:
            for projection in layer.values():
                for block in group_blocks(projection.coefficients.value, projection.groups):
                    mean = block.mean(0, keepdim=True)
                    block.copy_(mean + factor * (block - mean))


# ---- the contract ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
@pytest.mark.parametrize("family", sorted(families()))
def test_step_0_of_every_family(part: Part, family: str, tiny_model: Any, ids: Tensor) -> None:
    model = tiny_model(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    relaxation = made(part, model)
    assert relaxation.model.dtype == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # PostShare adds two products where the checkpoint has one
    torch.testing.assert_close(logits(relaxation.model, ids), logits(model, ids), atol=5e-5, rtol=0)


def test_every_part_says_what_its_penalty_explains() -> None:
    assert set(EXPLAINED) == set(RELAXATION_TRAINING.names())


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_collapse_changes_weights_by_no_more_than_the_penalty_explains(
    part: Part, family: str, tiny_model: Any, ids: Tensor
) -> None:
    """In every layer, at the start, while training, and near the end; and by a good part of it: it is no alibi."""
    relaxation = made(part, tiny_model(family))
    for _ in trained(relaxation, ids, (0, 3, 12, STEPS // 2)):
        for changed, explained in zip(changes(relaxation), EXPLAINED[part.name](relaxation), strict=True):
            assert changed <= explained * (1 + 1e-4) + 1e-10
            assert changed >= 0.02 * explained


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
def test_collapse_changes_logits_in_proportion_to_what_is_left(
    part: Part, family: str, tiny_model: Any, ids: Tensor
) -> None:
    """A tenth of the distance, a tenth of the change; no penalty, no change."""
    relaxation = made(part, tiny_model(family, seed=1))
    list(trained(relaxation, ids, (3,)))
    moved = []
    for _ in range(3):
        draw_together(relaxation, 0.1)
        gap = logits(relaxation.model, ids) - logits(relaxation.collapsed_model(), ids)
        moved.append(float(gap.square().mean().sqrt()))
    assert moved[0] > 1e-3
    for larger, smaller in pairwise(moved):
        assert larger / smaller == pytest.approx(10, rel=0.3)
    draw_together(relaxation, 0.0)
    relaxation.penalty(3)
    torch.testing.assert_close(
        logits(relaxation.model, ids), logits(relaxation.collapsed_model(), ids), atol=1e-5, rtol=0
    )
    assert sum(EXPLAINED[part.name](relaxation)) < 1e-9


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
def test_training_takes_the_change_away(part: Part, tiny_model: Any, ids: Tensor) -> None:
    """Along one training the change of the logits falls with the root of the weights' change that is explained."""
    relaxation = made(part, tiny_model("llama", attention_bias=True))
    seen = []
    for step in trained(relaxation, ids, (0, STEPS)):
        relaxation.begin(step)
        gap = logits(relaxation.model, ids) - logits(relaxation.collapsed_model(), ids)
        seen.append((sum(EXPLAINED[part.name](relaxation)) ** 0.5, float(gap.square().mean().sqrt())))
    (before, gap_before), (after, gap_after) = seen
    assert after < 0.5 * before
    assert gap_after < 0.5 * gap_before
    if part.name == "hard_concrete":  # frozen at the end
        assert relaxation.finished() and after == 0
        assert gap_after < 1e-5


def test_shared_mlp_blocks_are_part_of_the_distance(tiny_model: Any, ids: Tensor) -> None:
    """The distance is that of the heads, as without shared blocks, and of the blocks of the MLP, nothing else."""
    plan = replace(SHARED, mlp_shares=(HeadShare(1, 1, 0, 1),))
    model = tiny_model("llama")
    part = RELAXATION_TRAINING.get("pull_together")
    size, (first, second) = 48 // 4, model.model.layers
    block, slow = slice(size, 2 * size), distance_explains(made(part, model))[0]
    for name in ("gate_proj", "up_proj"):
        gap = getattr(second.mlp, name).weight[block] - getattr(first.mlp, name).weight[block]
        slow += gap.square().sum().item()
    slow += (second.mlp.down_proj.weight[:, block] - first.mlp.down_proj.weight[:, block]).square().sum().item()
    assert distance_explains(made(part, model, plan))[0] == pytest.approx(slow, rel=1e-5)
