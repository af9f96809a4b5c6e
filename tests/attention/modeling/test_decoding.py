"""Decoding over a long cache: every way equals the expanded attention, and the cache that grows in place."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from attention.conversion.convert import build
from attention.modeling import decoding
from attention.modeling.decoding import HeadMaps, decode, decode_by_group, decode_padded
from attention.modeling.grouped import cache_bytes, expand_heads
from attention.modeling.growing_cache import ROOM, GrowingLayer, cache_argument
from attention.plan import AttentionPlan, LayerPlan
from attention.plan_parts import dense

DECOUPLED = AttentionPlan((LayerPlan((0, 1, 0, 2), (0, 0, 0, 0)), LayerPlan((0, 0, 0, 1), (0, 1, 2, 3))), 8)
WAYS = [decode, decode_by_group, decode_padded]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def reference(query: Tensor, key: Tensor, value: Tensor, plan: LayerPlan, mask: Tensor | None) -> Tensor:
    """The slow, independent form: every query head gets its own copy. Softmax by hand: with a float32 mask and a
    float64 query torch's fused attention for CPUs reads the mask wrongly on some of them."""
    key, value = expand_heads(key, torch.tensor(plan.key_map)), expand_heads(value, torch.tensor(plan.value_map))
    logits = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(-1) @ value


heads = st.integers(1, 12).flatmap(lambda h: st.tuples(*[st.lists(st.integers(0, 5), min_size=h, max_size=h)] * 2))


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
@settings(max_examples=40, deadline=None)
@given(heads, st.sampled_from(["none", "boolean", "additive", "per head"]), st.integers(1, 2))
def test_every_way_equals_the_expanded_attention(way, maps, kind: str, batch: int) -> None:
    plan = LayerPlan(dense(maps[0]), dense(maps[1]))
    H, S, d = plan.num_heads, 9, 4
    query, key, value = (
        normal(batch, n, t, d, seed=t) for n, t in ((H, 1), (plan.key_heads, S), (plan.value_heads, S))
    )
    seen = normal(batch, H if kind == "per head" else 1, 1, S, seed=7) > -0.5
    seen[..., 0] = True
    mask = {"none": None, "additive": torch.where(seen, 0.0, -1e9)}.get(kind, seen)
    expected = reference(query, key, value, plan, mask)
    assert torch.allclose(way(query, key, value, HeadMaps.of(plan), mask, None), expected, atol=1e-6)


@pytest.mark.parametrize("way", [decode, decode_padded], ids=lambda f: f.__name__)
@settings(max_examples=20, deadline=None)
@given(heads, st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_wide_heads_are_their_slices_side_by_side(way, maps, widths: tuple[int, int]) -> None:
    plan = LayerPlan(dense(maps[0]), dense(maps[1]), *widths)
    (m, n), H, S, d = widths, plan.num_heads, 9, 4
    query, key, value = (
        normal(2, H, 1, m * d),
        normal(2, plan.key_heads, S, m * d),
        normal(2, plan.value_heads, S, n * d),
    )
    expected = reference(query, key, value, plan, None)

    def sliced(states: Tensor, width: int) -> Tensor:
        return (
            torch.cat([part for head in states.unbind(1) for part in head.split(d, -1)])
            .unflatten(0, (-1, len(states)))
            .transpose(0, 1)
        )

    out = way(sliced(query, m), sliced(key, m), sliced(value, n), HeadMaps.of(plan), None, None)
    assert torch.allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("way", [decode_by_group, decode_padded], ids=lambda f: f.__name__)
def test_a_wrong_map_is_seen(way) -> None:
    """The comparison above can fail: with one head read from its neighbour's values the outputs differ."""
    plan, wrong = LayerPlan((0, 1, 0, 2), (0, 0, 1, 1)), LayerPlan((0, 1, 0, 2), (0, 1, 1, 1))
    query, key, value = normal(1, 4, 1, 4), normal(1, 3, 9, 4), normal(1, 2, 9, 4)
    out = way(query, key, value, HeadMaps.of(wrong), None, None)
    apart = (out - reference(query, key, value, plan, None)).abs().amax((0, 2, 3))
    assert (apart > 0.01).tolist() == [False, True, False, False]


def test_long_caches_go_by_group(monkeypatch) -> None:
    chosen = []
    for way in (decode_by_group, decode_padded):
        monkeypatch.setattr(decoding, way.__name__, lambda *a, name=way.__name__: chosen.append(name))
    maps = HeadMaps.of(LayerPlan((0, 1, 0, 2), (0, 0, 0, 0)))
    enough = decoding.GROUPED_FROM // 4
    for batch, length, threads in ((1, enough, 2), (1, enough - 1, 1), (2, enough, 2), (2, enough, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        decode(normal(batch, 4, 1, 4), normal(batch, 3, length, 4), normal(batch, 1, length, 4), maps, None, None)
    assert chosen == ["decode_by_group", "decode_padded", "decode_padded", "decode_by_group"]


# ---- the growing cache -------------------------------------------------------------------------------------------


def tokens(*shape: int) -> Tensor:
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model(tiny_model):
    torch.manual_seed(0)
    return build(tiny_model("llama").config, DECOUPLED).eval()


@pytest.fixture(scope="module")
def filled(model) -> DynamicCache:
    """A cache of 2 sequences of 12 tokens, the last three decoded one by one."""
    x = tokens(2, 12)
    with torch.no_grad():
        cache = model(x[:, :9], use_cache=True).past_key_values
        for t in range(9, 12):
            model(x[:, t : t + 1], **cache_argument(model, cache), use_cache=True)
    return cache


@torch.no_grad()
def follow(model, cache: DynamicCache, x: Tensor) -> Tensor:
    return model(x, **cache_argument(model, cache), use_cache=True).logits


def test_it_grows_in_place(model, filled: DynamicCache) -> None:
    cache = copy.deepcopy(filled)
    assert all(isinstance(layer, GrowingLayer) for layer in cache.layers)
    place, before = cache.layers[0].keys.data_ptr(), cache.layers[0].keys
    kept = before.clone()
    steps = ROOM - 2  # the first of the three decoded tokens made room for ROOM more than itself
    for _ in range(steps):
        follow(model, cache, tokens(2, 1))
    assert cache.layers[0].keys.data_ptr() == place
    assert torch.equal(before, kept)
    follow(model, cache, tokens(2, 1))
    assert cache.layers[0].keys.data_ptr() != place
    assert cache.get_seq_length() == 12 + steps + 1
    assert cache_bytes(cache) == 2 * cache.get_seq_length() * DECOUPLED.kv_bytes_per_token("float32")


def test_a_prefilled_cache_holds_its_tokens_exactly(model) -> None:
    with torch.no_grad():
        cache = model(tokens(1, 20), use_cache=True).past_key_values
    stored_bytes = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
    assert stored_bytes == 20 * DECOUPLED.kv_bytes_per_token("float32")


CHANGES = {
    "crop": lambda c: c.crop(-4),
    "reorder": lambda c: c.reorder_cache(torch.tensor([1, 1])),
    "select": lambda c: c.batch_select_indices(torch.tensor([1])),
    "repeat": lambda c: c.batch_repeat_interleave(2),
    "copy": lambda c: None,
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_what_others_do_to_the_cache_holds(model, filled: DynamicCache, change: str) -> None:
    """Each operation, then two more tokens: as the same operation on the tokens and no cache at all."""
    cache, x = copy.deepcopy(filled), tokens(2, 12)
    CHANGES[change](cache)
    x = {"crop": x[:, :-4], "reorder": x[[1, 1]], "select": x[[1]], "repeat": x.repeat_interleave(2, 0)}.get(change, x)
    new = tokens(len(x), 2)
    out = [follow(model, cache, new[:, t : t + 1]) for t in range(2)]
    assert torch.allclose(torch.cat(out, 1), model(torch.cat([x, new], 1)).logits[:, -2:], atol=2e-5)


@torch.no_grad()
def test_a_copy_and_its_original_do_not_share_their_room(model, filled: DynamicCache) -> None:
    one, other = copy.deepcopy(filled), copy.deepcopy(filled)
    a, b = tokens(2, 1), 63 - tokens(2, 1)
    first = follow(model, one, a)
    kept = one.layers[0].keys.clone()
    assert not torch.equal(follow(model, other, b), first)
    assert torch.equal(one.layers[0].keys, kept)


def test_inference_mode_then_not_and_gradients(model) -> None:
    x = tokens(1, 8)
    with torch.inference_mode():
        cache = model(x[:, :4], use_cache=True).past_key_values
        follow(model, cache, x[:, 4:5])
    with torch.no_grad():
        late = follow(model, cache, x[:, 5:6])
    assert torch.allclose(late, model(x[:, :6]).logits[:, -1:], atol=2e-5)
    cache = model(x[:, :4], use_cache=True).past_key_values
    model(x[:, 4:6], **cache_argument(model, cache), use_cache=True).logits[:, -1].sum().backward()
    through_cache = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    model(x[:, :6]).logits[:, -1].sum().backward()
    assert torch.allclose(model.get_input_embeddings().weight.grad, through_cache, atol=1e-5)
    model.zero_grad()
