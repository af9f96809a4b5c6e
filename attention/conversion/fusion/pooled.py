"""Pooling heads by their mean, plain or with the group's norm restored.

Legend: H heads, G groups, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention.axes import FUSION
from attention.calibration.moments import LayerStatistics
from attention.geometry import HeadGeometry
from attention.heads import KEY_SIDE, VALUE_SIDE, LayerHeads, group_means
from attention.plan import LayerPlan

Groups = Sequence[Sequence[int]]


def check_lifted(heads: LayerHeads, plan: LayerPlan) -> None:
    """Raise ValueError unless each query head of the plan has one key and one value head."""
    counts = (heads.num_heads, heads.k.shape[0], heads.v.shape[0])
    if counts != (plan.num_heads,) * 3:
        raise ValueError(
            f"expected lifted heads, {plan.num_heads} queries, keys and values as in the plan, got "
            f"{counts}; "
            "use LayerHeads.expand"
        )


@FUSION.part("mean", source="Ainslie 2023, sec. 2.1: mean pooling of key and value heads")
def mean_fuse(
    heads: LayerHeads,
    plan: LayerPlan,
    statistics: LayerStatistics | None = None,
    geometry: HeadGeometry | None = None,
) -> LayerHeads:
    """Each kept head is the mean of its group's heads; queries and output stay.

    Raises:
        ValueError: If not lifted, and for a plan of wide heads.
    """
    check_lifted(heads, plan)
    if plan.is_wide:
        raise ValueError(
            f"a mean is as wide as its heads, and the plan has key and value heads of "
            f"{plan.key_width} and {plan.value_width} times that; use fusion=least_squares"
        )
    keys = plan.key_groups
    values = plan.value_groups
    fused = heads.changed(KEY_SIDE, lambda rows: group_means(rows, keys))
    return fused.changed(VALUE_SIDE, lambda rows: group_means(rows, values))


def _lost_norm(gram: Tensor, groups: Groups) -> Tensor:
    """Root-mean-square norm of a group's heads over that of their mean, `[G]`.

    1 for a group of one or a zero mean.
    """
    factors = []
    for group in groups:
        index = torch.tensor(group)
        inner = torch.einsum("ijdd->ij", gram[index[:, None], index])
        members = inner.diagonal().mean()
        pooled = inner.mean()
        # Below this the mean is rounding alone; scaling it up would replace a head by noise.
        alive = len(group) > 1 and pooled > 1e-12 * members
        factors.append((members / pooled).sqrt() if alive else torch.ones_like(members))
    return torch.stack(factors)


@FUSION.part(
    "norm_restored",
    source=(
        "ours: a mean of partly aligned heads is shorter than its parts (seen with Jin "
        "2024, sec. 3.3)"
    ),
    needs=("statistics",),
)
def norm_restored_fuse(
    heads: LayerHeads,
    plan: LayerPlan,
    statistics: LayerStatistics | None,
    geometry: HeadGeometry | None = None,
) -> LayerHeads:
    """Return the mean, rescaled to the root-mean-square norm of the activations of the group.

    Norms are taken over the calibration tokens, biases included, and biases scale along. With a
    norm on keys after the projection the scale of a key head has no effect, so keys are the plain
    mean then.

    Raises:
        ValueError: Without statistics or if the heads are not lifted.
    """
    if statistics is None:
        raise ValueError("fusion=norm_restored needs a calibration; pass the layer's statistics")
    pooled = mean_fuse(heads, plan)
    scaled = {"v": _lost_norm(statistics.value_gram(heads), plan.value_groups)}
    if geometry is None or not geometry.qk_norm:
        scaled["k"] = _lost_norm(statistics.key_gram(heads), plan.key_groups)
    changes = {}
    for name, factor in scaled.items():
        rows = getattr(pooled, name)
        bias = getattr(pooled, f"{name}_bias")
        changes[name] = (rows.double() * factor[:, None, None]).to(rows.dtype)
        changes[f"{name}_bias"] = (
            None if bias is None else (bias.double() * factor[:, None]).to(bias.dtype)
        )
    return replace(pooled, **changes)
