"""Attention of one new token with a key map and a value map, fused.

Neither keys nor values are ever expanded.

Legend: B batch, H query heads, U units (query heads of one key head), M rows of a unit, G^K / G^V
kept heads, S cached tokens in n splits, d head dim; K and V: widths of key and value heads, m·d, in
powers of two.

Flash decoding (Dao 2023): the cache is split, each program goes through one split with an online
softmax, a second small kernel merges the splits. One program serves all query heads of a key head,
so that each key is read once; of the values it reads those heads that its rows need, and adds to
each row only what that row's own value head gives.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false
# Triton is installed on some machines only, and a kernel is written and called in Triton's own
# language.

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.modeling.kernels.tables import Tables

STEP_BYTES = (
    128  # per column: 64 tokens per step in half precision, 32 in float32, to fit in shared memory
)
_LONG_COLUMN = 128  # numbers of a head
MOST_SPLITS = 64
PROGRAMS_A_PROCESSOR = 4
NO_MASK = 0
BOOLEAN = 1
ADDITIVE = 2
# Triton's interpreter multiplies the bit patterns of bfloat16 as if they were integers.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _attend_split(
    query, key, value, mask, keys, members, values, counts, value_map, out, maxima, sums,
    scaling, tokens, split_tokens, units, heads, splits,
    query_b, query_h, key_b, key_h, key_s, value_b, value_h, value_s, mask_b, mask_s,
    HEAD: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend to one split of one unit of one sequence.

    Writes out `[B, H, n, m·d]`, not yet divided, and maxima and sums `[B, H, n]`. A head of width
    m·d is stored as m neighbouring heads of width d.
    """
    unit = tl.program_id(0) % units
    batch = (tl.program_id(0) // units).to(tl.int64)  # offsets of long caches pass 2^31
    split = tl.program_id(1)
    key_columns = tl.arange(0, K)
    value_columns = tl.arange(0, V)
    key_slice = (key_columns // HEAD).to(tl.int64)
    value_slice = (value_columns // HEAD).to(tl.int64)
    rows = tl.arange(0, M)
    in_key = key_columns < KEY_WIDTH * HEAD
    in_value = value_columns < VALUE_WIDTH * HEAD
    head = tl.load(members + unit * M + rows)
    real = head >= 0
    own_value = tl.load(value_map + head, mask=real, other=-1)
    key_head = tl.load(keys + unit).to(tl.int64) * KEY_WIDTH
    count = tl.load(counts + unit)
    q_MK = tl.load(
        query
        + batch * query_b
        + (head[:, None] * KEY_WIDTH + key_slice[None, :]) * query_h
        + (key_columns % HEAD)[None, :],
        mask=real[:, None] & in_key[None, :],
        other=0.0,
    )
    if UPCAST:
        q_MK = q_MK.to(tl.float32)
    maximum = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, V], tl.float32)
    end = tl.minimum((split + 1) * split_tokens, tokens)
    for start in range(split * split_tokens, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < end
        k_KS = tl.load(
            key
            + batch * key_b
            + (key_head + key_slice)[:, None] * key_h
            + place[None, :] * key_s
            + (key_columns % HEAD)[:, None],
            mask=inside[None, :] & in_key[:, None],
            other=0.0,
        )
        if UPCAST:
            k_KS = k_KS.to(tl.float32)
        scores = tl.dot(q_MK, k_KS, input_precision="ieee") * scaling
        if MASK == 1:
            inside = inside & (
                tl.load(mask + batch * mask_b + place * mask_s, mask=inside, other=0) != 0
            )
        if MASK == 2:
            scores += tl.load(mask + batch * mask_b + place * mask_s, mask=inside, other=0.0).to(
                tl.float32
            )[None, :]
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen nothing yet: exp(-inf - 0) is 0, exp(-inf + inf) would be no number.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - finite[:, None])
        faded = tl.exp(maximum - finite)
        total = total * faded + tl.sum(weights, 1)
        mixed = mixed * faded[:, None]
        for n in range(0, count):
            value_head = tl.load(values + unit * N + n)
            v_SV = tl.load(
                value
                + batch * value_b
                + (value_head.to(tl.int64) * VALUE_WIDTH + value_slice)[None, :] * value_h
                + place[:, None] * value_s
                + (value_columns % HEAD)[None, :],
                mask=(place < end)[:, None] & in_value[None, :],
                other=0.0,
            )
            if UPCAST:
                v_SV = v_SV.to(tl.float32)
            own = tl.where((own_value == value_head)[:, None], weights, 0.0)
            mixed += tl.dot(own.to(v_SV.dtype), v_SV, input_precision="ieee")
        maximum = higher
    slot = (batch * heads + head) * splits + split
    tl.store(maxima + slot, maximum, mask=real)
    tl.store(sums + slot, total, mask=real)
    tl.store(
        out + slot[:, None] * (VALUE_WIDTH * HEAD) + value_columns[None, :],
        mixed,
        mask=real[:, None] & in_value[None, :],
    )


@triton.jit
def _merge_splits(
    parts, maxima, sums, out, splits, WIDTH: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """`[B, H, n, d]`, maxima and sums `[B, H, n]` -> out `[B, H, d]`: one program a head."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    columns = tl.arange(0, D)
    there = split < splits
    wide = columns < WIDTH
    maximum = tl.load(maxima + row * splits + split, mask=there, other=float("-inf"))
    weight = tl.exp(maximum - tl.max(maximum, 0))
    total = tl.sum(weight * tl.load(sums + row * splits + split, mask=there, other=0.0), 0)
    part = tl.load(
        parts + (row * splits + split)[:, None] * WIDTH + columns[None, :],
        mask=there[:, None] & wide[None, :],
        other=0.0,
    )
    mixed = tl.sum(part * weight[:, None], 0) / total
    tl.store(out + row * WIDTH + columns, mixed.to(out.dtype.element_ty), mask=wide)


def flash_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: Tables,
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """Run attention of one new token over the cache in one kernel.

    Scores, softmax and sums run in float32. A row that sees nothing comes out as not a number, as
    from a softmax.

    Args:
        query: `[B, H, 1, d]`; heads of width m as m of them.
        key: `[B, G^K, S, d]`, likewise.
        value: `[B, G^V, S, d]`, likewise.
        tables: Those of the layer's maps.
        mask: `[B or 1, 1, 1, S]`, or None.
        scaling: Factor of the scores.

    Returns:
        `[B, H, 1, m·d]`, m the width of value heads.
    """
    batch, slices, _, head = query.shape
    heads = slices // tables.key_width
    width = tables.value_width * head
    tokens = key.shape[2]
    device = query.device
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    tables = tables.on(device)
    units, rows = tables.members.shape
    key_padded, value_padded = (
        max(16, triton.next_power_of_2(m * head)) for m in (tables.key_width, tables.value_width)
    )
    # For long columns fewer tokens per step, so that these too fit in shared memory
    longest = max(_LONG_COLUMN, key_padded, value_padded)
    block = max(16, STEP_BYTES * _LONG_COLUMN // longest // query.element_size())
    splits, split_tokens = split_sizes(tokens, batch * units, _processors(device), block)
    parts = torch.empty((batch, heads, splits, width), dtype=torch.float32, device=device)
    maxima, sums = torch.empty((2, batch, heads, splits), dtype=torch.float32, device=device)
    out = torch.empty((batch, heads, 1, width), dtype=query.dtype, device=device)
    kind, read, mask_b, mask_s = _mask(mask, query, batch, tokens)
    grid: Any = (batch * units, splits)
    merged: Any = (batch * heads,)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _attend_split[grid](
            query, key, value, read, tables.keys, tables.members, tables.values, tables.counts, tables.value_map,
            parts, maxima, sums,
            (tables.key_width * head) ** -0.5 if scaling is None else scaling, tokens, split_tokens, units, heads, splits,
            query.stride(0), query.stride(1), *key.stride()[:3], *value.stride()[:3], mask_b, mask_s,
            HEAD=head, KEY_WIDTH=tables.key_width, VALUE_WIDTH=tables.value_width, K=key_padded, V=value_padded,
            M=rows, N=tables.values.shape[1], BLOCK=block, MASK=kind,
            UPCAST=INTERPRETED and query.dtype == torch.bfloat16,
        )  # fmt: skip
        _merge_splits[merged](
            parts,
            maxima,
            sums,
            out,
            splits,
            WIDTH=width,
            D=value_padded,
            SPLITS=max(2, triton.next_power_of_2(splits)),
        )
    return out


def split_sizes(tokens: int, programs: int, processors: int, block: int) -> tuple[int, int]:
    """Into how many splits the cache goes, and the tokens of each.

    Enough to keep all processors at work.
    """
    splits_wanted = -(-PROGRAMS_A_PROCESSOR * processors // programs)
    blocks = -(-tokens // block)
    length = -(-blocks // min(splits_wanted, MOST_SPLITS, blocks)) * block
    return -(-tokens // length), length


def _mask(
    mask: Tensor | None, query: Tensor, batch: int, tokens: int
) -> tuple[int, Tensor, int, int]:
    """Its kind, what the kernel reads, and the strides of batch and tokens."""
    if mask is None:
        return NO_MASK, query, 0, 0
    expanded = mask.expand(batch, 1, 1, tokens)
    if expanded.dtype == torch.bool:
        return BOOLEAN, expanded.view(torch.uint8), expanded.stride(0), expanded.stride(3)
    return ADDITIVE, expanded, expanded.stride(0), expanded.stride(3)


@cache
def _processors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 4
    )
