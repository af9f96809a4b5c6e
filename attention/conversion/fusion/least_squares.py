"""Least-squares fusion.

One shared head a group, as wide as its members or m times as wide, and for each member the linear
map that reads it best.

Legend: H heads, g members, d head dim, m width of the shared heads, D model dim. The maps cost
nothing at run time: they are folded into query rows (keys) and output columns (values).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention.axes import FUSION, Knob
from attention.calibration.moments import LayerStatistics, augmented
from attention.conversion.fusion.costs import (
    ValueCost,
    free_parts,
    under_norm,
    value_sizes,
    with_unit_values,
)
from attention.conversion.fusion.pooled import Groups, check_lifted, mean_fuse
from attention.conversion.fusion.rank import complex_gram, fit_complex, fit_real, pair_energy
from attention.conversion.fusion.signs import with_signs
from attention.geometry import HeadGeometry
from attention.heads import KEY_SIDE, VALUE_SIDE, LayerHeads, distinct_heads
from attention.modeling.rotary import pair_maps
from attention.plan import LayerPlan

SWEEPS = Knob(
    "sweeps",
    "int",
    "rounds that fit the shared value head to the members' own covariances",
    low=0,
    high=50,
)


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

    Values: the best shared head under the group's mean covariance of attention-mixed inputs, then
    each member's output columns refitted under its own, and `sweeps` rounds of both. Biases are one
    more input; an output bias takes up the means instead. Keys: in each rotary pair one shared
    complex key and one complex scale a member, folded into its query; in free dims a shared key and
    a map a member; with a norm on the queries and keys of each head mean keys, after the signs that
    pass it (`attention.conversion.fusion.signs`); for a norm over all heads see
    `_under_whole_norm`. Shared heads have the root-mean-square norm of their members. A shared head
    of width m has m keys in each rotary pair, and m d dims of values, which all members read. For
    a norm on the values of each head see `_fuse_normed_values`.

    Raises:
        ValueError: Without statistics or if the heads are not lifted.
    """
    if statistics is None:
        raise ValueError("fusion=least_squares needs a calibration; pass the layer's statistics")
    check_lifted(heads, plan)
    if geometry.whole_norm:
        keys = _under_whole_norm(heads, plan, statistics, geometry)
    elif geometry.qk_norm:
        turned = (
            with_signs(heads, plan.key_groups, statistics, geometry)
            if geometry.keeps_signs
            else heads
        )
        keys = mean_fuse(turned, replace(plan, key_width=1, value_width=1))
    else:
        keys = _fuse_keys(heads, plan, statistics, geometry)
    fuse_values = _fuse_normed_values if geometry.value_norm else _fuse_values
    values = fuse_values(heads, plan, statistics, sweeps)
    of_keys = {name: getattr(keys, name) for name in (*KEY_SIDE, "q", "q_bias", "q_norm")}
    return replace(values, **of_keys)


def _shared(
    rows: Tensor | None, groups: Groups, maps: Sequence[Tensor | None], width: int
) -> Tensor | None:
    """Return one head per group, sum_i maps_i y_i of its heads.

    Their rows are `[H, d, D]` or their biases `[H, d]`.

    A group of one, which has no maps, is copied; what it lacks of `width` is zero.
    """
    if rows is None:
        return None
    heads = [
        _padded(rows[group[0]], 0, width)
        if into is None
        else torch.einsum("iab,ib...->a...", into, rows[list(group)].double())
        for group, into in zip(groups, maps, strict=True)
    ]
    return torch.stack([head.to(rows.dtype) for head in heads])


def _padded(rows: Tensor, axis: int, width: int) -> Tensor:
    """Return `rows` with its axis of size d lengthened to `width` times d by zeros."""
    size = list(rows.shape)
    size[axis] *= width - 1
    return torch.cat([rows, rows.new_zeros(size)], axis) if width > 1 else rows


def _pick(rows: Tensor | None, group: Sequence[int]) -> Tensor | None:
    return None if rows is None else rows[list(group)]


def key_maps(
    heads: LayerHeads,
    group: Sequence[int],
    statistics: LayerStatistics,
    geometry: HeadGeometry,
    width: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the maps of keys into the fused head, and of queries, `[g, m d, d]` each, m = `width`.

    F with k' = sum_i F_i k_i, and E with q'_i = E_i q_i, so that q'_i^T k' ~ q_i^T k_i.
    """
    layout = geometry.rotary
    members = list(group)
    heads = replace(
        heads,
        q=heads.q[members],
        k=heads.k[members],
        q_bias=_pick(heads.q_bias, group),
        k_bias=_pick(heads.k_bias, group),
    )
    first, which = distinct_heads(heads.k, heads.k_bias)
    gram = complex_gram(augmented(heads.k, heads.k_bias)[first], statistics.input_moment, layout)[
        :, which
    ][:, :, which]
    energy = pair_energy(statistics.query_power(heads), layout)
    # [m, P, g] -> [g, m, d, d]
    into, onto = (
        pair_maps(numbers.real.permute(2, 0, 1), -numbers.imag.permute(2, 0, 1), layout)
        for numbers in fit_complex(gram, energy, width)
    )
    if layout.free:
        free_gram, moment = free_parts(heads, statistics, geometry)
        flat = free_gram.transpose(1, 2).reshape(len(group) * len(layout.free), -1)
        fit = fit_real(flat.expand(len(group), *flat.shape), moment, width=width)
        free = torch.tensor(layout.free)
        for maps, solution in ((into, fit.basis), (onto, fit.back)):
            slices = solution.unflatten(2, (width, -1)).permute(0, 2, 3, 1)
            maps[:, :, free[:, None], free] = slices
    return into.flatten(1, 2), onto.flatten(1, 2)


def _fuse_keys(
    heads: LayerHeads, plan: LayerPlan, statistics: LayerStatistics, geometry: HeadGeometry
) -> LayerHeads:
    groups = plan.key_groups
    width = plan.key_width
    sides = {
        name: _padded(rows, 1, width) * width**0.5
        for name in ("q", "q_bias")
        if (rows := getattr(heads, name)) is not None
    }
    maps: list[Tensor | None] = []
    for group in groups:
        if _is_one_head(heads.k, heads.k_bias, group):
            maps.append(None)
            continue
        into, onto = key_maps(heads, group, statistics, geometry, width)
        onto = onto * width**0.5  # what the logits of wider heads are divided by
        maps.append(into)
        for name, rows in sides.items():
            members = getattr(heads, name)[list(group)].double()
            rows[list(group)] = torch.einsum("iab,ib...->ia...", onto, members).to(rows.dtype)
    k = _shared(heads.k, groups, maps, width)
    k_bias = _shared(heads.k_bias, groups, maps, width)
    return replace(heads, **sides, k=k, k_bias=k_bias)


def _is_one_head(rows: Tensor, bias: Tensor | None, group: Sequence[int]) -> bool:
    """Whether a group is of one head, perhaps stored once for several query heads."""
    first, _ = distinct_heads(rows[list(group)], _pick(bias, group))
    return len(first) == 1


def _under_whole_norm(
    heads: LayerHeads, plan: LayerPlan, statistics: LayerStatistics, geometry: HeadGeometry
) -> LayerHeads:
    """Keys fused beneath a norm that spans all heads.

    Such a norm divides all heads of a token by one number r. With the norm's weights folded into
    the rows, keys are fused as without a norm; the divisor of the new norm, r', differs from r by a
    factor that varies from token to token. The weights of the new norm correct its root mean
    square; the rest is the error of this form.
    """
    whole = all(_is_one_head(heads.k, heads.k_bias, group) for group in plan.key_groups)
    if plan.key_width == 1 and whole:
        first = [group[0] for group in plan.key_groups]
        return heads.changed(["k", "k_bias", "k_norm"], lambda rows: rows[first])
    fused = _fuse_keys(under_norm(heads), plan, statistics, geometry)
    # The norm counts a key once for each query head.
    read = fused.expand(plan.key_map, range(plan.num_heads))
    sizes = []
    for side in ("q", "k"):
        before, after = (
            torch.einsum("hde,ef,hdf->", rows, statistics.input_moment.to(rows), rows)
            for rows in (
                augmented(getattr(h, side), getattr(h, f"{side}_bias")) for h in (heads, read)
            )
        )
        sizes.append(float((after / before).sqrt()) if before > 0 else 1.0)
    q_norm = torch.full_like(fused.q[..., 0], sizes[0])
    return replace(fused, q_norm=q_norm, k_norm=torch.full_like(fused.k[..., 0], sizes[1]))


def _fuse_values(
    heads: LayerHeads, plan: LayerPlan, statistics: LayerStatistics, sweeps: int
) -> LayerHeads:
    groups = plan.value_groups
    width = plan.value_width
    cost = ValueCost(heads, statistics, width=width)
    mean = statistics.mixed_value_mean(heads)
    o = _padded(heads.o, 2, width).clone()
    shift = heads.o.new_zeros(heads.hidden_size, dtype=torch.float64)
    maps: list[Tensor | None] = []
    read: list[Sequence[int]] = []  # heads that each map is of
    for group in groups:
        index = torch.tensor(group)
        different = cost.different(index)
        if len(different) == 1:  # one head, perhaps stored once for several query heads
            maps.append(None)
            read.append(group)
            continue
        fit = cost.fit(index, sweeps)
        into = fit.basis.transpose(1, 2)
        maps.append(into)
        read.append(different)
        columns = heads.o[index].double()
        o[index] = (columns @ fit.back).to(o.dtype)
        diagonal = mean[index, index]
        shared = torch.einsum("iab,hib->ha", into, mean[index[:, None], different])
        gap = diagonal - torch.einsum("hab,hb->ha", fit.back, shared)
        shift = shift + torch.einsum("hda,ha->d", columns, gap)
    o_bias = heads.o_bias
    if o_bias is not None and statistics.sums_to_one:
        o_bias = (o_bias.double() + shift).to(o_bias.dtype)
    v = _shared(heads.v, read, maps, width)
    v_bias = _shared(heads.v_bias, read, maps, width)
    return replace(heads, o=o, v=v, v_bias=v_bias, o_bias=o_bias)


def _fuse_normed_values(
    heads: LayerHeads, plan: LayerPlan, statistics: LayerStatistics, sweeps: int
) -> LayerHeads:
    """Values fused beneath a norm of each head, which has no weights.

    They are fused at a root mean square of 1, as the norm makes them; what the norm of a shared
    head takes from its size is put back by the output columns of its members.
    """
    fused = _fuse_values(with_unit_values(heads, statistics), plan, statistics, sweeps)
    sizes = value_sizes(fused, statistics)
    single = {
        number: group[0]
        for number, group in enumerate(plan.value_groups)
        if _is_one_head(heads.v, heads.v_bias, group)
    }
    numbers = list(single)
    sizes[numbers] = 1.0
    columns = sizes[torch.tensor(plan.value_map)].to(fused.o.device)
    changes: dict[str, Tensor] = {"o": (fused.o * columns[:, None, None]).to(fused.o.dtype)}
    for name in VALUE_SIDE:
        if (rows := getattr(fused, name)) is not None:
            changes[name] = rows.clone()
            # A head that is not fused stays equal to the bit
            changes[name][numbers] = getattr(heads, name)[list(single.values())]
    return replace(fused, **changes)
