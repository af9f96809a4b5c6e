"""The best orthogonal map between two heads, alone and among the maps that commute with RoPE.

Legend: d head dim, N tokens, r rotary dims. Everything is solved in float64 from the cross moment Y X^T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.geometry import RotaryLayout
from attention.modeling.rotary import pair_maps, pair_products


def _orthogonal(cross: Tensor) -> Tensor:
    """argmax over orthogonal P of tr(P^T cross), `[..., n, n]`: Phi Psi^T of its singular vectors."""
    left, _, right = torch.linalg.svd(cross)
    return left @ right


def rotation_from_cross(cross: Tensor, layout: RotaryLayout) -> Tensor:
    """The admissible P that maximises tr(P^T cross): argmin ||P x - y|| where cross is (a multiple of) y x^T.

    cross `[..., d, d]` -> P `[..., d, d]` float64. Admissible are one rotation for each rotary pair and any orthogonal
    map of the free dims; without rotary embedding any orthogonal map (Jin 2024, eq. 6, 10 and 14).
    """
    cross = cross.double()
    # y = R(theta) x in the plane: theta = atan2(sum x1 y2 - x2 y1, sum x1 y1 + x2 y2); cross[a, b] is y_a x_b.
    cosine, sine = pair_products(cross, layout)
    angle = torch.atan2(sine, cosine)
    result = pair_maps(angle.cos(), angle.sin(), layout)
    if layout.free:
        rows = torch.tensor(layout.free)
        result[..., rows[:, None], rows] = _orthogonal(cross[..., rows[:, None], rows])
    return result


def _cross(x: Tensor, y: Tensor, layout_dim: int | None = None) -> Tensor:
    if x.dim() != 2 or x.shape != y.shape or (layout_dim is not None and x.shape[0] != layout_dim):
        wanted = "two [d, N] matrices of one shape" + (
            f" with d = {layout_dim}" if layout_dim is not None else ""
        )
        raise ValueError(f"expected {wanted}, got {tuple(x.shape)} and {tuple(y.shape)}")
    return y.double() @ x.double().T


def procrustes(x: Tensor, y: Tensor) -> Tensor:
    """The orthogonal P `[d, d]` (float64) that minimises ||P x - y|| for x and y `[d, N]`.

    With SVD(y x^T) = Phi Sigma Psi^T it is Phi Psi^T (Schoenemann 1966; Jin 2024, eq. 4 to 6, which prints the
    transpose). Raises ValueError if the shapes differ.
    """
    return _orthogonal(_cross(x, y))


def rotary_procrustes(x: Tensor, y: Tensor, layout: RotaryLayout) -> Tensor:
    """The P `[d, d]` (float64) that minimises ||P x - y|| among those that commute with RoPE, for x and y `[d, N]`.

    Jin 2024, eq. 14 to 17: one 2-D rotation for each rotary pair. Dims that partial rotary leaves free take a general
    orthogonal map, which the paper does not treat. Raises ValueError if the shapes differ or are not the layout's.
    """
    return rotation_from_cross(_cross(x, y, layout.head_dim), layout)
