"""Attention with a key map and a value map.

One code path for MHA, MQA, GQA, uneven and decoupled groups.

Legend: B batch, H query heads, G^K / G^V kept key / value heads, T query tokens, S cached tokens, d
head dim.

Registered with transformers as "headfold", for attention and for masks (without the second, padding
is silently ignored). The module that calls it carries `key_map` and `value_map`, integer buffers
`[H]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer, StaticSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from attention.modeling.composition.composed_cache import ComposedLayer
from attention.modeling.composition.composing import HeadComposition
from attention.modeling.decoding import HeadMaps, decode, decode_mix, decode_scores
from attention.modeling.growing_cache import cache_in, grow_cache
from attention.modeling.scores import capped, explicit_attention
from attention.plan import LayerPlan

ATTENTION_NAME = "headfold"


def expand_heads(states: Tensor, head_map: Tensor) -> Tensor:
    """Return a copy of its group's head for each query head: `[B, H, S, d]` of `[B, G, S, d]`."""
    return states.index_select(1, head_map)


def joined_slices(states: Tensor, width: int) -> Tensor:
    """Return `[B, n, S, m·d]` of `[B, n·m, S, d]`: the slices of each head of width m joined."""
    if width == 1:
        return states
    return states.unflatten(1, (-1, width)).transpose(2, 3).flatten(3)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    composed_input: Tensor | None = None,
    composed_layer: ComposedLayer | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute grouped attention as an attention function of transformers.

    Prefill and training expand and call SDPA, or compute all scores where these are capped or share
    their softmax with sinks; a single new token without gradient takes `decode`. A window is in the
    mask. A module with composition passes its input `[B, T, D]` and its cache layer (see
    `attention.modeling.composition`).

    Args:
        query: `[B, H, T, d]`. A head of width m comes as m neighbouring slices of width d, here and
            in the cache: so the rotary embedding of the stock model turns each of them.
        s_aux: `[H]`, logits of sinks.

    Returns:
        `[B, T, H, d]`, d times their width where value heads are wide, and None for the weights.
    """
    if not hasattr(module, "head_maps"):  # of a layer that the plan does not change
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    maps: HeadMaps = module.head_maps  # type: ignore[assignment]
    if composed_input is not None:
        output = composed_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            composed_input,
            composed_layer,
            dropout,
            scaling,
            softcap,
            s_aux,
        )
        return output.transpose(1, 2).contiguous(), None
    plain = softcap is None and s_aux is None
    if maps.plan.is_identity and plain:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    if (
        query.shape[2] == 1
        and not maps.plan.is_identity
        and not dropout
        and not torch.is_grad_enabled()
    ):
        output = decode(query, key, value, maps, attention_mask, scaling, softcap, s_aux)
        return output.transpose(1, 2).contiguous(), None
    key_map = module.key_map
    value_map = module.value_map
    if maps.plan.is_wide:
        query = joined_slices(query, maps.plan.key_width)
        key = joined_slices(key, maps.plan.key_width)
        value = joined_slices(value, maps.plan.value_width)
    if not maps.plan.is_identity:
        key = expand_heads(key, key_map)  # type: ignore[arg-type]
        value = expand_heads(value, value_map)  # type: ignore[arg-type]
    if not plain:
        settings: dict[str, Any] = {"softcap": softcap, "sinks": s_aux, "dropout": dropout}
        output = explicit_attention(query, key, value, attention_mask, scaling, **settings)
        return output.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, **kwargs
    )


def composed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    x: Tensor,
    layer: ComposedLayer | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention with composed heads (Xiao 2024, App. D): `[B, H, T, d]`.

    The scores of all heads are in memory at once.

    x `[B, T, D]`: the attention input of the query tokens; `layer`: index of the key-side weights
    of earlier tokens.
    """
    maps: HeadMaps = module.head_maps  # type: ignore[assignment]
    composition: HeadComposition = module.composition  # type: ignore[assignment]
    key_weights = composition.key_weights(x)
    if layer is not None and key_weights is not None:
        key_weights = layer.update_weights(key_weights)
    if composition.norm is not None:
        query, key = composition.norm(query, key)
    if query.shape[2] == 1:
        scores = capped(decode_scores(query, key, maps, scaling), softcap)
        return decode_mix(composition(scores, x, key_weights, mask, dropout, sinks), value, maps)
    factor = float(query.shape[-1]) ** -0.5 if scaling is None else scaling
    scores = (query * factor) @ expand_heads(key, module.key_map).transpose(-1, -2)  # type: ignore[arg-type]
    weights = composition(capped(scores, softcap), x, key_weights, mask, dropout, sinks)
    return weights @ expand_heads(value, module.value_map)  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION_NAME, grouped_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def attach(module: nn.Module, plan: LayerPlan) -> None:
    """Give an attention module its maps.

    Persistent buffers (others come back as garbage) and the run-time form.
    """
    device = next(module.parameters()).device
    scaling = getattr(module, "scaling", None)
    if isinstance(scaling, int | float):  # a config may have a whole number
        # Of the logits of m d dims, as a stock module of that head dim has it
        before = getattr(module, "key_width", 1)
        module.scaling = scaling * (before / plan.key_width) ** 0.5  # type: ignore[assignment]
        module.key_width = plan.key_width  # type: ignore[assignment]
    module.register_buffer("key_map", torch.tensor(plan.key_map, device=device), persistent=True)
    module.register_buffer(
        "value_map", torch.tensor(plan.value_map, device=device), persistent=True
    )
    if not hasattr(module, "head_maps"):
        module.register_forward_pre_hook(prepare_cache, with_kwargs=True)
    module.head_maps = HeadMaps.of(plan)  # type: ignore[assignment]
    # The maps do the repeating; transformers must not repeat on top of it.
    module.num_key_value_groups = 1  # type: ignore[assignment]


# ---- caches -----------------------------------------------------------------------------------


class UnevenStaticLayer(StaticLayer):
    """A static cache layer whose key and value head counts may differ.

    The stock one takes both from the keys.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        batch, heads, _, width = value_states.shape
        if heads != key_states.shape[1]:
            shape = (batch, heads, self.max_cache_len, width)
            self.values = torch.zeros(shape, dtype=value_states.dtype, device=value_states.device)
            if not torch.compiler.is_compiling():  # as the stock layer: CUDA graphs need it
                torch._dynamo.mark_static_address(self.values)


class UnevenSlidingLayer(UnevenStaticLayer, StaticSlidingWindowLayer):
    """The same for a layer that keeps a window."""


UNEVEN = {StaticLayer: UnevenStaticLayer, StaticSlidingWindowLayer: UnevenSlidingLayer}


def make_uneven(cache: Cache) -> Cache:
    """Let the plain static layers of a fresh cache take unequal key and value counts."""
    for layer in cache.layers:
        layer.__class__ = UNEVEN.get(type(layer), type(layer))
    return cache


def prepare_cache(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make the layer of a fresh cache grow in place, or take unequal key and value counts.

    A forward pre-hook of attention modules. A static cache of `generate` has such layers already,
    but not one that the caller has made.
    """
    grow_cache(module, args, kwargs)
    cache = cache_in(kwargs)
    if isinstance(cache, Cache) and module.layer_idx < len(cache.layers):
        layer = cache.layers[module.layer_idx]
        if (
            type(layer) in UNEVEN
            and not layer.is_initialized
            and not torch.compiler.is_compiling()  # which cannot change a class
        ):
            layer.__class__ = UNEVEN[type(layer)]


def cache_bytes(cache: Cache) -> int:
    """Return the bytes of the keys, values and key-side composition weights of a cache.

    The room that a growing layer keeps beyond its tokens (`attention.modeling.growing_cache.ROOM`)
    is not counted.
    """
    tensors = [
        layer
        for layer in cache.layers
        if isinstance(layer, CacheLayerMixin) and layer.is_initialized
    ]
    weights = (
        t
        for layer in tensors
        for t in (layer.keys, layer.values, getattr(layer, "key_weights", None))
    )
    return sum(t.numel() * t.element_size() for t in weights if t is not None)
