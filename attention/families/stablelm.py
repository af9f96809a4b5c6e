"""StableLM: partial rotary embedding, biases of q, k and v by a switch.

Where queries and keys are normalised, each head has a separate layer norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import StableLmConfig, StableLmForCausalLM
from transformers.models.stablelm.modeling_stablelm import StableLmLayerNormPerHead

from attention.families import _separate
from attention.geometry import HeadGeometry, RotaryLayout
from attention.heads import LayerHeads
from attention.plan import LayerPlan


def geometry(config: Any) -> HeadGeometry:
    head_dim = config.hidden_size // config.num_attention_heads
    rotary = RotaryLayout(head_dim, int(head_dim * config.rope_parameters["partial_rotary_factor"]))
    bias = bool(config.use_qkv_bias)
    norm = bool(config.qk_layernorm)
    result = _separate.geometry_with(
        config, "stablelm", config.num_key_value_heads, rotary, bias, False, qk_norm=norm
    )
    return replace(result, centred_norm=norm)


def _weights(norms: Any) -> Tensor:
    return torch.stack([norm.weight.detach() for norm in norms.norms])


def read(module: Any, geometry: HeadGeometry) -> LayerHeads:
    heads = _separate.read(module, geometry)
    if not geometry.qk_norm:
        return heads
    return replace(heads, q_norm=_weights(module.q_layernorm), k_norm=_weights(module.k_layernorm))


def reshape(module: Any, geometry: HeadGeometry, plan: LayerPlan) -> None:
    _separate.reshape(module, geometry, plan)
    # By which the stock forward views them: as many as there are, of keys and of values, and of
    # queries that are as wide as several.
    module.num_key_value_heads = -1
    module.num_heads = -1
    key_norm(module, geometry, plan)


def key_norm(module: Any, geometry: HeadGeometry, plan: LayerPlan) -> None:
    if geometry.qk_norm:
        weight = module.q_layernorm.norms[0].weight
        eps = module.q_layernorm.norms[0].eps
        norms = StableLmLayerNormPerHead(geometry.head_dim, plan.key_heads, eps=eps)
        module.k_layernorm = norms.to(device=weight.device, dtype=weight.dtype)


@torch.no_grad()
def write(module: Any, heads: LayerHeads) -> None:
    _separate.write(module, heads)
    for norms, weights in (("q_layernorm", heads.q_norm), ("k_layernorm", heads.k_norm)):
        if weights is not None:
            for norm, weight in zip(getattr(module, norms).norms, weights, strict=True):
                norm.weight.copy_(weight)


FAMILY = _separate.family(
    "stablelm",
    StableLmConfig,
    StableLmForCausalLM,
    geometry,
    read=read,
    reshape=reshape,
    write=write,
    query_norm=lambda module, queries: module.q_layernorm(queries),
    key_norm=key_norm,
    pads_queries=False,  # its class derives the head dim from the width and the number of heads
)
