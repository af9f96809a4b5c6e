"""The size of a layer's statistics, and how the mixed moments, their largest part, are stored.

Legend: H query heads, G KV heads, d head dim, D model dim, e = D + 1.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch

from attention.geometry import HeadGeometry

SAMPLE_TOKENS = 16_384
"""Tokens whose inputs are stored in addition to the moments."""
FREE_SHARE = 0.5
"""The largest share of the free disk or memory that the statistics of all layers may take."""
Mixed = Literal["float32", "bfloat16", "kv_group", "pooled"]
MIXED = cast("tuple[Mixed, ...]", get_args(Mixed))
"""Ways to keep the mixed moments, e (e + 1) / 2 numbers each, from the exact one to the smallest:
one a query head in float32; the same in bfloat16; in float32 one for the query heads of a KV
head, their mean; one for all of a layer."""


def stored_tokens(length: int) -> int:
    """Return the bound of tokens whose inputs are stored: one sequence of `length` at least."""
    return max(SAMPLE_TOKENS, length)


def matrices(geometry: HeadGeometry, mixed: Mixed) -> int:
    """Return the number of mixed moments of a layer.

    That of query head h is number h * matrices // H.
    """
    return {"kv_group": geometry.num_kv_heads, "pooled": 1}.get(mixed, geometry.num_heads)


def mixed_dtype(mixed: Mixed) -> torch.dtype:
    """Return the dtype in which the mixed moments are stored."""
    return torch.bfloat16 if mixed == "bfloat16" else torch.float32


def layer_bytes(
    geometry: HeadGeometry, tokens: int, mixed: Mixed = "float32", length: int = 0
) -> int:
    """Return the bytes of the statistics of one layer over `tokens` tokens.

    Args:
        geometry: That of the checkpoint.
        tokens: Calibration tokens.
        mixed: How the mixed moments are stored.
        length: Tokens of a sequence, where they may be more than `SAMPLE_TOKENS`.
    """
    wide = geometry.hidden_size + 1
    moments = (
        8 * wide**2
        + mixed_dtype(mixed).itemsize * matrices(geometry, mixed) * wide * (wide + 1) // 2
    )
    queries = 8 * geometry.num_heads * geometry.head_dim**2
    inputs = 4 * geometry.hidden_size
    return moments + queries + inputs * min(tokens, stored_tokens(length))


def sum_bytes(geometry: HeadGeometry, mixed: Mixed) -> int:
    """Return the bytes of the mixed moments of one layer while they are summed.

    They are whole matrices in float32 then.
    """
    return 4 * matrices(geometry, mixed) * (geometry.hidden_size + 1) ** 2


def most_exact(
    geometry: HeadGeometry, tokens: int, limit: float, length: int = 0, *, in_memory: bool = False
) -> Mixed:
    """Return the most exact way to store the mixed moments within `limit` bytes for all layers.

    The smallest is returned if none fits.

    Args:
        in_memory: Whether the statistics of all layers are made at once, so that all sums are in
            memory with them.
    """
    for mixed in MIXED:
        size = layer_bytes(geometry, tokens, mixed, length)
        size += sum_bytes(geometry, mixed) if in_memory else 0
        if geometry.num_layers * size <= limit:
            return mixed
    return MIXED[-1]
