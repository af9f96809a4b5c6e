"""Folding least-squares maps into the heads: exact, and enough to make stretched copies of one head equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.calibration.calibrate import calibrate
from attention.conversion.alignment.least_squares import bounded, fold
from attention.conversion.convert import assemble, convert, lift
from attention.families import geometry_of
from attention.geometry import RotaryLayout
from attention.heads import LayerHeads
from attention.plan import AttentionPlan, LayerPlan

PLAN = AttentionPlan((LayerPlan((0, 0, 1, 0), (0, 1, 1, 0)),) * 2, head_dim=8)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 64, (16, 32), generator=torch.Generator().manual_seed(0))


def scaled_rotation(layout: RotaryLayout, generator: torch.Generator) -> Tensor:
    result = torch.zeros(layout.head_dim, layout.head_dim)
    for a, b in zip(layout.first, layout.second, strict=True):
        x, y = torch.randn(2, generator=generator).tolist()
        result[a, a], result[a, b], result[b, a], result[b, b] = x, -y, y, x
    return result


def copies(heads: LayerHeads, layout: RotaryLayout, seed: int) -> LayerHeads:
    """Every key a scaled rotation of key 0, every value an invertible map of value 0."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.stack([scaled_rotation(layout, generator) @ heads.k[0] for _ in heads.k])
    maps = torch.eye(8) + 0.3 * torch.randn(len(heads.v), 8, 8, generator=generator)
    return replace(heads, k=k, v=maps @ heads.v[0])


def test_copies_of_one_head_become_equal_and_their_mean_loses_nothing(tiny_model: Any, ids: Tensor) -> None:
    original = tiny_model("llama")
    geometry = geometry_of(original.config)
    heads = [copies(h, geometry.rotary, seed) for seed, h in enumerate(lift(original))]
    model = assemble(original, AttentionPlan.identity(2, 4, 8), heads)
    calibration = calibrate(model, ids)

    def logits(of: Any) -> Tensor:
        with torch.no_grad():
            return of(ids).logits

    fused = convert(model, PLAN, alignment="least_squares", calibration=calibration, alignment_settings={"floor": 1e-3})
    torch.testing.assert_close(logits(fused), logits(model), atol=2e-3, rtol=0)
    raw = convert(model, PLAN)
    turned = convert(model, PLAN, alignment="procrustes", calibration=calibration)
    assert min((logits(other) - logits(model)).abs().max() for other in (raw, turned)) > 0.1


def test_bounded_maps_keep_their_form() -> None:
    layout = RotaryLayout(8, 4)
    maps = torch.zeros(2, 8, 8, dtype=torch.float64)
    maps[:, 0, 0] = maps[:, 2, 2] = 2.0  # pair (0, 2) stretched by 2; pair (1, 3) gone
    maps[:, 4:, 4:] = torch.diag(torch.tensor([1.0, 1.0, 0.01, 0.0], dtype=torch.float64))
    result = bounded(maps, layout, 0.1)
    assert torch.equal(result[:, 0, 0], torch.tensor([2.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(result[:, 1, 1], torch.tensor([0.2, 0.2], dtype=torch.float64))
    assert torch.equal(result[:, 1, 1], result[:, 3, 3])
    torch.testing.assert_close(
        torch.linalg.svdvals(result[0, 4:, 4:]), torch.tensor([1.0, 1.0, 0.2, 0.2], dtype=torch.float64)
    )
    assert float(torch.linalg.cond(result[0])) == pytest.approx(10)
    with pytest.raises(ValueError, match="map is zero"):
        bounded(torch.zeros(1, 8, 8, dtype=torch.float64), layout, 0.1)


def test_refusals_and_groups_of_one(tiny_model: Any, ids: Tensor) -> None:
    model = tiny_model("llama")
    geometry, heads = geometry_of(model.config), lift(model)[0]
    with pytest.raises(ValueError, match="needs a calibration"):
        fold(heads, PLAN.layers[0], None, geometry)
    statistics = calibrate(model, ids).layers[0]
    folded = fold(heads, PLAN.layers[0], statistics, geometry)
    assert torch.equal(folded.k[2], heads.k[2])  # the only member of its key group
    assert not torch.equal(folded.v[2], heads.v[2])
