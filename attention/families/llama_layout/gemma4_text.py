"""Gemma 4, the language model alone: layers with a window are converted, the others stay stock.

The layers with full attention have another head dim, fewer KV heads (`num_global_key_value_heads`)
and, with `attention_k_eq_v`, no value projection. Queries and keys pass an RMS norm after
projection, values one without weights.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PretrainedConfig, PreTrainedModel

from attention.families import _separate, no_residual_scale
from attention.geometry import HeadGeometry

WINDOWED = "sliding_attention"


def geometry(config: Any) -> HeadGeometry:
    """Return the geometry of the layers with a window.

    Raises:
        ValueError: For bidirectional attention, for layers that use the keys and values of others,
            and for layers with a window that differ.
    """
    if config.use_bidirectional_attention == "all":
        raise ValueError(
            "a Gemma 4 with use_bidirectional_attention='all' is not supported; expected causal "
            "attention, None or 'vision'"
        )
    if shared := config.num_kv_shared_layers:
        raise ValueError(
            f"a Gemma 4 whose last layers use the keys and values of earlier ones is not "
            f"supported: expected num_kv_shared_layers 0, got {shared}; choose a Gemma 4 without "
            f"such layers"
        )
    windowed = _windowed(config)
    layers = list(config.per_layer_config)
    shapes = {(layers[i].num_key_value_heads, layers[i].head_dim) for i in windowed}
    if len(shapes) != 1:
        raise ValueError(
            f"a Gemma 4 is converted in its layers with a window ({WINDOWED} in layer_types), "
            f"which must have one number of KV heads and one head dim, got "
            f"{sorted(shapes) or 'no such layer'}; choose a Gemma 4 whose layers are alike"
        )
    own = _separate.geometry(layers[windowed[0]], family="gemma4_text", qk_norm=True)
    return replace(
        own,
        num_layers=len(windowed),
        value_norm=True,
        decoder_layers=windowed,
        other_layers=tuple(
            (layer.num_key_value_heads, layer.head_dim)
            for index, layer in enumerate(layers)
            if index not in windowed
        ),
    )


def _windowed(config: Any) -> tuple[int, ...]:
    return tuple(index for index, kind in enumerate(config.layer_types) if kind == WINDOWED)


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the attention of the layers with a window."""
    config: Any = model.config
    decoder: Any = model.get_decoder()
    return [decoder.layers[index].self_attn for index in _windowed(config)]


def other_attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the attention of the layers without a window, which are not converted."""
    windowed = _windowed(model.config)
    decoder: Any = model.get_decoder()
    return [layer.self_attn for i, layer in enumerate(decoder.layers) if i not in windowed]


def plain_config(config: Any, kv_heads: int) -> PretrainedConfig:
    """Return the config with `kv_heads` KV heads in each layer with a window."""
    windowed = _windowed(config)
    layers = list(config.per_layer_config)
    plain = copy.deepcopy(config)
    plain.per_layer_config = None
    plain.num_key_value_heads = kv_heads
    plain.head_dim = layers[windowed[0]].head_dim
    plain.per_layer_config = {
        index: {"num_key_value_heads": layer.num_key_value_heads, "head_dim": layer.head_dim}
        for index, layer in enumerate(layers)
        if index not in windowed
    }
    return plain


FAMILY = _separate.family(
    "gemma4_text",
    Gemma4TextConfig,
    Gemma4ForCausalLM,
    geometry,
    attention_modules=attention_modules,
    other_attention_modules=other_attention_modules,
    plain_config=plain_config,
    pads_queries=False,
    residual_scale=no_residual_scale,
    reads_layer_config=True,
)
