"""Alignment changes coordinates and nothing else, and brings the heads of a group as near as it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from head_references import activations, as_mha, lifted, logits, procrustes, watch, with_heads
from torch import Tensor
from transformers import PreTrainedModel

from attention.axes import ALIGNMENT, Part
from attention.calibration.calibrate import calibrate
from attention.calibration.moments import LayerStatistics
from attention.calibration.store import Calibration
from attention.conversion.alignment.generalised import align_group, rotate_keys, rotate_values
from attention.conversion.alignment.grams import head_gram, pair_similarity
from attention.conversion.convert import convert
from attention.families import families, geometry_of
from attention.geometry import RotaryLayout
from attention.heads import LayerHeads
from attention.plan import AttentionPlan, LayerPlan

Tiny = Callable[..., PreTrainedModel]
LAYOUTS = {
    "full": RotaryLayout(8, 8),
    "partial": RotaryLayout(8, 4),
    "interleaved": RotaryLayout(8, 8, "interleaved"),
    "none": RotaryLayout.none(8),
}
PLAN = LayerPlan((0, 1, 0, 0), (0, 0, 1, 0))
MODELS = {
    "llama": {"attention_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen2, GQA": {"num_key_value_heads": 2},
    "qwen3": {"attention_bias": True},
    **{name: {} for name in sorted(families()) if name not in ("llama", "mistral", "qwen2", "qwen3")},
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def commuting(layout: RotaryLayout, seed: int) -> Tensor:
    """A random rotation that commutes with RoPE: any angle in each pair, any rotation of the free dims."""
    result = torch.zeros(layout.head_dim, layout.head_dim, dtype=torch.float64)
    angles = 2 * math.pi * torch.rand(len(layout.first), generator=torch.Generator().manual_seed(seed))
    for angle, a, b in zip(angles.tolist(), layout.first, layout.second, strict=True):
        result[a, a] = result[b, b] = math.cos(angle)
        result[b, a], result[a, b] = math.sin(angle), -math.sin(angle)
    free = torch.tensor(layout.free, dtype=torch.long)
    if len(free):
        result[free[:, None], free] = torch.linalg.qr(normal(len(free), len(free), seed=seed))[0]
    return result


def rope(layout: RotaryLayout, position: int) -> Tensor:
    """RoPE at one position as a matrix."""
    result = torch.eye(layout.head_dim, dtype=torch.float64)
    for index, (a, b) in enumerate(zip(layout.first, layout.second, strict=True)):
        angle = position / 10.0**index
        result[a, a] = result[b, b] = math.cos(angle)
        result[b, a], result[a, b] = math.sin(angle), -math.sin(angle)
    return result


# ---- two heads ----------------------------------------------------------------------------------------------------


def test_procrustes_recovers_a_random_rotation() -> None:
    x, rotation = normal(6, 50), torch.linalg.qr(normal(6, 6, seed=1))[0]
    torch.testing.assert_close(procrustes(x, rotation @ x), rotation)
    assert procrustes(x.float(), (rotation @ x).float()).dtype == torch.float64


def test_procrustes_by_hand() -> None:
    # (1, 0) goes to (0, 1) and (0, 1) to (-1, 0): a quarter turn.
    x, y = torch.tensor([[1.0, 0], [0, 1]]), torch.tensor([[0.0, -1], [1, 0]])
    quarter = torch.tensor([[0.0, -1], [1, 0]], dtype=torch.float64)
    torch.testing.assert_close(procrustes(x, y), quarter)
    torch.testing.assert_close(procrustes(x, y, RotaryLayout(2, 2)), quarter)
    # A reflection is out of reach for a rotary pair, in reach for a free map.
    mirrored = torch.tensor([[1.0, 0], [0, -1]]) @ x
    assert torch.linalg.det(procrustes(x, mirrored)) < 0
    assert torch.linalg.det(procrustes(x, mirrored + 1e-6, RotaryLayout(2, 2))) > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_rotary_procrustes_recovers_what_commutes_with_rope(name: str) -> None:
    layout = LAYOUTS[name]
    x, rotation = normal(8, 60), commuting(layout, seed=3)
    result = procrustes(x, rotation @ x, layout)
    torch.testing.assert_close(result, rotation)
    torch.testing.assert_close(result @ rope(layout, 7), rope(layout, 7) @ result)


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_admissible_rotation_is_better(name: str) -> None:
    layout = LAYOUTS[name]
    x, y = normal(8, 40), normal(8, 40, seed=1)
    best = procrustes(x, y, layout)
    torch.testing.assert_close(best @ best.T, torch.eye(8, dtype=torch.float64))
    distance = (best @ x - y).norm()
    for seed in range(50):
        assert (commuting(layout, seed) @ x - y).norm() > distance
        skew = commuting(layout, seed) - commuting(layout, seed).T  # a small turn of the same kind
        assert (best @ torch.matrix_exp(0.05 * skew) @ x - y).norm() > distance


# ---- a group ------------------------------------------------------------------------------------------------------


def gram_of(heads: Tensor) -> Tensor:
    """`[g, d, N]` tokens -> `[g, g, d, d]`."""
    return torch.einsum("ian,jbn->ijab", heads, heads) / heads.shape[-1]


def spread(heads: Tensor) -> float:
    return (heads - heads.mean(0)).square().sum().item()


@pytest.mark.parametrize("name", LAYOUTS)
def test_generalised_procrustes_is_algorithm_1_on_tokens(name: str) -> None:
    layout = LAYOUTS[name]
    heads = normal(5, 8, 200) + 2 * normal(1, 8, 200, seed=9)
    turned = heads.clone()
    for _ in range(3):  # Jin 2024, alg. 1, with the tokens themselves
        mean = turned.mean(0)
        turned = torch.stack([procrustes(head, mean, layout) @ head for head in turned])
    result = align_group(gram_of(heads), layout, iterations=3) @ heads
    torch.testing.assert_close(result, turned, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_generalised_procrustes_never_spreads_the_group(name: str) -> None:
    layout = LAYOUTS[name]
    heads = torch.stack([commuting(layout, s) @ (normal(8, 300) + 0.3 * normal(8, 300, seed=s)) for s in range(1, 5)])
    spreads = [
        spread(align_group(gram_of(heads), layout, iterations=n, tolerance=-1) @ heads) for n in (1, 2, 4, 8, 40)
    ]
    assert spreads[0] < 0.9 * spread(heads)
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(spreads))


# ---- a layer ------------------------------------------------------------------------------------------------------


def aligned(model: PreTrainedModel, calibration: Calibration, part: Part, **knobs: object) -> list[LayerHeads]:
    geometry = geometry_of(model.config)
    pairs = zip(lifted(model), calibration.layers, strict=True)
    return [part(heads, PLAN, statistics, geometry, **part.settings(knobs)) for heads, statistics in pairs]


@pytest.mark.parametrize("name", ALIGNMENT.names())
@pytest.mark.parametrize("case", MODELS)
def test_every_alignment_leaves_the_logits_alone(case: str, name: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model(case.split(",")[0], **MODELS[case])
    calibration = calibrate(model, tiny_tokens)
    part = ALIGNMENT.get(name)
    criteria = [{"criterion": c} for c in ("dist", "cos")] if name == "procrustes" else [{}]
    for knobs in criteria:
        heads = aligned(model, calibration, part, **knobs)
        changed = with_heads(as_mha(model), heads)
        torch.testing.assert_close(logits(changed, tiny_tokens), logits(model, tiny_tokens), rtol=0, atol=1e-4)
        if name == "procrustes":
            assert all((h.v - old.v).abs().max() > 0.01 for h, old in zip(heads, lifted(model), strict=True))
            turned = [(h.k - old.k).abs().max() > 0.01 for h, old in zip(heads, lifted(model), strict=True)]
            assert (
                turned == [not geometry_of(model.config).qk_norm] * 2
            )  # with a norm on queries and keys only values may turn


@pytest.mark.parametrize("criterion", ["dist", "cos"])
def test_the_demo_checkpoint_is_unchanged_and_its_groups_are_nearer(
    criterion: str, demo_model: PreTrainedModel, demo_calibration: Calibration, demo_held_out: Tensor
) -> None:
    geometry, part = geometry_of(demo_model.config), ALIGNMENT.get("procrustes")
    plan = LayerPlan.from_groups([range(4), range(4, 8)], [range(4), range(4, 8)], 8)
    before = lifted(demo_model)
    after = [
        part(h, plan, s, geometry, criterion=criterion) for h, s in zip(before, demo_calibration.layers, strict=True)
    ]
    tokens = demo_held_out[:2]
    changed = logits(with_heads(demo_model, after), tokens)
    torch.testing.assert_close(changed, logits(demo_model, tokens), rtol=0, atol=1e-4)
    for old, new, statistics in zip(before, after, demo_calibration.layers, strict=True):
        x = statistics.inputs[:4]
        for name in ("k", "v"):
            old_heads, new_heads = (activations(getattr(h, name), None, x) for h in (old, new))
            for group in plan.key_groups:
                assert spread(new_heads[list(group)]) < 0.9 * spread(old_heads[list(group)])


@pytest.mark.parametrize("case", ["llama", "qwen2", "gpt_neox", "opt"])
def test_heads_that_differ_by_rotation_alone_merge_without_loss(
    case: str, tiny_model: Tiny, tiny_tokens: Tensor
) -> None:
    model = tiny_model(case)
    geometry = geometry_of(model.config)
    turned = []
    for heads in lifted(model):
        bias = {n: None if (b := getattr(heads, n)) is None else b[:1].expand(4, -1) for n in ("k_bias", "v_bias")}
        copies = replace(heads, k=heads.k[:1].expand(4, -1, -1), v=heads.v[:1].expand(4, -1, -1), **bias)
        keys = torch.stack([commuting(geometry.rotary, s) for s in range(4)])
        values = torch.stack([commuting(RotaryLayout.none(8), s + 9) for s in range(4)])
        turned.append(rotate_values(rotate_keys(copies, keys), values))
    model = with_heads(model, turned)
    calibration = calibrate(model, tiny_tokens)
    plan = AttentionPlan((LayerPlan((0,) * 4, (0,) * 4),) * 2, 8)
    expected = logits(model, tiny_tokens)
    plain = logits(convert(model, plan), tiny_tokens)
    merged = logits(convert(model, plan, alignment="procrustes", calibration=calibration), tiny_tokens)
    assert (plain - expected).abs().max() > 0.5
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-3)


def test_groups_of_one_stay_bit_by_bit(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("qwen2")
    statistics = calibrate(model, tiny_tokens).layers[0]
    heads, geometry = lifted(model)[0], geometry_of(model.config)
    new = ALIGNMENT.get("procrustes")(heads, PLAN, statistics, geometry)
    assert torch.equal(new.k[1], heads.k[1]) and torch.equal(new.q[1], heads.q[1])
    assert torch.equal(new.v[2], heads.v[2]) and torch.equal(new.o[2], heads.o[2])
    assert new.k_bias is not None and heads.k_bias is not None and torch.equal(new.k_bias[1], heads.k_bias[1])


def test_alignment_refuses_what_it_cannot_use(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("llama")
    statistics = calibrate(model, tiny_tokens, sample_tokens=0).layers[0]
    heads, geometry, part = lifted(model)[0], geometry_of(model.config), ALIGNMENT.get("procrustes")
    with pytest.raises(ValueError, match="needs a calibration"):
        part(heads, PLAN, None, geometry)
    with pytest.raises(ValueError, match=r"lifted heads.* got \(4, 2, 4\)"):
        part(replace(heads, k=heads.k[:2]), PLAN, statistics, geometry)
    with pytest.raises(ValueError, match="sample_tokens > 0"):
        part(heads, PLAN, statistics, geometry, criterion="cos")
    with pytest.raises(ValueError, match=r"criterion must be one of \['dist', 'cos'\], got 'l1'"):
        part.settings({"criterion": "l1"})


# ---- every pair ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["dist", "cos"])
@pytest.mark.parametrize("case", ["qwen2", "gpt_neox"])
@pytest.mark.parametrize("side", ["key", "value"])
def test_pair_similarity_is_that_of_each_pair_alone(
    side: str, case: str, criterion: str, tiny_model: Tiny, tiny_tokens: Tensor
) -> None:
    model = tiny_model(case)
    statistics: LayerStatistics = calibrate(model, tiny_tokens).layers[1]
    heads, seen = lifted(model)[1], watch(model, tiny_tokens)[1]
    layout = geometry_of(model.config).rotary if side == "key" else RotaryLayout.none(8)
    gram = head_gram(heads, statistics, side, criterion)
    result = pair_similarity(gram, criterion, layout)
    rows, bias = (heads.k, heads.k_bias) if side == "key" else (heads.v, heads.v_bias)
    tokens = activations(rows, bias, seen.x).transpose(1, 2)
    if criterion == "cos":
        tokens = tokens / tokens.norm(dim=1, keepdim=True)
    for i in range(4):
        for j in range(4):
            moved = procrustes(tokens[j], tokens[i], layout) @ tokens[j]
            if criterion == "cos":
                expected = torch.cosine_similarity(moved, tokens[i], dim=0).mean()
            else:
                expected = -(moved - tokens[i]).square().sum(0).mean().sqrt()
            assert abs(result[i, j] - expected) < 2e-2 if i == j else abs(result[i, j] - expected) < 1e-3
