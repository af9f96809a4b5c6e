"""Numbers by hand: the tail of the singular values that least squares leaves, the angle of a rotary pair, and the mean
of two heads that differ by it."""

from __future__ import annotations

import math

import pytest
import torch
from head_references import procrustes

from attention.calibration.moments import LayerStatistics, packed
from attention.conversion.fusion.costs import ValueCost
from attention.conversion.fusion.least_squares import least_squares_fuse
from attention.geometry import HeadGeometry, RotaryLayout
from attention.heads import LayerHeads
from attention.plan import LayerPlan


def white(heads: int, width: int) -> LayerStatistics:
    """Inputs of mean 0 and covariance 1, to projections and after attention."""
    moment = torch.eye(width + 1, dtype=torch.float64)
    query = torch.eye(1, dtype=torch.float64).expand(heads, 1, 1)
    return LayerStatistics(9, moment, packed(moment.float().repeat(heads, 1, 1)), query, torch.zeros(0, 0, width))


def test_the_tail_of_the_singular_values_is_the_error() -> None:
    """Head 0 reads dim 0 and writes 3 times to dim 0, head 1 reads dim 1 and writes 2 times to dim 1. M_0 = diag(3, 0),
    M_1 = diag(0, 2): the stack [M_0 | M_1] has the singular values 3 and 2. Rank 1 keeps the 3; the error is 2² = 4."""
    read = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    write = torch.tensor([[[3.0], [0.0]], [[0.0], [2.0]]])
    heads, plan = LayerHeads(read, read, read, write), LayerPlan((0, 1), (0, 0))
    geometry = HeadGeometry("llama", 1, 2, 2, 2, 1, RotaryLayout.none(1), False, False, False, False, False, 8, 8)
    assert ValueCost(heads, white(2, 2), geometry).cost(plan.value_groups[0]) == pytest.approx(4.0)
    fused = least_squares_fuse(heads, plan, white(2, 2), geometry, sweeps=0)
    maps = [fused.v[0].T @ fused.o[h].T for h in range(2)]
    torch.testing.assert_close(maps[0], torch.diag(torch.tensor([3.0, 0.0])), atol=1e-5, rtol=0)
    torch.testing.assert_close(maps[1], torch.zeros(2, 2), atol=1e-5, rtol=0)  # head 1 is what is lost


def test_the_tail_counts_what_the_inputs_make_of_it() -> None:
    """As above, but dim 1 varies four times as much (covariance 16): C^(1/2) M has 3 and 2 · 4 = 8; lost is 3² = 9."""
    read = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    write = torch.tensor([[[3.0], [0.0]], [[0.0], [2.0]]])
    heads, plan = LayerHeads(read, read, read, write), LayerPlan((0, 1), (0, 0))
    moment = torch.diag(torch.tensor([1.0, 16.0, 1.0], dtype=torch.float64))
    query = torch.eye(1, dtype=torch.float64).expand(2, 1, 1)
    statistics = LayerStatistics(9, moment, packed(moment.float().repeat(2, 1, 1)), query, torch.zeros(0, 0, 2))
    assert ValueCost(heads, statistics).cost(plan.value_groups[0]) == pytest.approx(9.0)


def test_the_angle_of_a_rotary_pair() -> None:
    """Tokens (1, 0) -> (0, 2) and (0, 1) -> (-1, 1): Σ x₁y₂ - x₂y₁ = 2 + 1 = 3, Σ x₁y₁ + x₂y₂ = 0 + 1 = 1, so
    θ = atan2(3, 1): sine 3 / √10, cosine 1 / √10."""
    x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, -1.0], [2.0, 1.0]])
    result = procrustes(x, y, RotaryLayout(2, 2))
    expected = torch.tensor([[1.0, -3.0], [3.0, 1.0]], dtype=torch.float64) / math.sqrt(10)
    torch.testing.assert_close(result, expected)
    # Every other angle is farther away, in steps of a degree.
    best = (result @ x.double() - y.double()).norm()
    for degree in range(360):
        c, s = math.cos(math.radians(degree)), math.sin(math.radians(degree))
        assert (torch.tensor([[c, -s], [s, c]], dtype=torch.float64) @ x.double() - y.double()).norm() >= best


def test_procrustes_by_the_singular_vectors() -> None:
    """SVD(Y Xᵀ) = Φ Σ Ψᵀ, P = Φ Ψᵀ. X = I, Y = diag(2, -3): Φ Ψᵀ is diag(1, -1), and ‖P X - Y‖² is 1² + 2² = 5."""
    x, y = torch.eye(2), torch.diag(torch.tensor([2.0, -3.0]))
    result = procrustes(x, y)
    torch.testing.assert_close(result, torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64)))
    assert float((result @ x.double() - y.double()).square().sum()) == pytest.approx(5)
