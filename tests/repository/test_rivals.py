"""The low-rank rivals of `benchmarks.rivals`: the best of their rank, under the bytes that are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.calibration.calibrate import calibrate
from attention.families import family_of, geometry_of
from benchmarks.rivals import GROUP, Factored, equal_ranks, factor, low_rank, ranks_by_layer

Tiny = Callable[..., PreTrainedModel]


@pytest.fixture
def tiny_tokens() -> Tensor:
    return torch.randint(64, (6, 24), generator=torch.Generator().manual_seed(0))


def test_a_factored_projection_is_the_best_of_its_rank() -> None:
    """Its error on the inputs is what the discarded singular values have; no other of that rank has less (numpy)."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 12, generator=generator) @ torch.randn(12, 12, generator=generator)
    rows = torch.randn(8, 12, generator=generator)
    factored = Factored.of(rows, inputs.T.double() @ inputs.double() / len(inputs))
    outputs = inputs.double().numpy() @ rows.double().numpy().T
    left, values, right = np.linalg.svd(outputs, full_matrices=False)
    for rank in (1, 3, 7):
        result = inputs.double() @ factored.of_rank(rank).double().T
        best = left[:, :rank] * values[:rank] @ right[:rank]
        error, least = (float(((outputs - each) ** 2).sum()) for each in (result.numpy(), best))
        assert error == pytest.approx(least, rel=1e-4)
        assert float((factored.values[rank:] ** 2).sum()) * len(inputs) == pytest.approx(error, rel=1e-4)
        assert int(torch.linalg.matrix_rank(factored.of_rank(rank).double(), tol=1e-4)) == rank


@pytest.mark.parametrize("choose", [equal_ranks, ranks_by_layer])
def test_ranks_are_those_of_the_bytes(choose: Any, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    factors = factor(model, calibrate(model, tiny_tokens))
    ranks = choose(factors, 0.25)
    dims = 2 * 3 * 4 * 8
    assert sum(ranks.values()) == dims // 4
    converted = low_rank(model, factors, ranks)
    family, geometry = family_of(model.config), geometry_of(model.config)
    for layer, module in enumerate(family.attention_modules(converted)):
        heads = family.read(module, geometry)
        for side in ("k", "v"):
            for index, group in enumerate(getattr(heads, side).split(GROUP)):
                rank = int(torch.linalg.matrix_rank(group.flatten(0, 1).double(), tol=1e-5))
                assert rank <= ranks[layer, side, index]


def test_all_ranks_lose_nothing(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("qwen2")
    factors = factor(model, calibrate(model, tiny_tokens))
    with torch.no_grad():
        converted = low_rank(model, factors, equal_ranks(factors, 1.0))(tiny_tokens).logits
        torch.testing.assert_close(converted, model(tiny_tokens).logits, atol=1e-4, rtol=1e-4)


def test_ranks_by_layer_go_where_the_power_is(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    """A side whose power is in one direction gets one rank, and the others get the rest."""
    model = tiny_model("llama")
    family, geometry = family_of(model.config), geometry_of(model.config)
    module = family.attention_modules(model)[0]
    heads = family.read(module, geometry)
    one = heads.v.flatten(0, 1)
    flat = (one[:, :1] @ one[:1]).view_as(heads.v)
    with torch.no_grad():
        family.write(module, heads.changed(("v",), lambda _: flat))
    ranks = ranks_by_layer(factor(model, calibrate(model, tiny_tokens)), 0.5)
    assert ranks[0, "v", 0] == 1 and min(ranks[0, "k", 0], ranks[1, "v", 0]) > 16
