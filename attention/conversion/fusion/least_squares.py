"""Least-squares fusion: one shared head a group, and for each member the linear map that reads it best.

Legend: H heads, g members, d head dim, f free dims, P rotary pairs. Alignment followed by a mean restricts each member
to an orthogonal map (to a phase in each rotary pair); here the map is free and still costs nothing at run time, since
it is folded into the member's query rows (keys) and output columns (values).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention.axes import FUSION, Knob
from attention.calibration.moments import LayerStatistics
from attention.conversion.fusion.costs import ValueCost, free_parts
from attention.conversion.fusion.pooled import Groups, check_lifted, mean_fuse
from attention.conversion.fusion.rank import complex_gram, fit_complex, fit_real, pair_energy
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.modeling.rotary import pair_maps
from attention.plan import LayerPlan

SWEEPS = Knob("sweeps", "int", "rounds that fit the shared value head to the members' own covariances", low=0, high=50)


@FUSION.part(
    "least_squares",
    source="ours (docs/methods.md, section 6); low-rank KV heads by group: Yu 2024",
    knobs=(SWEEPS,),
    needs=("statistics",),
)
def least_squares_fuse(
    heads: LayerHeads,
    plan: LayerPlan,
    statistics: LayerStatistics | None,
    geometry: HeadGeometry,
    *,
    sweeps: int = 2,
) -> LayerHeads:
    """Shared heads by rank-constrained least squares on calibration moments.

    Values: the best shared head under the group's mean covariance of attention-mixed inputs, then each member's output
    columns refitted under its own, and `sweeps` rounds of both. The constant that biases contribute is one more input;
    an output bias, where there is one, takes up the means instead. Keys: in each rotary pair one shared complex key and
    one complex scale a member, folded into its query; in free dims a shared key and a map a member. With a norm on
    queries and keys: mean keys. The shared heads have the root-mean-square norm of their members. A group of one is
    copied.
    Raises ValueError without statistics or if the heads are not lifted.
    """
    if statistics is None:
        raise ValueError("fusion=least_squares needs a calibration; pass the layer's statistics")
    check_lifted(heads, plan)
    keys = mean_fuse(heads, plan) if geometry.qk_norm else _fuse_keys(heads, plan.key_groups, statistics, geometry)
    values = _fuse_values(heads, plan.value_groups, statistics, sweeps)
    return replace(values, q=keys.q, k=keys.k, q_bias=keys.q_bias, k_bias=keys.k_bias)


def _mixed(rows: Tensor | None, maps: Tensor, like: Tensor) -> Tensor | None:
    """sum_i maps_i y_i for the rows `[H, d, D]` or biases `[H, d]` of the members: one shared head."""
    return None if rows is None else torch.einsum("iab,ib...->a...", maps, rows.double()).to(like.dtype)


def _mapped(rows: Tensor | None, maps: Tensor) -> Tensor | None:
    """maps_i y_i for each member's rows or bias."""
    return None if rows is None else torch.einsum("iab,ib...->ia...", maps, rows.double()).to(rows.dtype)


def _pick(rows: Tensor | None, group: Sequence[int]) -> Tensor | None:
    return None if rows is None else rows[list(group)]


def _stacked(parts: list[Tensor | None]) -> Tensor | None:
    kept = [part for part in parts if part is not None]
    return torch.stack(kept) if kept else None


def key_maps(
    heads: LayerHeads, group: Sequence[int], statistics: LayerStatistics, geometry: HeadGeometry
) -> tuple[Tensor, Tensor]:
    """`[g, d, d]` twice: F with k' = sum_i F_i k_i, and E with q'_i = E_i q_i, so that q'_i^T k' ~ q_i^T k_i."""
    layout, own = geometry.rotary, list(group)
    heads = replace(
        heads, q=heads.q[own], k=heads.k[own], q_bias=_pick(heads.q_bias, group), k_bias=_pick(heads.k_bias, group)
    )
    gram = statistics.key_gram(heads)
    mix, scale = fit_complex(complex_gram(gram, layout), pair_energy(statistics.query_gram(heads), layout))
    into, onto = (pair_maps(numbers.real.T, -numbers.imag.T, layout) for numbers in (mix, scale))
    if layout.free:
        free_gram, moment = free_parts(heads, statistics, geometry)
        fit = fit_real(free_gram.expand(len(group), *free_gram.shape), moment)
        free = torch.tensor(layout.free)
        into[:, free[:, None], free] = fit.basis.transpose(1, 2)
        onto[:, free[:, None], free] = fit.back.transpose(1, 2)
    return into, onto


def _fuse_keys(heads: LayerHeads, groups: Groups, statistics: LayerStatistics, geometry: HeadGeometry) -> LayerHeads:
    q, q_bias = heads.q.clone(), None if heads.q_bias is None else heads.q_bias.clone()
    k: list[Tensor | None] = []
    k_bias: list[Tensor | None] = []
    for group in groups:
        if len(group) == 1:
            k.append(heads.k[group[0]])
            k_bias.append(None if heads.k_bias is None else heads.k_bias[group[0]])
            continue
        into, onto = key_maps(heads, group, statistics, geometry)
        k.append(_mixed(_pick(heads.k, group), into, heads.k))
        k_bias.append(_mixed(_pick(heads.k_bias, group), into, heads.k))
        q[list(group)] = _mapped(heads.q[list(group)], onto)  # type: ignore[assignment]
        if q_bias is not None:
            q_bias[list(group)] = _mapped(q_bias[list(group)], onto)  # type: ignore[assignment]
    return replace(heads, q=q, q_bias=q_bias, k=_stacked(k), k_bias=_stacked(k_bias))


def _fuse_values(heads: LayerHeads, groups: Groups, statistics: LayerStatistics, sweeps: int) -> LayerHeads:
    cost = ValueCost(heads, statistics)
    mean = statistics.mixed_value_mean(heads)
    o, shift = heads.o.clone(), heads.o.new_zeros(heads.hidden_size, dtype=torch.float64)
    v: list[Tensor | None] = []
    v_bias: list[Tensor | None] = []
    for group in groups:
        if len(group) == 1:
            v.append(heads.v[group[0]])
            v_bias.append(None if heads.v_bias is None else heads.v_bias[group[0]])
            continue
        index = torch.tensor(group)
        fit = cost.fit(index, sweeps)
        into = fit.basis.transpose(1, 2)
        v.append(_mixed(heads.v[index], into, heads.v))
        v_bias.append(_mixed(_pick(heads.v_bias, group), into, heads.v))
        columns = heads.o[index].double()
        o[index] = (columns @ fit.back).to(o.dtype)
        own = mean[index, index]
        shared = torch.einsum("iab,hib->ha", into, mean[index[:, None], index])
        gap = own - torch.einsum("hab,hb->ha", fit.back, shared)
        shift = shift + torch.einsum("hda,ha->d", columns, gap)
    o_bias = None if heads.o_bias is None else (heads.o_bias.double() + shift).to(heads.o_bias.dtype)
    return replace(heads, o=o, v=_stacked(v), v_bias=_stacked(v_bias), o_bias=o_bias)
