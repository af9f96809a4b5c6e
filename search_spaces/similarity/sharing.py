"""Similarity of the heads that a plan shares, unchanged and after alignment.

Legend: H query heads, d head dim. Cosines are means over tokens of the cosine of two heads' vectors
of one token (Jin 2024, section 3.3); keys are taken before RoPE, biases included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from attention.calibration.moments import LayerStatistics
from attention.conversion.alignment.grams import head_gram, pair_similarity
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.plan import AttentionPlan
from search_spaces.similarity.projections import layout_of_side
from search_spaces.site import SIDES

_TOKENS = 4096


@dataclass(frozen=True)
class PairCosines:
    """Mean cosine of every pair of heads of one layer and side, `[H, H]` float64.

    `raw` as they are, `aligned` after the best map of one of them that leaves the model as it is
    (any rotation for values, one in each rotary pair for keys).
    """

    raw: Tensor
    aligned: Tensor


def pair_cosines(
    heads: LayerHeads,
    statistics: LayerStatistics,
    geometry: HeadGeometry,
    side: str,
    tokens: int = _TOKENS,
) -> PairCosines:
    """Return the cosines of the pairs of lifted heads of a layer, before and after alignment.

    Each pair has a separate map, so `aligned` is the score of pairs in Jin 2024, eq. 18 and 19; one
    map per head for a group of three or more reaches less. With a norm on the keys, theirs is only
    what a rotation could reach.

    Args:
        tokens: The first sampled sequences that have so many tokens are used.

    Raises:
        ValueError: Without sampled inputs, or for a side that is neither "key" nor "value".
    """
    inputs = statistics.inputs
    if inputs.dim() == 3 and len(inputs):
        statistics = replace(statistics, inputs=inputs[: max(1, tokens // inputs.shape[1])])
    gram = head_gram(heads, statistics, side, "cos")
    layout = layout_of_side(heads, geometry, side)
    raw = torch.einsum("ijdd->ij", gram)
    return PairCosines((raw + raw.T) / 2, pair_similarity(gram, "cos", layout))


def similarity_pairs(
    heads: Sequence[LayerHeads],
    statistics: Sequence[LayerStatistics],
    geometry: HeadGeometry,
) -> list[dict[str, PairCosines]]:
    """Return the similarities of pairs (`pair_cosines`) of every layer and side.

    They depend on the checkpoint alone: all plans can use them.
    """
    return [
        {
            side: pair_cosines(layer_heads, layer_statistics, geometry.layer(index), side)
            for side in SIDES
        }
        for index, (layer_heads, layer_statistics) in enumerate(zip(heads, statistics, strict=True))
    ]


def sharing_similarity(
    pairs: Sequence[dict[str, PairCosines]], plan: AttentionPlan, kv_map: Sequence[int]
) -> dict[str, Any]:
    """Return the cosines of heads that a plan groups, before and after alignment, as JSON values.

    They are `{"key": {"raw", "aligned", "pairs"}, "value": ..., "means": {"key_raw", ...}}`: lists
    with one entry per layer, each the mean over all pairs of distinct stored heads that share a
    group, None where there is no such pair; `means` weigh the layers by their pairs and leave out a
    side without any.

    Args:
        pairs: `pair_cosines` of each layer and side.
        plan: The plan.
        kv_map: The stored head of each query head.
    """
    means: dict[str, Any] = {"means": {}}
    for side in SIDES:
        shared = [_pairs(getattr(layer, f"{side}_groups"), kv_map) for layer in plan.layers]
        counts = [len(layer_heads) for layer_heads in shared]
        means[side] = {"pairs": counts}
        for name in ("raw", "aligned"):
            sums = [
                sum(float(getattr(layer_pairs[side], name)[i, j]) for i, j in layer_heads)
                for layer_pairs, layer_heads in zip(pairs, shared, strict=True)
            ]
            means[side][name] = [
                total / count if count else None for total, count in zip(sums, counts, strict=True)
            ]
            if sum(counts):
                means["means"][f"{side}_{name}"] = sum(sums) / sum(counts)
    return means


def _pairs(groups: Iterable[Sequence[int]], kv_map: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of query heads that share a group, one query head per stored head."""
    pairs: list[tuple[int, int]] = []
    for group in groups:
        stored = {kv_map[head]: head for head in reversed(group)}
        pairs += combinations(sorted(stored.values()), 2)
    return pairs
