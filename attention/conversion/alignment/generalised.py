"""Generalised Procrustes inside each group, from Gram matrices; the parts `none` and `procrustes`.

Legend: H heads, g members of a group, d head dim, P_i the rotation of head i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention.axes import ALIGNMENT, Knob
from attention.base.threads import map_on_threads
from attention.calibration.moments import LayerStatistics
from attention.conversion.alignment.grams import CRITERION, head_gram
from attention.conversion.alignment.rotations import rotation_from_cross
from attention.conversion.fusion.pooled import check_lifted
from attention.geometry import HeadGeometry, RotaryLayout
from attention.heads import LayerHeads
from attention.plan import LayerPlan


@ALIGNMENT.part("none", source="Ainslie 2023, sec. 2.1: heads are pooled as they are")
def unaligned(
    heads: LayerHeads,
    plan: LayerPlan,
    statistics: LayerStatistics | None = None,
    geometry: HeadGeometry | None = None,
) -> LayerHeads:
    """Return the heads as they are."""
    return heads


@ALIGNMENT.part(
    "procrustes",
    source=(
        "Jin 2024 (Align Attention Heads Before Merging Them), sec. 3.2 to 3.3, eq. 4 to 22, alg. 1"
    ),
    knobs=(
        CRITERION,
        Knob("iterations", "int", "most rounds of generalised Procrustes", low=1, high=10_000),
    ),
    needs=("statistics", "inputs"),
)
def align(
    heads: LayerHeads,
    plan: LayerPlan,
    statistics: LayerStatistics | None,
    geometry: HeadGeometry,
    *,
    criterion: str = "dist",
    iterations: int = 100,
) -> LayerHeads:
    """Align the keys of each key group and the values of each value group of lifted heads.

    An equivalent layer.

    Keys turn within their rotary pairs and queries turn with them; values turn freely and the
    output projection turns back (Jin 2024, eq. 12 to 16). With a norm on queries or keys after the
    projection only values turn. A group of one stays as it is.

    Raises:
        ValueError: Without statistics or if the heads are not lifted.
    """
    if statistics is None:
        raise ValueError("alignment=procrustes needs a calibration; pass the layer's statistics")
    check_lifted(heads, plan)
    if not geometry.qk_norm:
        gram = head_gram(heads, statistics, "key", criterion)
        heads = rotate_keys(
            heads, align_heads(gram, plan.key_groups, geometry.rotary, iterations=iterations)
        )
    gram = head_gram(heads, statistics, "value", criterion)
    free = RotaryLayout.none(heads.v.shape[1])
    return rotate_values(heads, align_heads(gram, plan.value_groups, free, iterations=iterations))


def align_heads(
    gram: Tensor, groups: Sequence[Sequence[int]], layout: RotaryLayout, *, iterations: int = 100
) -> Tensor:
    """Return a rotation for each head, `[H, d, d]` float64, from the Gram of all heads.

    The identity in groups of one.
    """
    rotations = torch.eye(gram.shape[-1]).to(gram).repeat(len(gram), 1, 1)
    several = [torch.tensor(group) for group in groups if len(group) > 1]
    # On the CPU, since a GPU would wait for each of up to a hundred small decompositions in turn
    grams = [gram[index[:, None], index].cpu() for index in several]
    fitted = map_on_threads(lambda one: align_group(one, layout, iterations=iterations), grams)
    for index, turned in zip(several, fitted, strict=True):
        rotations[index] = turned.to(rotations)
    return rotations


def align_group(
    gram: Tensor, layout: RotaryLayout, *, iterations: int = 100, tolerance: float = 1e-9
) -> Tensor:
    """Generalised Procrustes of g heads (Jin 2024, alg. 1).

    Rotations `[g, d, d]` that bring P_i k_i together.

    Each round turns every head towards the mean of all, then takes the mean anew; the summed
    squared distance to the mean never grows, and the rounds end when it falls by less than
    `tolerance` of the heads' energy (the paper leaves the criterion open). The first mean is that
    of the heads as they are. gram `[g, g, d, d]`: mean of k_i k_j^T.
    """
    gram = gram.double()
    members = gram.shape[0]
    dim = gram.shape[-1]
    rotations = torch.eye(dim).to(gram).expand(members, dim, dim)
    energy = torch.einsum("iidd->", gram).item()
    reached = _agreement(gram, rotations)
    for _ in range(iterations):
        # Row i: mean of M k_i^T, where M is the sum of all turned heads (a multiple of the mean
        # does as well).
        cross = torch.einsum("jab,jibc->iac", rotations, gram)
        rotations = rotation_from_cross(cross, layout)
        before = reached
        reached = _agreement(gram, rotations)
        if reached - before <= tolerance * energy:
            break
    return rotations


def _agreement(gram: Tensor, rotations: Tensor) -> float:
    """Mean squared norm of the sum of all turned heads: what alignment maximises."""
    return torch.einsum("iab,ijbc,jac->", rotations, gram, rotations).item()


def rotate_keys(heads: LayerHeads, rotations: Tensor) -> LayerHeads:
    """Turn key head h and query head h by `rotations[h]` `[d, d]`.

    Q^T k is unchanged (Jin 2024, eq. 15 to 17).
    """
    return heads.mapped(q=rotations, k=rotations)


def rotate_values(heads: LayerHeads, rotations: Tensor) -> LayerHeads:
    """Turn value head h by `rotations[h]` and its output columns back (Jin 2024, eq. 12 and 13)."""
    o = (heads.o.double() @ rotations.transpose(1, 2).to(heads.o.device)).to(heads.o.dtype)
    return replace(heads.mapped(v=rotations), o=o)
