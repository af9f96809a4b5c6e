"""Signs of rotary pairs.

All that may be turned beneath an RMS norm of the queries and keys of each head.

Such a norm divides a head by one number and weighs its dims. A rotation would mix dims of different
weights; negating both dims of a rotary pair, in a key and in the queries that read it, does not
change any score. Heads of a trained model often agree in a pair but for that sign, and a mean of
them cancels.

Legend: H heads, g members, d head dim, U units: rotary pairs, then single dims without rotary
embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.calibration.moments import LayerStatistics, augmented
from attention.conversion.fusion.rank import complex_gram
from attention.geometry import HeadGeometry, RotaryLayout
from attention.heads import LayerHeads


def unit_gram(rows: Tensor, moment: Tensor, layout: RotaryLayout) -> Tensor:
    """Return the inner products of heads in each unit, `[U, H, H]`.

    Args:
        rows: `[H, d, e]`.
        moment: `[e, e]`, that of the inputs of the rows.
        layout: Which dims are rotary pairs.
    """
    singles = rows[:, list(layout.free)]
    among_singles = (singles @ moment.to(rows)).transpose(0, 1) @ singles.permute(1, 2, 0)
    return torch.cat([complex_gram(rows, moment, layout).real, among_singles])


def signs(gram: Tensor) -> Tensor:
    """Return 1 or -1 for each member `[..., g]`, with a large sum of s_i s_j gram_ij.

    `gram` is `[..., g, g]`. Signs are those of the leading eigenvector, then one head at a time is
    turned while that adds most. The first member keeps its sign.
    """
    leading = torch.linalg.eigh(gram)[1][..., -1]
    chosen = torch.where(leading * leading[..., :1] < 0, -1.0, 1.0).to(gram)
    between = gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))
    for _ in range(gram.shape[-1]):
        gain = -chosen * (between @ chosen[..., None])[..., 0]
        most, head = gain.max(-1, keepdim=True)
        chosen = chosen.scatter(
            -1, head, torch.where(most > 0, -1.0, 1.0).to(gram) * chosen.gather(-1, head)
        )
    return chosen * chosen[..., :1]


def with_signs(
    heads: LayerHeads,
    groups: Sequence[Sequence[int]],
    statistics: LayerStatistics,
    geometry: HeadGeometry,
) -> LayerHeads:
    """Return an equivalent layer of lifted heads, whose keys agree better within each group."""
    layout = geometry.rotary
    gram = unit_gram(augmented(heads.k, heads.k_bias).double(), statistics.input_moment, layout)
    turns = torch.ones(heads.num_heads, heads.head_dim, dtype=torch.float64, device=gram.device)
    for group in groups:
        index = torch.tensor(group, device=gram.device)
        chosen = signs(gram[:, index[:, None], index]).T.double()  # [g, U]
        pairs = chosen[:, : layout.dims // 2]
        singles = chosen[:, layout.dims // 2 :]
        for dims, signs_of_dims in (
            (layout.first, pairs),
            (layout.second, pairs),
            (layout.free, singles),
        ):
            turns[index[:, None], torch.tensor(dims, dtype=torch.long, device=gram.device)] = (
                signs_of_dims
            )
    turned = torch.diag_embed(turns)
    return heads.mapped(q=turned, k=turned)
