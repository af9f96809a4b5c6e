"""Shared code of families whose stock attention needs as many keys and values as queries.

Their stock forward splits a fused projection into thirds, or views keys and values with the number
of query heads. Where a plan is not the identity, a subclass with separate projections for queries,
keys and values replaces it.

Legend: B batch, T tokens, d head dim, D model dim.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from attention.families._separate import geometry_with, output_name, resize
from attention.geometry import HeadGeometry, RotaryLayout
from attention.plan import LayerPlan


def geometry(config: Any, family: str, rotary_dims: int, bias: bool) -> HeadGeometry:
    """Geometry of a multi-head checkpoint whose head dim is width over heads."""
    heads = config.num_attention_heads
    layout = RotaryLayout(
        config.hidden_size // heads, rotary_dims, "half" if rotary_dims else "none"
    )
    return geometry_with(config, family, heads, layout, bias, bias)


def separate(
    fused: str, uneven: type[nn.Module], module: Any, geometry: HeadGeometry, plan: LayerPlan
) -> None:
    """Replace the projection `fused` by `q_proj`, `k_proj` and `v_proj` of the plan's counts.

    The module's class becomes `uneven`, in place, because hooks, caches and checkpoints know the
    module by its path in the model.
    """
    weight = getattr(module, fused).weight
    like = {"device": weight.device, "dtype": weight.dtype}
    delattr(module, fused)
    for name, slices, bias in (
        ("q_proj", geometry.num_heads * plan.key_width, geometry.query_bias),
        ("k_proj", plan.key_slices, geometry.key_bias),
        ("v_proj", plan.value_slices, geometry.value_bias),
    ):
        setattr(
            module,
            name,
            nn.Linear(geometry.hidden_size, slices * geometry.head_dim, bias=bias, **like),
        )
    columns = geometry.num_heads * plan.value_width * geometry.head_dim
    if hasattr(module, "c_proj"):  # a Conv1D, which has its weight the other way round
        if columns != module.c_proj.weight.shape[0]:
            module.c_proj = Conv1D(geometry.hidden_size, columns).to(**like)
    else:
        resize(module, output_name(module), columns=columns)
    module.__class__ = uneven


def reshape(
    fused: str, uneven: type[nn.Module], module: Any, geometry: HeadGeometry, plan: LayerPlan
) -> None:
    """Separate the fused projection (`separate`) where the plan is not the identity."""
    if not plan.is_identity:
        separate(fused, uneven, module, geometry, plan)


def project(module: Any, x_BTD: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values, each `[B, its own heads, T, d]`."""
    q, k, v = (
        projection(x_BTD).unflatten(-1, (-1, head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    return q, k, v


def attend(
    module: Any,
    states: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    cache: Cache | None,
    *,
    scaling: float,
    dropout: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Update the cache and run the attention function that the config names.

    Returns:
        The heads side by side, `[B, T, H·d]`.
    """
    query, key, value = states
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, _no_eager)
    mixed, weights = attention(
        module,
        query,
        key,
        value,
        mask,
        dropout=dropout if module.training else 0.0,
        scaling=scaling,
        **kwargs,
    )
    return mixed.flatten(-2), weights


def _no_eager(*args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        "head maps need attn_implementation='headfold', got 'eager', which would ignore them"
    )


def plain_config(config: Any, kv_heads: int) -> PretrainedConfig | None:
    """Return the config itself for plain MHA; these families have no grouped form."""
    return copy.deepcopy(config) if kv_heads == config.num_attention_heads else None
