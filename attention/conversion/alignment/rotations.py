"""The best orthogonal map between two heads, alone and among the maps that commute with RoPE.

Legend: d head dim, N tokens, r rotary dims. Everything is solved in float64 from the cross moment Y
X^T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.geometry import RotaryLayout
from attention.modeling.rotary import pair_maps, pair_products


def _orthogonal(cross: Tensor) -> Tensor:
    """Argmax over orthogonal P of tr(P^T cross), `[..., n, n]`.

    Phi Psi^T of its singular vectors.
    """
    left, _, right = torch.linalg.svd(cross)
    return left @ right


def rotation_from_cross(cross: Tensor, layout: RotaryLayout) -> Tensor:
    """Return the admissible P that maximises tr(P^T cross).

    Argmin ||P x - y|| where cross is (a multiple of) y x^T.

    cross `[..., d, d]` -> P `[..., d, d]` float64. Admissible are one rotation for each rotary pair
    and any orthogonal map of the free dims; without rotary embedding any orthogonal map (Jin 2024,
    eq. 6, 10 and 14).
    """
    cross = cross.double()
    # y = R(theta) x in the plane: theta = atan2(sum x1 y2 - x2 y1, sum x1 y1 + x2 y2); cross[a, b]
    # is y_a x_b.
    cosine, sine = pair_products(cross, layout)
    angle = torch.atan2(sine, cosine)
    result = pair_maps(angle.cos(), angle.sin(), layout)
    if layout.free:
        rows = torch.tensor(layout.free)
        result[..., rows[:, None], rows] = _orthogonal(cross[..., rows[:, None], rows])
    return result
