"""Pruning by magnitude, of `benchmarks.pruning`: what is zero, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from attention.families import family_of, geometry_of
from attention.heads import LayerHeads
from benchmarks.pruning import SIDES, without_small_heads, without_small_weights

Tiny = Callable[..., PreTrainedModel]


def heads_of(model: PreTrainedModel) -> list[LayerHeads]:
    family, geometry = family_of(model.config), geometry_of(model.config)
    return [family.read(module, geometry) for module in family.attention_modules(model)]


@pytest.mark.parametrize("count", [0, 3])
def test_the_smallest_heads_are_zero(tiny_model: Tiny, count: int) -> None:
    model = tiny_model("llama")
    before, after = heads_of(model), heads_of(without_small_heads(model, count))
    norms = {
        (layer, head): sum(float(getattr(heads, side)[head].square().sum()) for side in SIDES)
        for layer, heads in enumerate(before)
        for head in range(heads.num_heads)
    }
    smallest = sorted(norms, key=lambda one: norms[one])[:count]
    for layer, heads in enumerate(after):
        for head in range(heads.num_heads):
            for side in SIDES:
                rows, original = getattr(heads, side)[head], getattr(before[layer], side)[head]
                assert torch.equal(rows, torch.zeros_like(rows) if (layer, head) in smallest else original)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_the_smallest_weights_of_each_layer_are_zero(tiny_model: Tiny, share: float) -> None:
    model = tiny_model("llama")
    for before, after in zip(heads_of(model), heads_of(without_small_weights(model, share)), strict=True):
        weights, pruned = (torch.cat([getattr(heads, side).flatten() for side in SIDES]) for heads in (before, after))
        zero = pruned == 0
        assert int(zero.sum()) == round(share * len(weights))
        assert torch.equal(pruned[~zero], weights[~zero])
        if share:
            assert weights[zero].abs().max() < weights[~zero].abs().min()
