"""Estimates of what fusing value heads costs, against the cost itself."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.calibration.calibrate import calibrate
from attention.calibration.moments import gram_under, packed, unpacked
from attention.calibration.store import Calibration
from attention.conversion.convert import lift
from attention.conversion.fusion.costs import ValueCost
from attention.conversion.fusion.estimates import LeadingValueCost, PooledValueCost, subspace

PAIRS, QUADS = (list(itertools.combinations(range(8), size)) for size in (2, 4))


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (40, 33), (24, 700)])
def test_a_gram_under_a_packed_moment_is_the_plain_product(rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    samples = torch.randn(2 * width, width, generator=generator, dtype=torch.float64)
    moment, matrix = samples.T @ samples, torch.randn(rows, width, generator=generator, dtype=torch.float64)
    triangle = packed(moment[None])[0]
    torch.testing.assert_close(gram_under(matrix, triangle), matrix @ moment @ matrix.T)
    torch.testing.assert_close(unpacked(triangle), moment)
    torch.testing.assert_close(triangle, packed(moment[None])[0])  # the caller's is not changed


@pytest.mark.parametrize("width", [7, 33, 700])
def test_a_moment_on_an_accelerator_is_unpacked_the_same(width: int, fgpu: torch.device) -> None:
    moment = torch.randn(width, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    moment, matrix = moment + moment.T, torch.eye(width, dtype=torch.float64)
    triangle = packed(moment[None])[0].to(fgpu)
    torch.testing.assert_close(unpacked(triangle).cpu(), moment)
    torch.testing.assert_close(gram_under(matrix.to(fgpu), triangle).cpu(), moment)


@pytest.mark.parametrize("layer", [0, 3])
def test_pooled_estimates_are_between_the_eigenvalues_and_the_energy(
    layer: int, demo_model: PreTrainedModel, demo_calibration: Calibration
) -> None:
    """Never below what the eigenvalues of the pooled Gram hold beyond the largest, and the closer the more steps."""
    heads, statistics = lift(demo_model)[layer], demo_calibration.layers[layer]
    few, more, many = (PooledValueCost(heads, statistics, steps) for steps in (1, 2, 40))
    for groups in (PAIRS, QUADS):
        exact = torch.stack([_tail(few, group) for group in groups])
        slack = 1e-5 * torch.stack([few.energy[list(group)].sum() for group in groups])
        first, second, last = (cost.costs(groups) for cost in (few, more, many))
        assert (exact <= last + slack).all() and (last <= second + slack).all() and (second <= first + slack).all()
        assert (first <= 1e5 * slack).all()
        assert torch.allclose(last, exact, rtol=0.02)
        assert not torch.allclose(first, exact, rtol=0.02)


def _tail(cost: PooledValueCost, group: tuple[int, ...]) -> Tensor:
    index = cost.dims(torch.tensor(group))
    values = torch.linalg.eigvalsh(cost.gram[index[:, None], index].double())
    return values[: -cost.dim].clamp_min(0).sum()


@pytest.mark.parametrize("layer", [0, 3])
def test_heads_that_see_the_same_need_no_more_than_the_pooled_moment(
    layer: int, demo_model: PreTrainedModel, demo_calibration: Calibration
) -> None:
    heads, statistics = lift(demo_model)[layer], demo_calibration.layers[layer]
    same = replace(statistics, mixed_moments=statistics.pooled_moment()[None])
    pooled = PooledValueCost(heads, same, 40)
    exact = ValueCost(heads, same).costs(QUADS)
    torch.testing.assert_close(pooled.costs(QUADS), exact, rtol=0.02, atol=0.0)
    torch.testing.assert_close(LeadingValueCost(pooled, same).costs(QUADS), exact, rtol=0.02, atol=0.0)


@pytest.mark.parametrize("layer", [0, 3])
def test_with_all_combinations_followed_the_estimate_is_the_cost(
    layer: int, demo_model: PreTrainedModel, demo_calibration: Calibration
) -> None:
    heads, statistics = lift(demo_model)[layer], demo_calibration.layers[layer]
    exact = ValueCost(heads, statistics).costs(QUADS)
    rough, close = PooledValueCost(heads, statistics), PooledValueCost(heads, statistics, 40)
    errors = [
        (cost.costs(QUADS) / exact).log().std().item()
        for cost in (rough, *(LeadingValueCost(rough, statistics, count) for count in (32, 128)))
    ]
    assert errors[0] > errors[1] > errors[2]
    torch.testing.assert_close(LeadingValueCost(close, statistics, 256).costs(QUADS), exact, rtol=0.05, atol=0.0)


@pytest.mark.parametrize("case", ["llama", "qwen2", "gpt2", "opt"])
def test_estimates_know_biases(case: str, tiny_model, tiny_tokens: Tensor) -> None:
    """Biases of values and of the output included: with the latter what is constant costs nothing."""
    model = tiny_model(case)
    statistics = calibrate(model, tiny_tokens).layers[1]
    heads = lift(model)[1]
    whole, pooled = ValueCost(heads, statistics), PooledValueCost(heads, statistics, 40)
    energy = float(whole.cost(range(4)))
    for size in (1, 2, 3, 4):
        groups = list(itertools.combinations(range(4), size))
        close = LeadingValueCost(pooled, statistics).costs(groups)
        torch.testing.assert_close(close, whole.costs(groups), rtol=0.05, atol=1e-3 * energy)


def test_a_subspace_of_a_singular_gram_is_orthonormal() -> None:
    basis = subspace(torch.diag(torch.tensor([3.0, 2.0, 0.0, 0.0])), torch.tensor([0, 2, 1]), 2)
    torch.testing.assert_close(basis.T @ basis, torch.eye(3))
