"""Rotary position embedding on plain tensors, for the layouts of `attention.geometry`.

Legend: T tokens, d head dim, r rotary dims, P = r/2 pairs; z = first + i second, a pair as a
complex number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.families import geometry_of
from attention.geometry import RotaryLayout


@torch.no_grad()
def rotary_tables(model: PreTrainedModel, length: int, layer: int = 0) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the positions from 0 to length - 1, `[T, r]` float32, for `layer`.

    They come from the model's own embedding, scaling included.

    Raises:
        ValueError: If the decoder has no `rotary_emb`.
    """
    embedding = getattr(model.get_decoder(), "rotary_emb", None)
    if embedding is None:
        raise ValueError(
            f"expected a decoder with rotary_emb, got {type(model.get_decoder()).__name__} without "
            f"one"
        )
    positions = torch.arange(length, device=model.device)[None]
    # Gemma 3 has an embedding for each kind of layer.
    indices = geometry_of(model.config).decoder_layers
    index = layer if indices is None else indices[layer]
    kind = (
        {"layer_type": model.config.layer_types[index]} if hasattr(embedding, "layer_types") else {}
    )
    cos, sin = embedding(
        torch.zeros(1, dtype=torch.float32, device=model.device), positions, **kind
    )
    if 2 * cos.shape[-1] == geometry_of(model.config).rotary.dims:  # gpt-oss has one entry per pair
        cos, sin = (torch.cat([table, table], dim=-1) for table in (cos, sin))
    return cos[0], sin[0]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: RotaryLayout) -> Tensor:
    """Rotate x `[..., T, d]` by tables `[T, r]`; the dims beyond r stay.

    Raises:
        ValueError: If the shapes do not fit.
    """
    if layout.dims == 0:
        return x
    if (
        cos.shape != sin.shape
        or cos.shape != (x.shape[-2], layout.dims)
        or x.shape[-1] != layout.head_dim
    ):
        raise ValueError(
            f"expected x [..., T, {layout.head_dim}] and tables [T, {layout.dims}], got "
            f"{tuple(x.shape)} and "
            f"{tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    first = list(layout.first)
    second = list(layout.second)
    # Both dims of a pair have one angle; the table repeats it in the layout's own order.
    cos_TP = cos[:, first]
    sin_TP = sin[:, first]
    result = x.clone()
    result[..., first] = x[..., first] * cos_TP - x[..., second] * sin_TP
    result[..., second] = x[..., second] * cos_TP + x[..., first] * sin_TP
    return result


def pair_products(gram: Tensor, layout: RotaryLayout) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of the mean of z_x conj(z_y) in each pair, `[..., P]`.

    Gram `[..., d, d]`: of x y^T.
    """
    first = list(layout.first)
    second = list(layout.second)
    real = gram[..., first, first] + gram[..., second, second]
    return real, gram[..., second, first] - gram[..., first, second]


def pair_maps(real: Tensor, imaginary: Tensor, layout: RotaryLayout) -> Tensor:
    """Return the maps `[..., d, d]` that multiply each rotary pair by a complex number.

    Its parts are `[..., P]`.
    """
    first = list(layout.first)
    second = list(layout.second)
    result = real.new_zeros(*real.shape[:-1], layout.head_dim, layout.head_dim)
    result[..., first, first] = result[..., second, second] = real
    result[..., second, first] = imaginary
    result[..., first, second] = -imaginary
    return result
