"""Families with separate projections under `decoder.layers[i].self_attn`, as Llama has.

They are q, k, v and o.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from attention.families import Family
from attention.geometry import HeadGeometry, RotaryLayout
from attention.heads import LayerHeads
from attention.modeling.shared_weights import SharedColumns, SharedRows
from attention.plan import LayerPlan


def geometry(
    config: Any,
    *,
    family: str,
    qkv_bias: bool | None = None,
    output_bias: bool | None = None,
    qk_norm: bool = False,
) -> HeadGeometry:
    """Geometry of a config with Llama's field names.

    Rotary covers `partial_rotary_factor` of the head dim. Biases that are not given follow one
    switch of the config, `attention_bias`.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    rotary = int(head_dim * float(rope.get("partial_rotary_factor", 1.0)))
    switch = bool(getattr(config, "attention_bias", False))
    biases = (switch if bias is None else bias for bias in (qkv_bias, output_bias))
    return geometry_with(
        config,
        family,
        config.num_key_value_heads,
        RotaryLayout(head_dim, rotary),
        *biases,
        qk_norm=qk_norm,
    )


def geometry_with(
    config: Any,
    family: str,
    num_kv_heads: int,
    rotary: RotaryLayout,
    qkv_bias: bool,
    output_bias: bool,
    qk_norm: bool = False,
) -> HeadGeometry:
    """Geometry of a config whose other fields have the names that all families here use."""
    return HeadGeometry(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=rotary.head_dim,
        rotary=rotary,
        query_bias=qkv_bias,
        key_bias=qkv_bias,
        value_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        max_positions=config.max_position_embeddings,
        vocab_size=config.vocab_size,
    )


def attention_modules(model: PreTrainedModel) -> Sequence[nn.Module]:
    decoder: Any = model.get_decoder()
    return [layer.self_attn for layer in decoder.layers]


OUTPUT_NAMES = ("o_proj", "out_proj", "dense")


def output_name(module: nn.Module) -> str:
    """Return the name of the output projection, which is one of `OUTPUT_NAMES`."""
    return next(name for name in OUTPUT_NAMES if hasattr(module, name))


def output_projection(module: nn.Module) -> nn.Linear:
    """Return the output projection, whichever of its usual names it goes by."""
    return getattr(module, output_name(module))


def _split(linear: nn.Linear, head_dim: int) -> tuple[Tensor, Tensor | None]:
    bias = None if linear.bias is None else linear.bias.detach().view(-1, head_dim)
    return linear.weight.detach().view(-1, head_dim, linear.in_features), bias


def read_qkv(
    module: Any, num_heads: int, value_dim: int
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights of q, k and v, and their biases, by heads.

    Args:
        module: Its query projection says how wide its keys are.
        num_heads: H.
        value_dim: Width of a value head.
    """
    key_dim = module.q_proj.out_features // num_heads
    dims = ((module.q_proj, key_dim), (module.k_proj, key_dim), (module.v_proj, value_dim))
    parts = [_split(projection, dim) for projection, dim in dims]
    return [weight for weight, _ in parts], [bias for _, bias in parts]


def read(module: Any, geometry: HeadGeometry) -> LayerHeads:
    output = output_projection(module)
    o = output.weight.detach().view(geometry.hidden_size, geometry.num_heads, -1).permute(1, 0, 2)
    (q, k, v), (q_bias, k_bias, v_bias) = read_qkv(module, geometry.num_heads, o.shape[2])
    return LayerHeads(
        q, k, v, o, q_bias, k_bias, v_bias, None if output.bias is None else output.bias.detach()
    )


def reshape(module: Any, geometry: HeadGeometry, plan: LayerPlan) -> None:
    """Fresh key and value projections with the plan's head counts.

    The query side keeps its shape, unless heads are wider than the checkpoint's.
    """
    counts = {
        "q_proj": plan.num_heads * plan.key_width,
        "k_proj": plan.key_slices,
        "v_proj": plan.value_slices,
    }
    for name, slices in counts.items():
        resize(module, name, rows=slices * geometry.head_dim)
    resize(
        module, output_name(module), columns=plan.num_heads * plan.value_width * geometry.head_dim
    )


def resize(module: Any, name: str, *, rows: int | None = None, columns: int | None = None) -> None:
    """Replace a linear layer of other sizes by a fresh one; `None` keeps what there is."""
    old: nn.Linear = getattr(module, name)
    columns = columns or old.in_features
    rows = rows or old.out_features
    if (columns, rows) != (old.in_features, old.out_features):
        like = {"device": old.weight.device, "dtype": old.weight.dtype}
        setattr(module, name, nn.Linear(columns, rows, bias=old.bias is not None, **like))


@torch.no_grad()
def write_qkv(module: Any, heads: LayerHeads) -> None:
    """Copy all but the output projection."""
    for linear, weight, bias in (
        (module.q_proj, heads.q, heads.q_bias),
        (module.k_proj, heads.k, heads.k_bias),
        (module.v_proj, heads.v, heads.v_bias),
    ):
        # The weight that it shows is put together anew: copying there is lost.
        if isinstance(linear, SharedRows):
            linear.write(weight, bias)
            continue
        linear.weight.copy_(weight.reshape(linear.weight.shape))
        if linear.bias is not None and bias is not None:
            linear.bias.copy_(bias.reshape(-1))


@torch.no_grad()
def write(module: Any, heads: LayerHeads) -> None:
    write_qkv(module, heads)
    write_output(output_projection(module), heads)


@torch.no_grad()
def write_output(output: Any, heads: LayerHeads) -> None:
    """Copy the output projection; columns that it borrows are left to their lender."""
    weight = heads.o.permute(1, 0, 2).flatten(1)
    if isinstance(output, SharedColumns):
        output.write(weight, heads.o_bias)
        return
    output.weight.copy_(weight)
    if output.bias is not None and heads.o_bias is not None:
        output.bias.copy_(heads.o_bias)


def plain_config(config: Any, kv_heads: int) -> PretrainedConfig:
    plain = copy.deepcopy(config)
    plain.num_key_value_heads = kv_heads
    return plain


def family(
    name: str,
    config_class: type[PretrainedConfig],
    model_class: type[PreTrainedModel],
    geometry_of: Callable[[Any], HeadGeometry] | None = None,
    **others: Any,
) -> Family:
    """Return a family of this layout, with the geometry of `geometry` unless given.

    `others`: the fields of `Family` in which it differs.
    """
    layout: dict[str, Any] = {
        "attention_modules": attention_modules,
        "read": read,
        "reshape": reshape,
        "write": write,
    }
    layout |= {"plain_config": plain_config, **others}
    return Family(
        name, config_class, model_class, geometry_of or partial(geometry, family=name), **layout
    )
