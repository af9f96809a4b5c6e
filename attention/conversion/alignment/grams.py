"""Gram matrices of a layer's heads under either criterion, and the similarity of aligned pairs.

Legend: H heads, d head dim. A Gram is `[H, H, d, d]` float64: mean over tokens of k_i k_j^T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.axes import Knob
from attention.calibration.moments import LayerStatistics, augmented
from attention.geometry import RotaryLayout
from attention.heads import LayerHeads
from attention.modeling.rotary import pair_products

CRITERIA = ("dist", "cos")
CRITERION = Knob(
    "criterion",
    "choice",
    "dist: activations as they are; cos: unit length",
    choices=CRITERIA,
    searched=True,
)
_SIDES = ("key", "value")


def head_gram(
    heads: LayerHeads, statistics: LayerStatistics, side: str, criterion: str = "dist"
) -> Tensor:
    """Gram of the key or value activations (keys before RoPE), `[H, H, d, d]` float64.

    `dist` takes the activations as they are, over all calibration tokens; `cos` makes each vector
    one unit long first (Jin 2024, eq. 7 and 8), on the sampled inputs.

    Raises:
        ValueError: For an unknown side or criterion, or if `cos` finds no sample.
    """
    if side not in _SIDES:
        raise ValueError(f"side must be one of {_SIDES}, got {side!r}")
    if criterion not in CRITERIA:
        raise ValueError(f"criterion must be one of {CRITERIA}, got {criterion!r}")
    if criterion == "dist":
        return statistics.key_gram(heads) if side == "key" else statistics.value_gram(heads)
    if not statistics.inputs.numel():
        raise ValueError(
            "criterion 'cos' needs sampled inputs; calibrate with sample_tokens > 0, or use 'dist'"
        )
    rows = augmented(heads.k, heads.k_bias) if side == "key" else augmented(heads.v, heads.v_bias)
    weight = rows[..., :-1].float()
    bias = rows[..., -1:].float()
    total = torch.zeros(rows.shape[0] * rows.shape[1], rows.shape[0] * rows.shape[1]).to(rows)
    tokens = 0
    # One sequence at a time: the activations of all tokens would not fit in memory.
    for x_TD in statistics.inputs:
        unit = torch.nn.functional.normalize(weight @ x_TD.T.to(weight) + bias, dim=1).flatten(0, 1)
        total += (unit @ unit.T).double()
        tokens += len(x_TD)
    return (total / tokens).view(*rows.shape[:2], *rows.shape[:2]).transpose(1, 2)


def _best_inner(gram: Tensor, layout: RotaryLayout) -> Tensor:
    """Greatest mean <P k_j, k_i> over admissible P, `[H, H]`.

    Moduli of rotary pairs plus nuclear norm of free dims.
    """
    inner = torch.hypot(*pair_products(gram, layout)).sum(-1)
    if layout.free:
        free = torch.tensor(layout.free)
        inner = inner + torch.linalg.svdvals(gram[..., free[:, None], free]).sum(-1)
    return inner


def pair_similarity(gram: Tensor, criterion: str, layout: RotaryLayout) -> Tensor:
    """Return the similarity of every pair of heads after alignment, `[H, H]`, symmetric.

    The paper averages distances over tokens, we take their root mean square, which one Gram matrix
    yields for all pairs.

    Args:
        gram: As `head_gram` returns it.
        criterion: "cos": mean cosine (Jin 2024, eq. 18 and 19; give the Gram of unit vectors).
            "dist": minus the distance (eq. 22).
        layout: The head's rotary layout for keys and `RotaryLayout.none(d)` for values.
    """
    if criterion not in CRITERIA:
        raise ValueError(f"criterion must be one of {CRITERIA}, got {criterion!r}")
    inner = _best_inner(gram, layout)
    inner = (inner + inner.T) / 2
    if criterion == "cos":
        return inner
    energy = torch.einsum("iidd->i", gram)
    return -(energy[:, None] + energy[None, :] - 2 * inner).clamp_min(0).sqrt()
