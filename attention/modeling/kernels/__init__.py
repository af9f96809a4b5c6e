"""Fused decoding on accelerators.

Checks whether the kernel supports a call, and whether its results are correct on this device.

Legend: B batch, H query heads, G^K / G^V kept key / value heads, S cached tokens, d head dim.

Triton is imported on first use only. `HEADFOLD_TRITON=0` in the environment turns the kernel off.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention.modeling.kernels.tables import LEAST, Tables
from attention.plan import LayerPlan

__all__ = ["Tables", "available", "fused_decode", "takes"]

# Of a head, slices together.
_WIDEST = 256
# Largest difference from the reference on values of unit variance that passes for rounding.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def takes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    widths: tuple[int, int] = (1, 1),
    rows: int = LEAST,
) -> bool:
    """Whether the kernel decodes this call.

    For key and value heads of these widths, and units of `rows` query heads (`Tables.members`).

    Shapes as `attention.modeling.decoding.decode` has them.
    """
    if query.device.type != "cuda" or torch.compiler.is_compiling() or not available():
        return False
    width = query.shape[-1]
    widest = width * max(widths)
    fits = widest <= _WIDEST and value.shape[-1] == width and query.dtype in TOLERANCE
    alike = query.dtype == key.dtype == value.dtype
    shared = mask is None or (
        mask.shape[1] == 1 and (mask.dtype == torch.bool or mask.is_floating_point())
    )
    return fits and alike and shared and trusted(query.device, query.dtype, width, widths, rows)


@cache
def available() -> bool:
    """Whether Triton can be imported and nobody has turned the kernel off."""
    return (
        os.environ.get("HEADFOLD_TRITON", "1") != "0"
        and importlib.util.find_spec("triton") is not None
    )


def fused_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: Tables,
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """As `attention.modeling.decoding.decode`, in one pass over the cache.

    Needs Triton; the mask is the same for all heads.
    """
    from attention.modeling.kernels.flash_decode import flash_decode

    return flash_decode(query, key, value, tables, mask, scaling)


@cache
def trusted(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    widths: tuple[int, int] = (1, 1),
    rows: int = LEAST,
) -> bool:
    """Return whether the kernel agrees with the reference on this device.

    Checked once per process, dtype, head dim, widths of key and value heads, and rows of a unit:
    the kernel is compiled for each.

    A compiler or a chip that nobody has tried must not change what a model says: it warns, and
    other ways are taken.
    """
    plan = LayerPlan((0, 1, 0, 2, 2, 2), (0, 0, 1, 1, 0, 1), *widths)
    if rows > LEAST:
        plan = LayerPlan((0,) * rows + (1,), tuple(h % 2 for h in range(rows + 1)), *widths)
    try:
        apart = difference(plan, width, 300, device, dtype)
    except Exception as error:  # a compiler may raise anything
        reason = f"{type(error).__name__}: {error}"
    else:
        if apart <= TOLERANCE[dtype]:
            return True
        reason = f"it differs from the reference by {apart:.2g}"
    warnings.warn(
        (
            f"Headfold's decode kernel is not used for {dtype} and head dim {width} on "
            f"{device}: {reason}"
        ),
        stacklevel=2,
    )
    return False


@torch.no_grad()
def difference(
    plan: LayerPlan,
    width: int,
    tokens: int,
    device: torch.device | str,
    dtype: torch.dtype,
    mask: Tensor | None = None,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> float:
    """Largest difference between the kernel and expand, then SDPA in float32, on random values.

    The batch is 2. `attend`, of query, key and value, is compared in the kernel's place.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, length, width, generator=generator, device="cpu").to(device, dtype)
        for heads, length in (
            (plan.num_heads * plan.key_width, 1),
            (plan.key_slices, tokens),
            (plan.value_slices, tokens),
        )
    )
    if attend is None:
        out = fused_decode(query, key, value, Tables.of(plan), mask, None).float()
    else:
        out = attend(query, key, value).float()

    def side(states: Tensor, head_width: int, head_map: tuple[int, ...]) -> Tensor:
        """Return each query head's own copy, its slices side by side."""
        heads = states.float().unflatten(1, (-1, head_width)).transpose(2, 3).flatten(3)
        return heads.index_select(1, torch.tensor(head_map, device=device))

    every = tuple(range(plan.num_heads))
    expected = scaled_dot_product_attention(
        side(query, plan.key_width, every),
        side(key, plan.key_width, plan.key_map),
        side(value, plan.value_width, plan.value_map),
        attn_mask=mask,
    )
    return float((out - expected).abs().max())
