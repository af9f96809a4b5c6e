"""Heads wider than the checkpoint's: nothing is lost where they hold all, and what is lost is what is said to be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from head_references import Seen, activations, lifted, logits, watch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attention.cache_formats import CacheFormatError, CachePair
from attention.calibration.calibrate import calibrate
from attention.calibration.moments import LayerStatistics, packed
from attention.conversion.convert import convert
from attention.conversion.fusion.costs import KeyCost, ValueCost
from attention.conversion.fusion.estimates import LeadingValueCost, PooledValueCost
from attention.conversion.fusion.least_squares import least_squares_fuse
from attention.conversion.fusion.pooled import mean_fuse
from attention.engine_cache import engine_cache
from attention.families import families, geometry_of
from attention.geometry import HeadGeometry, RotaryLayout
from attention.heads import LayerHeads
from attention.modeling.grouped import cache_bytes
from attention.modeling.growing_cache import cache_of, next_output
from attention.plan import AttentionPlan, LayerPlan, PlanError

Tiny = Callable[..., PreTrainedModel]
FAMILIES = sorted(set(families()) - {"gemma4_text"})  # whose values pass a norm
ONE = (0, 0, 0, 0)


def wide_plan(geometry: HeadGeometry, width: int) -> AttentionPlan:
    """One head of each side for all four query heads; keys under a norm do not change."""
    keys = (geometry.kv_map, 1) if geometry.qk_norm else (ONE, width)
    layer = LayerPlan(keys[0], ONE, keys[1], width)
    return AttentionPlan((layer,) * geometry.num_layers, geometry.head_dim)


def converted(model: PreTrainedModel, width: int, tokens: Tensor) -> PreTrainedModel:
    plan = wide_plan(geometry_of(model.config), width)
    return convert(model, plan, fusion="least_squares", calibration=calibrate(model, tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_head_as_wide_as_all_loses_nothing(
    family: str, tiny_model: Tiny, tiny_tokens: Tensor, tmp_path: Path
) -> None:
    model = tiny_model(family)
    wide = converted(model, geometry_of(model.config).num_kv_heads, tiny_tokens)
    torch.testing.assert_close(logits(wide, tiny_tokens), logits(model, tiny_tokens), rtol=0, atol=5e-4)
    wide.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, tiny_tokens), logits(wide, tiny_tokens))


def test_keys_of_a_stablelm_without_norms_are_wide(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("stablelm", qk_layernorm=False)
    wide = converted(model, geometry_of(model.config).num_kv_heads, tiny_tokens)
    torch.testing.assert_close(logits(wide, tiny_tokens), logits(model, tiny_tokens), rtol=0, atol=5e-4)


def test_keys_are_wide_where_a_config_scales_scores_by_a_whole_number(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("granite", attention_multiplier=1)
    wide = converted(model, geometry_of(model.config).num_kv_heads, tiny_tokens)
    torch.testing.assert_close(logits(wide, tiny_tokens), logits(model, tiny_tokens), rtol=0, atol=5e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_decoding_gives_what_whole_sequences_give(family: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model(family)
    wide = converted(model, 2, tiny_tokens)
    output = wide(tiny_tokens[:, :20], use_cache=True)
    steps = [output.logits]
    for t in range(20, 24):
        output = next_output(wide, tiny_tokens[:, t : t + 1], output)
        steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, 1), logits(wide, tiny_tokens), rtol=0, atol=2e-5)
    plan, cached = wide.plan, cache_bytes(cache_of(output)) / tiny_tokens.numel()
    windowed = getattr(model.config, "sliding_window", None)
    if not windowed:
        assert cached == plan.kv_bytes_per_token(torch.float32)


def slow_key_error(heads: LayerHeads, fused: LayerHeads, h: int, seen: Seen, layout: RotaryLayout, width: int) -> float:
    """Mean squared logit change of a head, queries and keys independent, over the angles that RoPE may put there."""
    q, k = (activations(getattr(heads, n), getattr(heads, f"{n}_bias"), seen.x)[h] for n in "qk")
    q_new = activations(fused.q, fused.q_bias, seen.x)[h].unflatten(1, (width, -1)) / width**0.5
    k_new = activations(fused.k, fused.k_bias, seen.x)[0].unflatten(1, (width, -1))
    total = 0.0
    for a, b in zip(layout.first, layout.second, strict=True):
        for angle in torch.arange(4) * torch.pi / 2:  # four angles average the square of a cosine exactly
            turn = torch.polar(torch.tensor(1.0).double(), angle.double())
            before = (torch.complex(q[:, a], q[:, b]).conj()[:, None] * turn * torch.complex(k[:, a], k[:, b])).real
            after = torch.zeros_like(before)
            for j in range(width):
                query = torch.complex(q_new[:, j, a], q_new[:, j, b]).conj()[:, None]
                after += (query * turn * torch.complex(k_new[:, j, a], k_new[:, j, b])).real
            total += (before - after).square().mean().item() / 4
    if free := list(layout.free):
        change = q[:, free] @ k[:, free].T - torch.einsum("njf,mjf->nm", q_new[..., free], k_new[..., free])
        total += (change - change.mean(1, keepdim=True)).square().mean().item()
    return total


def slow_value_error(heads: LayerHeads, fused: LayerHeads, h: int, seen: Seen) -> float:
    """Mean squared change of what a head adds to the output of its layer."""
    mixed = seen.mixed(h)
    old, new = (
        activations(x.v[s : s + 1], None if x.v_bias is None else x.v_bias[s : s + 1], mixed)[0] @ x.o[h].double().T
        for x, s in ((heads, h), (fused, 0))
    )
    change = old - new
    if heads.o_bias is not None and heads.sinks is None:
        change = change - change.mean(0)
    return change.square().sum(-1).mean().item()


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {"attention_bias": True}), ("qwen2", {"num_key_value_heads": 2}), ("gpt_neox", {}), ("opt", {})],
)
def test_costs_are_the_errors_measured_on_tokens(
    family: str, settings: dict[str, object], width: int, tiny_model: Tiny, tiny_tokens: Tensor
) -> None:
    model = tiny_model(family, **settings)
    geometry, statistics = geometry_of(model.config), calibrate(model, tiny_tokens).layers[1]
    heads, seen = lifted(model)[1], watch(model, tiny_tokens)[1]
    fused = least_squares_fuse(heads, LayerPlan(ONE, ONE, width, width), statistics, geometry, sweeps=0)
    keys = KeyCost(heads, statistics, geometry, width).cost(range(4))
    values = ValueCost(heads, statistics, width=width).cost(range(4))
    slow_keys = sum(slow_key_error(heads, fused, h, seen, geometry.rotary, width) for h in range(4))
    slow_values = sum(slow_value_error(heads, fused, h, seen) for h in range(4))
    assert keys == pytest.approx(slow_keys, rel=1e-3, abs=1e-4)
    assert values == pytest.approx(slow_values, rel=2e-3, abs=1e-4)
    lossless = geometry.num_kv_heads <= width
    assert (keys < 1e-4) == (values < 1e-4) == lossless


def test_a_wide_head_is_never_worse_than_narrow_ones_of_the_same_bytes(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    """Plain groups are the special case in which each slice is read by its own group alone."""
    for family in ("llama", "gpt_neox", "opt"):
        model = tiny_model(family)
        geometry, statistics = geometry_of(model.config), calibrate(model, tiny_tokens).layers[0]
        heads = lifted(model)[0]
        narrow = KeyCost(heads, statistics, geometry)
        two = min(
            narrow.cost(group) + narrow.cost([h for h in range(4) if h not in group])
            for size in (1, 2)
            for group in itertools.combinations(range(4), size)
        )
        assert KeyCost(heads, statistics, geometry, 2).cost(range(4)) <= two * (1 + 1e-6)


def test_worked_example() -> None:
    """Two heads that have nothing in common: one head as wide as one of them loses one, as wide as both nothing."""
    eye = torch.eye(4)
    rows = torch.stack([eye[:2], eye[2:]])
    heads = LayerHeads(rows, rows, rows, rows.transpose(1, 2).contiguous())
    moment = torch.eye(5, dtype=torch.float64)  # inputs of mean 0 and covariance 1
    query = torch.eye(2, dtype=torch.float64).repeat(2, 1, 1)
    statistics = LayerStatistics(9, moment, packed(moment.float().repeat(2, 1, 1)), query, torch.zeros(0, 0, 4))
    geometry = HeadGeometry("llama", 1, 4, 2, 2, 2, RotaryLayout(2, 2), False, False, False, False, False, 16, 16)
    narrow, wide = (LayerPlan((0, 0), (0, 0), width, width) for width in (1, 2))
    assert ValueCost(heads, statistics, geometry).cost((0, 1)) == pytest.approx(2.0)
    assert ValueCost(heads, statistics, geometry, width=2).cost((0, 1)) == pytest.approx(0.0, abs=1e-6)
    assert KeyCost(heads, statistics, geometry, 2).cost((0, 1)) == pytest.approx(0.0, abs=1e-6)
    assert KeyCost(heads, statistics, geometry).cost((0, 1)) > 0.5
    for plan, lost in ((narrow, 2.0), (wide, 0.0)):
        fused = least_squares_fuse(heads, plan, statistics, geometry)
        read = torch.einsum("hda,ae->hde", fused.o, fused.v[0])
        whole = torch.einsum("hda,hae->hde", heads.o, heads.v)
        assert float((read - whole).square().sum()) == pytest.approx(lost, abs=1e-5)


def test_estimates_of_value_costs_follow_the_width(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("llama")
    statistics, heads = calibrate(model, tiny_tokens).layers[0], lifted(model)[0]
    exact = ValueCost(heads, statistics, width=2).costs([(0, 1, 2, 3), (0, 1, 2, 3)])
    pooled = PooledValueCost(heads, statistics, 40, width=2)
    leading = LeadingValueCost(pooled, statistics)
    torch.testing.assert_close(leading.costs([(0, 1, 2, 3)] * 2), exact, rtol=0.1, atol=1e-6)
    assert float(pooled.cost((0, 1, 2, 3))) < float(PooledValueCost(heads, statistics, 40).cost((0, 1, 2, 3)))


def test_a_head_whose_moments_are_not_definite_is_no_free_member_of_a_group(
    tiny_model: Tiny, tiny_tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As moments may be that were rounded to bfloat16."""
    model = tiny_model("llama")
    statistics, heads = calibrate(model, tiny_tokens).layers[0], lifted(model)[0]
    leading = LeadingValueCost(PooledValueCost(heads, statistics, 40), statistics)
    factorise = torch.linalg.cholesky_ex

    def second_fails(matrix: Tensor) -> tuple[Tensor, Tensor]:
        factor, failed = factorise(matrix)
        factor[1] = 1e-9 * torch.eye(matrix.shape[-1])
        failed[1] = 3
        return factor, failed

    before = float(leading.costs([(0, 1)])[0])
    monkeypatch.setattr(torch.linalg, "cholesky_ex", second_fails)
    assert float(leading.costs([(0, 1)])[0]) > before


def test_a_cache_format_counts_the_dims_of_wide_heads() -> None:
    """One head of 64 dims is two blocks of 32 numbers, of 34 bytes each, for keys and for values."""
    plan = AttentionPlan((LayerPlan(ONE, ONE, 2, 2),) * 3, 32)
    assert CachePair.parse("q8_0").bytes_per_token(plan) == 3 * 2 * 2 * 34


def test_what_cannot_be(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("llama")
    heads, geometry = lifted(model)[0], geometry_of(model.config)
    with pytest.raises(ValueError, match="use fusion=least_squares"):
        mean_fuse(heads, LayerPlan(ONE, ONE, 2, 2))
    wide = converted(model, 2, tiny_tokens)
    with pytest.raises(PlanError, match="convert the checkpoint that it was made from"):
        convert(wide, AttentionPlan((LayerPlan(ONE, ONE),) * 2, geometry.head_dim))
    with pytest.raises(CacheFormatError, match="with_engine_heads"), engine_cache(wide, CachePair.parse("q8_0")):
        pass
    normed = tiny_model("qwen3")
    plan = AttentionPlan((LayerPlan(ONE, ONE, 2, 2),) * 2, geometry_of(normed.config).head_dim)
    with pytest.raises(PlanError, match="only values may be wide"):
        convert(normed, plan, fusion="least_squares", calibration=calibrate(normed, tiny_tokens))
