"""Coordinates in which the least-squares shared head of a group is what each member looks like.

In least-squares fusion (`attention.conversion.fusion.least_squares`) member i reads the shared key
k' as E_i^T k'. Here the same E_i are folded into the heads *before* anything is fused: training
towards shared heads starts from there.

Legend: H heads, g members of a group, d head dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attention.axes import ALIGNMENT, Knob
from attention.calibration.moments import LayerStatistics
from attention.conversion.fusion.costs import ValueCost
from attention.conversion.fusion.least_squares import key_maps
from attention.conversion.fusion.pooled import check_lifted
from attention.geometry import HeadGeometry, RotaryLayout
from attention.heads import LayerHeads
from attention.modeling.rotary import pair_maps
from attention.plan import LayerPlan

FLOOR = Knob(
    "floor",
    "float",
    "least stretch of a head over its greatest, so that maps can be undone",
    1e-3,
    1.0,
)


@ALIGNMENT.part(
    "least_squares",
    source=(
        "ours: the maps of least-squares fusion, folded in without fusing (start of "
        "papers 000 and 001)"
    ),
    knobs=(FLOOR,),
    needs=("statistics",),
)
def fold(
    heads: LayerHeads,
    plan: LayerPlan,
    statistics: LayerStatistics | None,
    geometry: HeadGeometry,
    *,
    floor: float = 0.1,
) -> LayerHeads:
    """Align the heads of each group by the maps of least-squares fusion.

    k_i <- E_i^-T k_i with q_i <- E_i q_i, and v_i <- B_i^-1 v_i with o_i <- o_i B_i: logits are
    unchanged.

    E and B are least-squares fusion's, stretched where they would shrink a direction below `floor`
    of the greatest. With a norm on queries and keys only values move, and with one on values they
    do not. A group of one stays as it is.

    Raises:
        ValueError: Without statistics or if the heads are not lifted.
    """
    if statistics is None:
        raise ValueError("alignment=least_squares needs a calibration; pass the layer's statistics")
    check_lifted(heads, plan)
    onto, back = (
        torch.eye(size, dtype=torch.float64, device=heads.q.device).repeat(heads.num_heads, 1, 1)
        for size in (heads.head_dim, heads.v.shape[1])
    )
    if not geometry.qk_norm:
        for group in plan.key_groups:
            if len(group) > 1:
                maps = key_maps(heads, group, statistics, geometry)[1].double()
                onto[list(group)] = bounded(maps, geometry.rotary, floor)
    cost = ValueCost(heads, statistics)
    free = RotaryLayout.none(heads.v.shape[1])
    for group in () if geometry.value_norm else plan.value_groups:
        if len(group) > 1:
            back[list(group)] = bounded(cost.fit(torch.tensor(group)).back.double(), free, floor)
    o = (heads.o.double() @ back).to(heads.o.dtype)
    return replace(heads.mapped(q=onto, k=torch.linalg.inv(onto).mT, v=torch.linalg.inv(back)), o=o)


def bounded(maps: Tensor, layout: RotaryLayout, floor: float) -> Tensor:
    """Return the maps `[g, d, d]` with no stretch below `floor` times the greatest.

    They still commute with RoPE.

    A rotary pair is a scaled rotation: its scale is raised. The free dims have singular values
    raised.

    Raises:
        ValueError: For maps that are zero.
    """
    first, second, free = (
        torch.tensor(dims, dtype=torch.long) for dims in (layout.first, layout.second, layout.free)
    )
    pairs = torch.complex(maps[:, first, first], maps[:, second, first])
    inner = maps[:, free[:, None], free]
    left, stretch, right = torch.linalg.svd(inner)
    greatest = torch.cat([pairs.abs(), stretch], 1).amax(1, keepdim=True)
    if not bool((greatest > 0).all()):
        raise ValueError(
            "a head's least-squares map is zero: its keys or values are silent in the calibration "
            "text"
        )
    raised = torch.polar(pairs.abs().clamp(min=floor * greatest), pairs.angle())
    result = pair_maps(raised.real, raised.imag, layout)
    result[:, free[:, None], free] = (
        left @ torch.diag_embed(torch.maximum(stretch, floor * greatest)) @ right
    )
    return result
