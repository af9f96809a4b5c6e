"""Losses against worked examples and slow references."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from trainers.losses import bild, kl, language_modelling, objective


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def slow_bild(student: Tensor, teacher: Tensor, k: int) -> float:
    """The definition, token by token and pair by pair."""
    total = 0.0
    for s, t in zip(student.flatten(0, -2).tolist(), teacher.flatten(0, -2).tolist(), strict=True):
        for leader in (t, s):
            places = sorted(range(len(leader)), key=lambda i, leader=leader: -leader[i])[:k]
            sides = []
            for logits in (s, t):
                powers = [math.exp(logits[i] - logits[j]) for i, j in combinations(places, 2)]
                sides.append([p / sum(powers) for p in powers])
            total += sum(q * math.log(q / p) for p, q in zip(*sides, strict=True))
    return total / student.flatten(0, -2).shape[0]


def test_language_modelling_worked_example() -> None:
    # of two tokens, odds 3 : 1 for token 0 at the first place and 1 : 1 at the second
    logits = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    expected = (-math.log(3 / 4) - math.log(1 / 2)) / 2
    assert language_modelling(logits, torch.tensor([0, 1])).item() == pytest.approx(expected, abs=1e-6)


def test_language_modelling_agrees_with_transformers(demo_model: Any) -> None:
    ids = torch.randint(0, 2048, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = demo_model(ids, labels=ids)
        result = objective()(demo_model, ids)
    assert result.item() == pytest.approx(output.loss.item(), abs=1e-6)


def test_half_precision_logits_are_widened() -> None:
    half, labels = random(18, 50).bfloat16(), torch.arange(18)
    assert language_modelling(half, labels).dtype == torch.float32
    assert language_modelling(half, labels).item() == pytest.approx(
        language_modelling(half.double(), labels).item(), abs=1e-5
    )


def test_kl_worked_example() -> None:
    teacher, student = torch.tensor([[math.log(3), 0.0]]), torch.tensor([[0.0, 0.0]])
    expected = 3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2)
    assert kl(student, teacher).item() == pytest.approx(expected, abs=1e-6)
    backwards = 1 / 2 * math.log(2 / 3) + 1 / 2 * math.log(2)
    assert kl(teacher, student).item() == pytest.approx(backwards, abs=1e-6)


def test_kl_without_gradients_is_the_same_and_leaves_the_logits() -> None:
    student, teacher = (random(3, 5, 11, seed=seed, dtype=torch.float32) for seed in (0, 1))
    before = student.clone(), teacher.clone()
    with_gradients = kl(student, teacher)
    with torch.no_grad():
        assert torch.equal(kl(student, teacher), with_gradients)
    assert torch.equal(student, before[0]) and torch.equal(teacher, before[1])


def test_kl_is_zero_for_equal_distributions_and_has_no_slope_there() -> None:
    teacher = random(2, 5, 11)
    student = (teacher + 3.0).requires_grad_()  # a shift of all logits changes no distribution
    loss = kl(student, teacher)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-12


@pytest.mark.parametrize("k", [3, 5, 8])
def test_bild_agrees_with_its_definition(k: int) -> None:
    student, teacher = 2 * random(2, 3, 12), 2 * random(2, 3, 12, seed=1)
    assert bild(student, teacher, k).item() == pytest.approx(slow_bild(student, teacher, k), abs=1e-10)


def test_bild_ignores_the_tail_and_pulls_towards_the_teacher() -> None:
    teacher = random(4, 30)
    top = teacher.topk(5).indices
    tail = teacher.masked_fill(torch.zeros_like(teacher, dtype=torch.bool).scatter(-1, top, True), 0.0)
    assert bild(teacher - 9 * (tail != 0), teacher, 5).item() == pytest.approx(0, abs=1e-12)
    student = random(4, 30, seed=2).requires_grad_()
    before = bild(student, teacher, 5)
    (slope,) = torch.autograd.grad(before, student)
    assert bild(student - 0.1 * slope, teacher, 5) < before


@pytest.mark.parametrize("k", [1, 2, 13])
def test_bild_refuses_a_k_without_two_pairs_or_beyond_the_vocabulary(k: int) -> None:
    with pytest.raises(ValueError, match=f"between 3 and the vocabulary of 12, got {k}"):
        bild(random(1, 12), random(1, 12), k)


@torch.no_grad()
def test_objective_mixes_by_its_weight(tiny_model: Any) -> None:
    ids = torch.arange(10).view(2, 5)
    model, teacher = tiny_model("llama"), tiny_model("llama", seed=1)
    logits, reference = (m(ids).logits[:, :-1].flatten(0, 1) for m in (model, teacher))
    language, divergence = language_modelling(logits, ids[:, 1:].flatten()), kl(logits, reference)
    both = divergence + bild(logits, reference)
    assert objective()(model, ids).item() == pytest.approx(language.item())
    mixed = objective("kl", 0.25, teacher)(model, ids)
    assert mixed.item() == pytest.approx((0.75 * language + 0.25 * divergence).item())
    mixed = objective("kl_bild", 0.25, teacher)(model, ids)
    assert mixed.item() == pytest.approx((0.75 * language + 0.25 * both).item())
    assert objective("kl_bild", 1.0, teacher)(model, ids).item() == pytest.approx(both.item())
    with pytest.raises(ValueError, match="needs a teacher"):
        objective("kl", 0.5)
    with pytest.raises(ValueError, match="must be one of .*'none', 'kl', 'kl_bild'.*, got 'mse'"):
        objective("mse", 0.5, teacher)
