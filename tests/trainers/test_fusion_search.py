"""DHA's search phase: distances between heads that mean something."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention.conversion.convert import assemble, lift
from attention.heads import LayerHeads
from attention.io.precision import cast_weights
from attention.modeling.model_classes import plan_of
from trainers.fusion_search import search_distances
from trainers.settings import TrainSettings

SETTINGS = TrainSettings(learning_rate=1e-4)


def patterns(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    start, stride = (torch.randint(low, high, (count, 1), generator=generator) for low, high in ((0, 64), (1, 4)))
    return (start + stride * torch.arange(16)) % 64


def search(model: Any, steps: int, **settings: Any) -> dict[str, torch.Tensor]:
    return search_distances(model, patterns(40), SETTINGS.model_copy(update=settings), steps=steps, rate=0.02)


@pytest.mark.heavy
def test_distances_are_distances(tiny_model: Any) -> None:
    result = search(tiny_model("llama"), 5)
    for side in (result["key"], result["value"]):
        assert side.shape == (2, 4, 4)
        assert torch.equal(side, side.mT)
        assert torch.equal(side.diagonal(dim1=1, dim2=2), torch.zeros(2, 4))
        assert side.std() > 0
        # Identity is 2 / g from identity; five steps of 0.02 do not lead far away.
        assert (side + torch.eye(4) / 2 - 0.5).abs().max() < 0.2


def test_the_model_stays_and_the_search_repeats(tiny_model: Any) -> None:
    model = tiny_model("llama", num_key_value_heads=2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    first, second = search(model, 3), search(model, 3, zero_stage=3)
    torch.testing.assert_close(first["key"], second["key"], atol=1e-4, rtol=0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_it_trains_in_the_dtype_of_its_settings(tiny_model: Any) -> None:
    model = tiny_model("llama", num_key_value_heads=2)
    cast_weights(model, torch.bfloat16)
    result = search(model, 3)
    assert {tensor.dtype for tensor in result.values()} == {torch.float32}
    assert model.dtype == torch.bfloat16, "a copy trains"
    cast_weights(model, torch.float32)
    torch.testing.assert_close(result["key"], search(model, 3)["key"], atol=1e-6, rtol=0)


@pytest.mark.heavy
def test_equal_heads_keep_their_distance(tiny_model: Any) -> None:
    """A limit of the measure, as the paper has it: Eq. 7 compares coefficients and not heads. Heads 0 and 1 are made
    the same head, so every coefficient of theirs feels the same pull and the distance of identity, 2 / H, stays."""
    model = tiny_model("llama")

    def doubled(heads: LayerHeads) -> LayerHeads:
        for name in ("q", "k", "v", "o"):
            rows = getattr(heads, name).clone()
            rows[1] = rows[0]
            object.__setattr__(heads, name, rows)
        return heads

    twin = assemble(model, plan_of(model), [doubled(heads) for heads in lift(model)])
    result = search(twin, 40)
    for side in (result["key"], result["value"]):
        torch.testing.assert_close(side[:, 0, 1], torch.full((2,), 0.5), atol=1e-3, rtol=0)
        assert (side[:, 2, 3] - 0.5).abs().max() > 0.01
