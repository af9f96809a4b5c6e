"""Numbers by hand: BiLD's two halves, DHA's collapse, and one step of the multiplier."""

from __future__ import annotations

import math

import pytest
import torch

from trainers.losses import bild
from trainers.relaxations.base import HeadProjection
from trainers.relaxations.lagrangian import FusedProjection, head_distances


def test_bild_by_hand() -> None:
    """Teacher (log 4, log 2, 0), student the other way round, k = 3: all tokens, three pairs.

    Led by the teacher, pairs (0,1) (0,2) (1,2): its differences log 2, log 4, log 2 give 1/4, 1/2, 1/4; the student's
    -log 2, -log 4, -log 2 give 2/5, 1/5, 2/5. KL = 1/4 log 5/8 + 1/2 log 5/2 + 1/4 log 5/8 = log 5/4.
    Led by the student the pairs are turned round: teacher 2/5, 1/5, 2/5, student 1/4, 1/2, 1/4.
    """
    teacher = torch.tensor([[math.log(4), math.log(2), 0.0]], dtype=torch.float64)
    student = teacher.flip(-1)
    first = math.log(5 / 4)
    second = 2 * 2 / 5 * math.log(8 / 5) + 1 / 5 * math.log(2 / 5)
    assert bild(student, teacher, 3).item() == pytest.approx(first + second, abs=1e-12)
    assert bild(teacher, teacher, 3).item() == pytest.approx(0, abs=1e-12)


def test_bild_leaders_see_their_own_top() -> None:
    """k = 3 of five tokens that the two rank differently: each half looks at its own three and at nothing else."""
    teacher = torch.tensor([[5.0, 4.0, 2.0, 0.0, 0.0]], dtype=torch.float64)
    student = torch.tensor([[0.0, 0.0, 6.0, 5.0, 3.0]], dtype=torch.float64)

    def half(places: list[int]) -> float:
        pairs = [(places[i], places[j]) for i in range(3) for j in range(i + 1, 3)]
        sides = [[math.exp(float(x[0, a] - x[0, b])) for a, b in pairs] for x in (teacher, student)]
        t, s = ([w / sum(side) for w in side] for side in sides)
        return sum(p * math.log(p / q) for p, q in zip(t, s, strict=True))

    assert bild(student, teacher, 3).item() == pytest.approx(half([0, 1, 2]) + half([2, 3, 4]), abs=1e-12)


def test_dha_collapses_to_the_mean_coefficients() -> None:
    """Two heads of one row of one dim, 10 and 20. ω: head 0 takes (0.8, 0.1), head 1 (0.4, 0.5).

    They compute 0.8 · 10 + 0.1 · 20 = 10 and 0.4 · 10 + 0.5 · 20 = 14; the means 0.6 and 0.3 give 6 + 6 = 12.
    L_head = 1/2 ((0.8 - 0.4)² + (0.1 - 0.5)²) = 0.16.
    """
    rows = torch.tensor([[[10.0]], [[20.0]]])
    fused = FusedProjection(HeadProjection(rows, None), ((0, 1),), per_dimension=True)
    assert torch.equal(fused.mixed()[0], rows)  # ω starts as identity
    with torch.no_grad():
        fused.coefficients.value.copy_(torch.tensor([[0.8], [0.1], [0.4], [0.5]]))
    torch.testing.assert_close(fused.mixed()[0].flatten(), torch.tensor([10.0, 14.0]))
    torch.testing.assert_close(fused.collapsed(rows, None)[0].flatten(), torch.tensor([12.0]))
    assert fused.fusion_loss().item() == pytest.approx(0.16)
    block = torch.tensor([[[0.8], [0.1]], [[0.4], [0.5]]])
    torch.testing.assert_close(head_distances(block), torch.tensor([[0.0, 0.16], [0.16, 0.0]]))
