"""Similarity of the heads that share, before and after alignment, against cosines token by token."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes

from attention.geometry import RotaryLayout
from attention.plan import AttentionPlan, LayerPlan
from search_spaces.similarity.projections import activations
from search_spaces.similarity.sharing import PairCosines, pair_cosines, sharing_similarity, similarity_pairs


def unit_vectors(context, layer: int, side: str, head: int) -> np.ndarray:
    """Vectors of one head, one token after another, each one unit long: [N, d] float64."""
    result = activations(context.heads[layer], context.calibration.layers[layer], side, 10_000)[head]
    return np.stack([v / np.linalg.norm(v) for v in result.double().numpy()])


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return sum(float(x @ y) for x, y in zip(a, b, strict=True)) / len(a)


def best_turned(a: np.ndarray, b: np.ndarray, layout: RotaryLayout) -> float:
    """Mean cosine after the best admissible map of a: angles tried one by one, free dims by scipy's Procrustes."""
    turned = a.copy()
    for i, j in zip(layout.first, layout.second, strict=True):
        best = -np.inf
        for angle in np.linspace(0, 2 * np.pi, 2000, endpoint=False):
            x = np.cos(angle) * a[:, i] - np.sin(angle) * a[:, j]
            y = np.sin(angle) * a[:, i] + np.cos(angle) * a[:, j]
            reached = float(x @ b[:, i] + y @ b[:, j])
            if reached > best:
                best, turned[:, i], turned[:, j] = reached, x, y
    free = list(layout.free)
    if free:
        turned[:, free] = a[:, free] @ orthogonal_procrustes(a[:, free], b[:, free])[0]
    return cosine(turned, b)


@pytest.mark.parametrize("family", ["llama", "phi", "opt", "qwen2"])
@pytest.mark.parametrize("side", ["key", "value"])
def test_both_cosines_agree_with_token_by_token(make_context, family: str, side: str) -> None:
    context = make_context(family)
    geometry = context.geometry
    result = pair_cosines(context.heads[0], context.calibration.layers[0], geometry, side, tokens=10_000)
    layout = geometry.rotary if side == "key" else RotaryLayout.none(geometry.head_dim)
    for i, j in ((0, 1), (3, 1)):
        a, b = (unit_vectors(context, 0, side, h) for h in (i, j))
        assert result.raw[i, j].item() == pytest.approx(cosine(a, b), abs=1e-5)
        assert result.aligned[i, j].item() == pytest.approx(best_turned(a, b, layout), abs=1e-4)


def test_alignment_never_lowers_a_cosine_and_leaves_a_head_with_itself(demo_context) -> None:
    pairs = similarity_pairs(demo_context.heads, demo_context.calibration.layers, demo_context.geometry)
    assert len(pairs) == demo_context.geometry.num_layers
    for layer in pairs:
        for result in layer.values():
            assert (result.aligned >= result.raw - 1e-6).all()
            torch.testing.assert_close(result.aligned.diagonal(), torch.ones(8, dtype=torch.float64), atol=1e-4, rtol=0)
    values = pairs[0]["value"]
    assert values.aligned[0, 1] > values.raw[0, 1] + 0.1  # turning values freely brings unlike heads together


def made(*numbers: float) -> list[dict[str, PairCosines]]:
    """Layers of 4 heads; cosine of heads i and j in layer l: (i + j) / 10 + numbers[l]; 0.5 more when aligned."""
    index = torch.arange(4, dtype=torch.float64)
    layers = [(index[:, None] + index) / 10 + number for number in numbers]
    return [dict.fromkeys(("key", "value"), PairCosines(raw, raw + 0.5)) for raw in layers]


def test_pairs_of_a_group_by_hand() -> None:
    first = LayerPlan.from_groups(((0, 1, 3), (2,)), ((0,), (1,), (2,), (3,)), 4)
    second = LayerPlan.from_groups(((0, 2), (1, 3)), ((0, 1), (2, 3)), 4)
    result = sharing_similarity(made(0.0, 1.0), AttentionPlan((first, second), 8), (0, 1, 2, 3))
    # Keys of layer 0: pairs 01, 03, 13 with 0.1, 0.3, 0.4; of layer 1: 02, 13 with 1.2, 1.4.
    assert result["key"]["raw"] == pytest.approx([0.8 / 3, 1.3])
    assert result["key"]["aligned"] == pytest.approx([0.8 / 3 + 0.5, 1.8])
    assert result["key"]["pairs"] == [3, 2]
    assert result["means"]["key_raw"] == pytest.approx((0.8 + 2.6) / 5)
    # No value heads share in layer 0.
    assert result["value"]["raw"] == [None, pytest.approx((1.1 + 1.5) / 2)]
    assert result["means"]["value_aligned"] == pytest.approx(1.8)
    assert json.loads(json.dumps(result)) == result


def test_heads_that_are_stored_once_already_are_no_pair() -> None:
    whole = LayerPlan.from_groups(((0, 1, 2, 3),), ((0, 1), (2, 3)), 4)
    result = sharing_similarity(made(0.0), AttentionPlan((whole,), 8), (0, 0, 1, 1))
    assert result["key"] == {"raw": [pytest.approx(0.2)], "aligned": [pytest.approx(0.7)], "pairs": [1]}
    assert result["value"] == {"raw": [None], "aligned": [None], "pairs": [0]}
    assert set(result["means"]) == {"key_raw", "key_aligned"}


def test_without_sampled_inputs_it_refuses(demo_context) -> None:
    statistics = replace(demo_context.calibration.layers[0], inputs=torch.zeros(0, 0, 256))
    with pytest.raises(ValueError, match="sample"):
        pair_cosines(demo_context.heads[0], statistics, demo_context.geometry, "key")
