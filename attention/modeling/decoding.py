"""Attention of one new token over a long cache, which reads each kept key and value once.

Neither is expanded.

Legend: B batch, H query heads, G^K / G^V kept key / value heads, m query heads of a group, S cached
tokens, d head dim.

Three ways, all equal to `expand_heads` followed by SDPA, which stays as the reference:
- `decode_padded`: groups gathered and padded to the widest, one batched product for keys and one
  for values;
- `decode_by_group`: one product a group, no padding; faster where a product is large enough to be
  worth a call;
- `attention.modeling.kernels`: one fused kernel, on CUDA devices where Triton is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from attention.base.constants import DeviceConstant
from attention.modeling import kernels
from attention.modeling.scores import capped, softmax_beside
from attention.plan import LayerPlan
from attention.plan_parts import groups_of

# Size of a kept head's part of the cache, S·d, from which one product per group is faster than one
# padded product for all groups (benchmarks/LOG.md).
GROUPED_FROM = 1 << 16


@dataclass(frozen=True)
class HeadSlots:
    """The order of the query heads when gathered by kept head and padded to the widest group.

    Attributes:
        groups: Number of kept heads.
        width: Members of the widest group, m.
        heads: `[G·m]`, the query head in each slot; a group narrower than m repeats its first
            member.
        place: `[H]`, the slot of each query head.
    """

    groups: int
    width: int
    heads: DeviceConstant
    place: DeviceConstant

    @classmethod
    def of(cls, head_map: Sequence[int]) -> HeadSlots:
        """Return the slots of a map from query heads to kept heads."""
        groups = groups_of(head_map)
        width = max(len(g) for g in groups)
        heads = [member for g in groups for member in (*g, *[g[0]] * (width - len(g)))]
        slots = [head_map[h] * width + groups[head_map[h]].index(h) for h in range(len(head_map))]
        in_order, place = (DeviceConstant(_index(numbers)) for numbers in (heads, slots))
        return cls(len(groups), width, in_order, place)

    def gather(self, x: Tensor) -> Tensor:
        """Return the query heads `[B, H, n]` by group, `[B, G, m, n]`."""
        return x.index_select(1, self.heads.on(x.device)).unflatten(1, (self.groups, self.width))

    def scatter(self, x: Tensor) -> Tensor:
        """Return groups `[B, G, m, n]` as query heads `[B, H, n]`, without the padding."""
        return x.flatten(1, 2).index_select(1, self.place.on(x.device))


@dataclass(frozen=True)
class HeadMaps:
    """The layout of a layer's plan at run time. Built once per layer, outside of the forward pass.

    `by_key [H]`: the query heads, those of one key head adjacent; `by_value [H]`: the same by value
    head, as indices into `by_key` (None if the order is the same); `back [H]`: the index of each
    query head after both. `key_sizes` and `value_sizes`: how many query heads each group has.

    Attributes:
        kernel: The maps as the fused kernel reads them.
    """

    plan: LayerPlan
    key_slots: HeadSlots
    value_slots: HeadSlots
    by_key: Tensor
    by_value: Tensor | None
    back: Tensor
    key_sizes: tuple[int, ...]
    value_sizes: tuple[int, ...]
    kernel: kernels.Tables

    @classmethod
    def of(cls, plan: LayerPlan) -> HeadMaps:
        """Return the maps of a layer."""
        keys, values = (
            [h for g in groups for h in g] for groups in (plan.key_groups, plan.value_groups)
        )
        return cls(
            plan,
            HeadSlots.of(plan.key_map),
            HeadSlots.of(plan.value_map),
            _index(keys),
            None if keys == values else _index([keys.index(h) for h in values]),
            _index([values.index(h) for h in range(plan.num_heads)]),
            tuple(map(len, plan.key_groups)),
            tuple(map(len, plan.value_groups)),
            kernels.Tables.of(plan),
        )


def _index(numbers: Sequence[int]) -> Tensor:
    # Always on the CPU: a model that is being loaded is built on the meta device, and tensors that
    # are not buffers would stay there.
    return torch.tensor(numbers, device="cpu")


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: HeadMaps,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of one new token by the fastest method for this device and size.

    query `[B, H, 1, d]`, key `[B, G^K, S, d]`, value `[B, G^V, S, d]`, mask broadcastable to `[B,
    H, 1, S]` (boolean: True attends; or additive), sinks `[H]`. A head of width m is m of them, its
    slices, side by side.

    Returns:
        `[B, H, 1, d]`, d times their width where value heads are wide.
    """
    if softcap is not None or sinks is not None:  # the other methods support neither
        return decode_padded(query, key, value, maps, mask, scaling, softcap, sinks)
    rows = maps.kernel.members.shape[1]
    if kernels.takes(query, key, value, mask, maps.plan.widths, rows):
        return kernels.fused_decode(query, key, value, maps.kernel, mask, scaling)
    # Of several sequences the threads of a batched product each take some; one thread has nothing
    # of that.
    single = len(query) == 1 or torch.get_num_threads() == 1
    large = key.shape[2] * key.shape[3] >= GROUPED_FROM
    if query.device.type == "cpu" and single and large and not maps.plan.is_wide:
        return decode_by_group(query, key, value, maps, mask, scaling)
    return decode_padded(query, key, value, maps, mask, scaling)


def decode_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: HeadMaps,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `decode` by two batched products over groups padded to the widest."""
    scores = capped(decode_scores(query, key, maps, scaling).squeeze(2), softcap)
    weights = _softmax(scores, mask, None, sinks)
    return decode_mix(weights.unsqueeze(2), value, maps)


def decode_by_group(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: HeadMaps,
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """Compute `decode` by one product for each group of each sequence, written in place.

    Without gradients, on the CPU.
    """
    q_BHd = (query.squeeze(2) * _factor(query, scaling)).index_select(1, maps.by_key)
    weights = _softmax(_products(q_BHd, key.transpose(-1, -2), maps.key_sizes), mask, maps.by_key)
    if maps.by_value is not None:
        weights = weights.index_select(1, maps.by_value)
    return _products(weights, value, maps.value_sizes).index_select(1, maps.back).unsqueeze(2)


def _products(rows: Tensor, head_rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Multiply rows `[B, H, n]`, sorted into groups of these sizes, by their group's `[n, p]`."""
    result = rows.new_empty((*rows.shape[:2], head_rows.shape[-1]))
    for b, sequence in enumerate(head_rows):
        grouped = zip(rows[b].split(sizes), sequence, result[b].split(sizes), strict=True)
        for members, rows_of_group, out in grouped:
            torch.mm(members, rows_of_group, out=out)
    return result


def decode_scores(query: Tensor, key: Tensor, maps: HeadMaps, scaling: float | None) -> Tensor:
    """Scaled scores of one new token, `[B, H, 1, d]` and `[B, G^K, S, d]` -> `[B, H, 1, S]`.

    Those of the slices of wide heads add up.
    """
    width = maps.plan.key_width
    query = query.squeeze(2) * _factor(query, scaling, width)
    if width == 1:
        grouped = maps.key_slots.gather(query)
        return maps.key_slots.scatter(grouped @ key.transpose(-1, -2)).unsqueeze(2)
    slices = zip(slices_of(query, width), slices_of(key, width), strict=True)
    products = (maps.key_slots.gather(q) @ k.transpose(-1, -2) for q, k in slices)
    return maps.key_slots.scatter(sum_of(products)).unsqueeze(2)


def slices_of(states: Tensor, width: int) -> tuple[Tensor, ...]:
    """Return m views `[B, n, ...]` of `[B, n·m, ...]`, one of each slice of all heads."""
    return states.unflatten(1, (-1, width)).unbind(2)


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """Add up tensors of one shape."""
    return reduce(torch.add, tensors)


def decode_mix(weights: Tensor, value: Tensor, maps: HeadMaps) -> Tensor:
    """Return values under the weights of one new token.

    Args:
        weights: `[B, H, 1, S]`.
        value: `[B, G^V, S, d]`.
        maps: Those of the layer.

    Returns:
        `[B, H, 1, d]`, the slices of wide heads side by side.
    """
    grouped = maps.value_slots.gather(weights.squeeze(2))
    slices = slices_of(value, maps.plan.value_width)
    mixed = [maps.value_slots.scatter(grouped @ part) for part in slices]
    return torch.cat(mixed, -1).unsqueeze(2) if len(mixed) > 1 else mixed[0].unsqueeze(2)


def _factor(query: Tensor, scaling: float | None, width: int = 1) -> float:
    return float(width * query.shape[-1]) ** -0.5 if scaling is None else scaling


def _softmax(
    scores: Tensor, mask: Tensor | None, order: Tensor | None, sinks: Tensor | None = None
) -> Tensor:
    """Return weights `[B, H, S]` of scores whose heads are in `order`, with mask and sinks."""
    if mask is not None:
        mask = mask.squeeze(2)
        if order is not None and mask.shape[1] > 1:
            mask = mask.index_select(1, order)
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        )
    if sinks is not None:
        return softmax_beside(scores, sinks)
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
