"""Wide heads as a stock model has them: a larger head dim, and each rotary frequency several times.

Headfold's own model stores a head of width m as m slices of the checkpoint's head dim, which the
rotary embedding rotates alike. A stock model has one head dim for all, m d here, so each of the
checkpoint's frequencies must occur m times in its table. In transformers, vLLM and llama.cpp the
factors of `longrope` express this: frequency i is divided by factor i.

Legend: d head dim of the checkpoint, m width, r rotary dims of a checkpoint's head, P = r/2 rotary
pairs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from attention.families import family_of, geometry_of
from attention.geometry import HeadGeometry, RotaryLayout
from attention.heads import LayerHeads
from attention.modeling.beside import beside_original, copy_common
from attention.modeling.model_classes import (
    family_fields,
    headfold_classes,
    headfold_config,
    plan_of,
)
from attention.plan import AttentionPlan, LayerPlan

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "granite", "smollm3")
"""Families whose stock configuration has a separate head dim, and rotary embedding everywhere or in
some layers."""
_STATIC = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of rotary embedding with frequencies that do not depend on the length of the text."""


class WideFormError(ValueError):
    """Wide heads that no stock model has. The message says why, and what to do."""


def width_of(plan: AttentionPlan) -> int:
    """Return the one width of all key and value heads of a plan.

    Raises:
        WideFormError: If there are several.
    """
    widths = sorted({width for layer in plan.layers for width in layer.widths})
    if len(widths) > 1:
        raise WideFormError(
            f"a stock model has one head dim for all keys and values, and this plan has heads of "
            f"{' and '.join(str(width * plan.head_dim) for width in widths)} dims; export to "
            "target transformers, or give all layers one width"
        )
    return widths[0]


def wide_layout(layout: RotaryLayout, width: int) -> RotaryLayout:
    """Return the rotary layout of a head of `width` slices."""
    return replace(layout, head_dim=width * layout.head_dim, dims=width * layout.dims)


def slice_order(layout: RotaryLayout, width: int) -> list[int]:
    """Return for each dim of a stock wide head the dim of the slices, one after the other.

    Pair p of slice j becomes pair p m + j: the frequencies still descend.
    """
    order = [0] * (width * layout.head_dim)
    wide = wide_layout(layout, width)
    free = iter(wide.free)
    for j in range(width):
        offset = j * layout.head_dim
        for p, (first, second) in enumerate(zip(layout.first, layout.second, strict=True)):
            order[wide.first[p * width + j]] = offset + first
            order[wide.second[p * width + j]] = offset + second
        for dim in layout.free:
            order[next(free)] = offset + dim
    return order


def frequencies_of(config: Any) -> tuple[Tensor, float]:
    """Return the rotary frequencies `[P]` of a config in float64, and the scale of cos and sin.

    Raises:
        WideFormError: For a kind whose frequencies depend on the length of the text.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in _STATIC:
        raise WideFormError(
            f"the rotary frequencies of rope type {kind} depend on the length of the text, and "
            f"wide heads need fixed ones ({', '.join(_STATIC)}); use a recipe of width 1"
        )
    dims = geometry_of(config).rotary.dims
    if kind == "default":
        exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
        return float(rope["rope_theta"]) ** -exponents, 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return frequencies.double(), float(scale)


def wide_config(config: Any, plan: AttentionPlan) -> tuple[PretrainedConfig, AttentionPlan]:
    """Return the stock configuration and the plan of the same model with a head dim of m d.

    The plan's heads are no wider than that.

    Raises:
        WideFormError: If the family has no stock form of such heads.
    """
    width = width_of(plan)
    family = family_of(config)
    geometry = geometry_of(config)
    if family.name not in FAMILIES:
        raise WideFormError(
            f"the stock form of a {family.name} has no separate head dim, which heads "
            f"{width} times as wide need; wide heads are supported by {', '.join(FAMILIES)}; use a "
            "recipe of width 1"
        )
    if plan.is_shared:
        raise WideFormError("layers that share weights have no wide heads")
    frequencies, scale = frequencies_of(config)
    dims = width * geometry.rotary.dims
    theta = float(config.rope_parameters["rope_theta"])
    plain = theta ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    factors = (plain / frequencies.repeat_interleave(width)).tolist()
    rope = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": scale,
        "factor": 1.0,
        "original_max_position_embeddings": geometry.max_positions,
    }
    if scale != 1.0:  # vLLM's names of these fields
        rope |= {"short_mscale": scale, "long_mscale": scale}
    if "partial_rotary_factor" in config.rope_parameters:
        rope["partial_rotary_factor"] = config.rope_parameters["partial_rotary_factor"]
    head_dim = width * geometry.head_dim
    fields = family_fields(config) | {"head_dim": head_dim, "rope_parameters": rope}
    if "attention_multiplier" in fields:  # of Granite; else queries would take the factor
        fields["attention_multiplier"] /= math.sqrt(width)
    layers = tuple(LayerPlan(layer.key_map, layer.value_map) for layer in plan.layers)
    wide_plan = replace(plan, layers=layers, head_dim=head_dim)
    return family.config_class(**fields), wide_plan


def wide_heads(heads: LayerHeads, geometry: HeadGeometry, width: int, scale: float) -> LayerHeads:
    """Return the heads of a layer in the order of a stock wide head.

    Args:
        heads: Of slices.
        geometry: That of the layer of the checkpoint.
        width: m.
        scale: Factor of the queries: the scale of the slices' logits over that of the stock model.
    """
    order = torch.tensor(slice_order(geometry.rotary, width), device=heads.q.device)
    heads = heads.changed(("q", "k", "q_bias", "k_bias"), lambda rows: rows[:, order])
    if abs(scale - 1) < 1e-9:
        return heads
    return heads.changed(("q", "q_bias"), lambda rows: rows * scale)


def to_wide(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same model with heads of the plan's one width as its head dim.

    It is only for writing or measuring: parameters outside of attention share `model`'s memory.

    Raises:
        WideFormError: As `wide_config`.
    """
    plan = plan_of(model)
    width = width_of(plan)
    config, wide_plan = wide_config(model.config, plan)
    wide_class = headfold_classes(family_of(config).name)[1]
    headfold = headfold_config(config, wide_plan)
    wide = beside_original(model, lambda: wide_class._from_config(headfold, dtype=model.dtype))
    copy_common(model, wide)
    family = family_of(model.config)
    geometry = geometry_of(model.config)
    modules = zip(family.attention_modules(model), family.attention_modules(wide), strict=True)
    for old, new in modules:
        # 1, except for families whose configuration has a scale
        scale = float(getattr(old, "scaling", 1.0)) / float(getattr(new, "scaling", 1.0))
        family.write(new, wide_heads(family.read(old, geometry), geometry, width, scale))
    wide.generation_config = model.generation_config
    return wide.train(model.training)
