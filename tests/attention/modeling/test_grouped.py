"""One code path for every map: against an expanded MHA model, loop-by-loop attention, and the cache itself."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parameters import extended
from transformers import StaticCache

from attention.conversion.convert import assemble, lift
from attention.families import families, geometry_of
from attention.heads import LayerHeads
from attention.modeling.decoding import HeadMaps, HeadSlots, decode
from attention.modeling.grouped import cache_bytes
from attention.modeling.growing_cache import cache_argument
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan, LayerPlan
from attention.plan_parts import dense

PLANS = {
    "uniform": ((LayerPlan((0, 1, 1, 0), (0, 1, 1, 0)),) * 2),
    "mqa": ((LayerPlan((0,) * 4, (0,) * 4),) * 2),
    "per-layer": (LayerPlan((0, 0, 1, 2), (0, 0, 1, 2)), LayerPlan((0,) * 4, (0,) * 4)),
    "decoupled": (LayerPlan((0, 1, 0, 2), (0, 0, 0, 0)), LayerPlan((0, 0, 0, 1), (0, 1, 2, 3))),
    "identity": ((LayerPlan.identity(4),) * 2),
}


def pooled(heads: LayerHeads, layer: LayerPlan) -> LayerHeads:
    """The mean of each group, written out here so that these tests need no fusion part."""
    from dataclasses import replace

    def mean(x, groups):
        return None if x is None else torch.stack([x[list(g)].mean(0) for g in groups])

    return replace(
        heads,
        k=mean(heads.k, layer.key_groups),
        v=mean(heads.v, layer.value_groups),
        k_bias=mean(heads.k_bias, layer.key_groups),
        v_bias=mean(heads.v_bias, layer.value_groups),
        k_norm=mean(heads.k_norm, layer.key_groups),
    )


@pytest.fixture(scope="module", params=sorted(families()))
def models(request, tiny_model):
    """For each plan: the grouped model, and plain MHA with the same pooled heads repeated (the slow, obvious form)."""
    model = tiny_model(request.param)
    created = {}
    for name, layers in PLANS.items():
        plan = AttentionPlan(layers, 8)
        heads = [pooled(h, layer) for h, layer in zip(lift(model), layers, strict=True)]
        expanded = tiny_model(request.param)
        for module, h, layer in zip(families()[request.param].attention_modules(expanded), heads, layers, strict=True):
            families()[request.param].write(module, h.expand(layer.key_map, layer.value_map))
        created[name] = (assemble(model, plan, heads), expanded, plan)
    return created


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", sorted(PLANS))
@torch.no_grad()
def test_equals_expanded_attention(models, name: str) -> None:
    grouped, expanded, _ = models[name]
    x = tokens(2, 20)
    atol = 2e-5 if geometry_of(grouped.config).value_norm else 1e-5  # equal in float64
    assert torch.allclose(grouped(x).logits, expanded(x).logits, atol=atol)


@torch.no_grad()
def test_identity_is_bit_equal(models) -> None:
    grouped, expanded, _ = models["identity"]
    assert torch.equal(grouped(tokens(2, 20)).logits, expanded(tokens(2, 20)).logits)


@pytest.mark.parametrize("name", sorted(PLANS))
@torch.no_grad()
def test_cached_equals_uncached(models, name: str) -> None:
    model, _, plan = models[name]
    x = tokens(2, 24)
    whole = model(x).logits
    cache = model(x[:, :16], use_cache=True).past_key_values
    steps = [model(x[:, t : t + 1], **cache_argument(model, cache), use_cache=True).logits for t in range(16, 24)]
    assert torch.allclose(torch.cat(steps, 1), whole[:, 16:], atol=2e-5)
    geometry = geometry_of(model.config)
    layers = [cache.layers[index] for index in geometry.decoder_layers or range(geometry.num_layers)]
    windows = [layer.sliding_window if layer.is_sliding else 25 for layer in layers]  # the stock cache's own
    pairs = zip(windows, plan.layers, strict=True)
    numbers = sum((min(window, 25) - 1) * 8 * (layer.key_heads + layer.value_heads) for window, layer in pairs)
    numbers += sum(24 * 2 * heads * head_dim for heads, head_dim in geometry.other_layers)
    assert cache_bytes(cache) == 2 * 4 * numbers
    cached = [(layer.keys.shape[1], layer.values.shape[1]) for layer in layers]
    assert cached == [(layer.key_heads, layer.value_heads) for layer in plan.layers]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("decoupled", {"num_beams": 3}),
        ("decoupled", {"cache_implementation": "static"}),
        ("mqa", {}),
        extended("decoupled", {"do_sample": True, "top_k": 0}),
        extended("mqa", {"cache_implementation": "static"}),
        *(extended(name, {}) for name in sorted(PLANS) if name != "mqa"),
    ],
    ids=str,
)
@torch.no_grad()
def test_generates_as_the_expanded_model_with_padding(models, name: str, how: dict) -> None:
    grouped, expanded, _ = models[name]
    x, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0  # left padding
    common = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0}
    torch.manual_seed(3)
    one = grouped.generate(x, **common, **how)
    torch.manual_seed(3)
    other = expanded.generate(x, **common, **how)
    assert torch.equal(one, other)


@torch.no_grad()
def test_a_static_cache_of_the_caller_takes_unequal_counts(models) -> None:
    model, _, _ = models["decoupled"]
    assert any(layer.key_heads != layer.value_heads for layer in plan_of(model).layers)
    x, common = tokens(1, 12), {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    cache = StaticCache(config=model.config, max_cache_len=32)
    assert torch.equal(model.generate(x, past_key_values=cache, **common), model.generate(x, **common))


@torch.no_grad()
def test_padding_is_seen(models) -> None:
    """Without a registered mask function the padded tokens would be attended to, in silence."""
    model, _, _ = models["decoupled"]
    x = tokens(1, 10)
    padded = torch.cat([torch.full((1, 6), 5), x], 1)
    mask = torch.cat([torch.zeros(1, 6, dtype=torch.long), torch.ones(1, 10, dtype=torch.long)], 1)
    positions = torch.cat([torch.zeros(1, 6, dtype=torch.long), torch.arange(10)[None]], 1)
    out = model(padded, attention_mask=mask, position_ids=positions).logits[:, 6:]
    assert torch.allclose(out, model(x).logits, atol=1e-5)
    assert not torch.allclose(model(padded, position_ids=positions).logits[:, 6:], out, atol=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12).flatmap(lambda h: st.tuples(*[st.lists(st.integers(0, 5), min_size=h, max_size=h)] * 2)))
def test_decode_equals_loops(maps) -> None:
    plan = LayerPlan(dense(maps[0]), dense(maps[1]))
    generator = torch.Generator().manual_seed(len(maps[0]))
    B, H, S, d = 2, plan.num_heads, 7, 4
    query = torch.randn(B, H, 1, d, generator=generator, dtype=torch.float64)
    key = torch.randn(B, plan.key_heads, S, d, generator=generator, dtype=torch.float64)
    value = torch.randn(B, plan.value_heads, S, d, generator=generator, dtype=torch.float64)
    mask = torch.rand(B, 1, 1, S, generator=generator) > 0.3
    mask[..., 0] = True
    out = decode(query, key, value, HeadMaps.of(plan), mask, None)
    for b in range(B):
        for h in range(H):
            k, v = key[b, plan.key_map[h]], value[b, plan.value_map[h]]
            scores = [float(query[b, h, 0] @ k[s]) / math.sqrt(d) for s in range(S)]
            weights = [math.exp(x) if mask[b, 0, 0, s] else 0.0 for s, x in enumerate(scores)]
            expected = sum(w / sum(weights) * v[s] for s, w in enumerate(weights))
            assert torch.allclose(out[b, h, 0], expected, atol=1e-6)  # the softmax runs in float32


def test_slots_worked_example() -> None:
    slots = HeadSlots.of((0, 1, 0, 0))
    assert (slots.groups, slots.width) == (2, 3)
    assert slots.heads.tensor.tolist() == [0, 2, 3, 1, 1, 1] and slots.place.tensor.tolist() == [0, 3, 1, 2]


def test_gradients_flow_through_the_maps(models) -> None:
    model, _, _ = models["decoupled"]
    model(tokens(1, 6), labels=tokens(1, 6)).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "k_proj.w" in n)
    model.zero_grad()
