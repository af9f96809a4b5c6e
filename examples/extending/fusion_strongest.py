"""A fusion: of each group the head whose weights are largest. Its place: attention/conversion/fusion/strongest.py."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.axes import FUSION, Knob
from attention.calibration.moments import LayerStatistics
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.plan import LayerPlan

ORDER = Knob("norm_order", "float", "order of the norm", low=1.0, high=8.0, searched=True)


@FUSION.part("strongest", source="an example of CONTRIBUTING.md", knobs=(ORDER,))
def strongest_fuse(
    heads: LayerHeads,
    plan: LayerPlan,
    statistics: LayerStatistics | None,
    geometry: HeadGeometry,
    *,
    norm_order: float = 2.0,
) -> LayerHeads:
    """The head of each group with the greatest norm of its weights stands for the group."""

    def chosen(weight: Tensor, groups: tuple[tuple[int, ...], ...]) -> list[int]:
        norms = weight.flatten(1).norm(p=norm_order, dim=1)
        return [max(group, key=lambda head: float(norms[head])) for group in groups]

    keys = torch.tensor(chosen(heads.k, plan.key_groups))
    values = torch.tensor(chosen(heads.v, plan.value_groups))
    return heads.expand(keys.tolist(), values.tolist())
