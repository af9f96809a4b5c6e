"""Similarities: worked numbers, invariances, and the contract that every part of the axis keeps."""

from __future__ import annotations

import math

import pytest
import torch

from attention.geometry import RotaryLayout
from search_spaces.axes import SIMILARITY
from search_spaces.similarity.activation import activation_similarity
from search_spaces.similarity.projections import activations


def test_eq_1_by_hand() -> None:
    """Rows of a: 0 and 90 degrees. Rows of b: 45 and 180 degrees. Cosines [[s, -1], [s, 0]], s = cos 45."""
    a = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    b = torch.tensor([[1.0, 1.0], [-5.0, 0.0]])
    s = math.cos(math.pi / 4)
    # a -> b: s + s; b -> a: s + 0.
    result = activation_similarity(torch.stack([a, b]))
    assert result[0, 1] == result[1, 0]
    assert result[0, 1].item() == pytest.approx(0.5 * (2 * s + s + 0.0))


def test_eq_1_of_a_head_with_itself_is_the_number_of_tokens() -> None:
    a = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    reordered = a[torch.randperm(7)] * 4  # order and scale of tokens
    torch.testing.assert_close(
        activation_similarity(torch.stack([a, reordered])), torch.full((2, 2), 7.0, dtype=torch.float64)
    )


def test_activation_part_agrees_with_each_pair_alone(demo_context) -> None:
    heads, statistics = demo_context.heads[1], demo_context.calibration.layers[1]
    part = SIMILARITY.get("activation")
    matrix = part(heads, statistics, demo_context.geometry, "key", tokens=64)
    acts = activations(heads, statistics, "key", 64)
    for i, j in ((0, 0), (2, 5), (7, 3)):
        cosines = torch.cosine_similarity(acts[i][:, None], acts[j], dim=-1)
        expected = (cosines.amax(1).sum() + cosines.amax(0).sum()) / 2
        assert matrix[i, j].item() == pytest.approx(expected.item(), rel=1e-5)


def test_activations_are_the_projections(make_context) -> None:
    context = make_context("qwen2")  # has biases
    heads, statistics = context.heads[0], context.calibration.layers[0]
    x = statistics.inputs.flatten(0, 1)
    assert heads.v_bias is not None
    expected = x @ heads.v[2].T + heads.v_bias[2]
    torch.testing.assert_close(activations(heads, statistics, "value", 10_000)[2], expected, atol=1e-5, rtol=1e-5)
    assert activations(heads, statistics, "value", 5).shape[1] == 5


def test_cka_by_hand_and_its_invariances(make_context) -> None:
    """Heads of two dims: the identity, a head that is half empty, and the second one turned and scaled."""
    context = make_context("llama")
    weights = torch.zeros(4, 8, 32)
    weights[0, :2, :2] = torch.eye(2)
    weights[1, 0, 0] = 1
    weights[2] = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    turn = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(2))).Q
    weights[3] = 3 * turn @ weights[2]
    heads = context.heads[0]
    similarity = SIMILARITY.get("cka")(type(heads)(heads.q, weights, heads.v, heads.o), None, context.geometry, "key")
    # |a^T b|^2 = 1, |a^T a| = sqrt 2, |b^T b| = 1.
    assert similarity[0, 1].item() == pytest.approx(1 / math.sqrt(2))
    assert similarity[2, 3].item() == pytest.approx(1)
    assert similarity[1, 2].item() < 0.9


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", SIMILARITY.names())
def test_every_similarity_is_symmetric_and_knows_a_copy(name: str, side: str, make_context) -> None:
    """The contract of the axis: [H, H], symmetric, finite, no head closer to another than to its copy."""
    context = make_context("llama", attention_bias=True)
    heads, statistics = context.heads[0], context.calibration.layers[0]
    # Head 3 becomes a copy of head 1 in weights and biases.
    copied = heads.expand((0, 1, 2, 1), (0, 1, 2, 1))
    part = SIMILARITY.get(name)
    matrix = part(copied, statistics, context.geometry, side, **part.settings())
    assert matrix.shape == (4, 4)
    assert torch.isfinite(matrix).all()
    torch.testing.assert_close(matrix, matrix.T, atol=1e-8, rtol=1e-8)
    assert matrix[1, 3] >= matrix[1, [0, 2]].max()
    torch.testing.assert_close(matrix[0, 1], matrix[0, 3])
    assert part.source


def test_aligned_similarity_forgets_an_admissible_turn(make_context) -> None:
    """A value head turned freely, or a key head turned within its rotary pairs, is as close as a copy."""
    context = make_context("llama")
    heads, statistics = context.heads[0], context.calibration.layers[0]
    turn = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(3))).Q
    value = heads.v.clone()
    value[3] = turn @ heads.v[1]
    key = heads.k.clone()
    layout = RotaryLayout(8, 8)
    angle = torch.linspace(0.3, 2.8, 4)[:, None]
    first, second = heads.k[1][list(layout.first)], heads.k[1][list(layout.second)]
    key[3, list(layout.first)] = angle.cos() * first - angle.sin() * second
    key[3, list(layout.second)] = angle.sin() * first + angle.cos() * second
    turned = type(heads)(heads.q, key, value, heads.o)
    part = SIMILARITY.get("aligned")
    for side in ("key", "value"):
        cosine = part(turned, statistics, context.geometry, side, criterion="cos")
        assert cosine[1, 3].item() == pytest.approx(1.0, abs=1e-5)
        assert cosine[0, 1] < 0.99
        distance = part(turned, statistics, context.geometry, side, criterion="dist")
        assert abs(distance[1, 3].item()) < 1e-2 * abs(distance[0, 1].item())


def test_unknown_side_is_refused(demo_context) -> None:
    with pytest.raises(ValueError, match="side must be"):
        SIMILARITY.get("weight")(demo_context.heads[0], None, demo_context.geometry, "query")


def test_activation_without_statistics_says_what_to_do(demo_context) -> None:
    with pytest.raises(ValueError, match="calibrat"):
        SIMILARITY.get("activation")(demo_context.heads[0], None, demo_context.geometry, "key")
