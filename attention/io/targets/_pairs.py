"""Code that all engines share.

A KV head is a pair of a key head and a value head, with equally many query heads to each in a
layer. What follows from that for a plan, by counting alone, and the zero heads that make up the
rest.

A zero query head reads nothing and feeds zero columns of the output projection, so that padding is
exact. It takes work and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import lcm

import torch
from torch import Tensor

from attention.heads import KEY_SIDE, QUERY_SIDE, VALUE_SIDE, LayerHeads
from attention.io.targets import TargetError
from attention.plan import AttentionPlan, LayerPlan

MOST_QUERY_HEADS = 8
"""Most query heads that may be written, zeros included, as a multiple of the model's own: beyond it
the export does not pay."""

Pairs = dict[tuple[int, int], list[int]]


def pairs_of(layer: LayerPlan) -> Pairs:
    """Return query heads by the (key head, value head) pair that they read.

    Pairs are in order of appearance.
    """
    pairs: Pairs = {}
    for head, pair in enumerate(zip(layer.key_map, layer.value_map, strict=True)):
        pairs.setdefault(pair, []).append(head)
    return pairs


def kv_heads_of(plan: AttentionPlan) -> tuple[int, ...]:
    """KV heads that each layer needs where a KV head is a pair."""
    return tuple(len(pairs_of(layer)) for layer in plan.layers)


def widths_of(plan: AttentionPlan) -> tuple[int, ...]:
    """Return the most query heads of one pair, in each layer."""
    return tuple(max(map(len, pairs_of(layer).values())) for layer in plan.layers)


def query_heads_for_all(plan: AttentionPlan) -> int:
    """Return the fewest query heads that suit the KV heads and pairs of every layer.

    They are a multiple of every layer's KV heads and give each pair enough of them.
    """
    counts = kv_heads_of(plan)
    step = lcm(*counts)
    least = max(map(int.__mul__, counts, widths_of(plan)))
    return -(-least // step) * step


def check_query_heads(plan: AttentionPlan) -> int:
    """Return `query_heads_for_all`.

    Raises:
        TargetError: If they are more than `MOST_QUERY_HEADS` times the model's own.
    """
    heads = query_heads_for_all(plan)
    if heads <= MOST_QUERY_HEADS * plan.num_heads:
        return heads
    counts = kv_heads_of(plan)
    index = max(range(len(counts)), key=lambda i: counts[: i + 1].index(counts[i]))
    raise TargetError(
        f"layer {index} has {counts[index]} KV heads, other layers "
        f"{sorted(set(counts) - {counts[index]})}: one number of query heads that "
        f"all divide is {heads}, more than {MOST_QUERY_HEADS} times the model's {plan.num_heads}; "
        f"choose counts that divide each other, or export to target gguf"
    )


def check_no_composition(plan: AttentionPlan, name: str) -> None:
    """Raise TargetError for a plan whose heads are composed.

    Every layer's are, and no engine does that.
    """
    if plan.composition is not None:
        raise TargetError(
            f"target {name} has no composition of heads, which every layer from layer 0 on has "
            f"(dcmha); export to "
            "target transformers, or convert with a recipe without composition"
        )


def widest_layers(plan: AttentionPlan) -> str:
    """Describe the place where a plan needs most KV heads, for errors.

    `layer 2 has 3 pairs of a key and a value head`.
    """
    counts = kv_heads_of(plan)
    return f"layer {counts.index(max(counts))} has {max(counts)} pairs of a key and a value head"


def _chosen(
    heads: LayerHeads,
    queries: Sequence[int | None],
    keys: Sequence[int | None],
    values: Sequence[int | None],
) -> LayerHeads:
    """Query, key and value heads by index; None gives zeros."""
    for side, index in ((QUERY_SIDE, queries), (KEY_SIDE, keys), (VALUE_SIDE, values)):
        heads = heads.changed(side, partial(_take, index=index))
    return heads


def _take(x: Tensor, index: Sequence[int | None]) -> Tensor:
    """Rows of x by index; None gives a row of zeros."""
    zero = torch.zeros_like(x[0])
    return torch.stack([zero if i is None else x[i] for i in index])


def pad(heads: LayerHeads, layer: LayerPlan, kv_heads: int, width: int) -> LayerHeads:
    """Pad the heads of one layer to `kv_heads` KV heads with `width` query heads each, by zeros."""
    keys: list[int | None] = []
    values: list[int | None] = []
    queries: list[int | None] = []
    for (key, value), members in pairs_of(layer).items():
        keys.append(key)
        values.append(value)
        queries += [*members, *[None] * (width - len(members))]
    missing = kv_heads - len(keys)
    keys += [None] * missing
    values += [None] * missing
    queries += [None] * missing * width
    return _chosen(heads, queries, keys, values)


def unpad(padded: LayerHeads, layer: LayerPlan) -> LayerHeads:
    """Return the inverse of `pad`.

    Raises:
        ValueError: For heads that `pad` has not made of this layer's plan.
    """
    pairs = pairs_of(layer)
    width = padded.num_heads // padded.k.shape[0]
    index_of = {
        head: i * width + j
        for i, members in enumerate(pairs.values())
        for j, head in enumerate(members)
    }
    keys, values = (
        [side.index(head) for head in range(max(side) + 1)] for side in zip(*pairs, strict=True)
    )
    queries = [index_of[head] for head in range(layer.num_heads)]
    heads = _chosen(padded, queries, keys, values)
    again = pad(heads, layer, padded.k.shape[0], width)
    for name in (*QUERY_SIDE, *KEY_SIDE, *VALUE_SIDE):
        one = getattr(padded, name)
        other = getattr(again, name)
        if one is not None and not torch.equal(one, other):
            raise ValueError(f"{name} of the padded heads is not what the plan's groups give")
    return heads


def written_out(plan: AttentionPlan) -> tuple[str, ...]:
    """Return a note about shared weights, which these formats do not have.

    None if nothing is shared.
    """
    if not plan.is_shared:
        return ()
    heads = len({(s.layer, s.head) for s in plan.head_shares})
    return (
        f"{heads} shared heads and {len(plan.mlp_shares)} shared MLP blocks are written out: this "
        f"format "
        "has a separate copy for every layer, so the file and the memory are those "
        "of the unshared model",
    )
