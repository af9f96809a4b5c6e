"""The polish of a conversion: nearer to the original on other text, by the same steps each time, in any dtype."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.conversion.convert import convert
from attention.families import geometry_of
from attention.modeling.predictions import final
from attention.plan import AttentionPlan, LayerPlan
from trainers.evaluation import CachedTeacher, evaluate
from trainers.loop import TrainingDiverged
from trainers.polish import RATES, polish, polish_rows

HALF = LayerPlan((0, 0, 1, 1), (0, 0, 1, 1))


def text(rows: int, seed: int) -> Tensor:
    return torch.randint(0, 64, (rows, 32), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def pair(tiny_model: Any) -> tuple[Any, Any]:
    """An original, and its conversion, which shares the memory of all weights outside of attention."""
    original = tiny_model("llama", num_key_value_heads=4).eval()
    geometry = geometry_of(original.config)
    plan = AttentionPlan((HALF,) * geometry.num_layers, geometry.head_dim)
    converted = convert(original, plan, share=True)
    theirs = dict(original.named_parameters())
    shared = [n for n, p in converted.named_parameters() if n in theirs and p.data_ptr() == theirs[n].data_ptr()]
    assert any("mlp" in name for name in shared)
    return original, converted


def divergence(original: Any, model: Any) -> float:
    result = evaluate(model, text(16, 99), teacher=original).kl
    assert result is not None
    return result


@pytest.mark.parametrize("weights", ["all", "kv"])
def test_brings_a_conversion_nearer_to_its_original_on_other_text(
    pair: tuple[Any, Any], weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RATES, weights, 1e-3)  # random weights are larger than those of a model
    original, start = pair
    converted, before = copy.deepcopy(start), {n: p.clone() for n, p in original.named_parameters()}
    far = divergence(original, converted)
    work = polish(CachedTeacher(original), converted, text(64, 1), steps=30, weights=weights)
    assert divergence(original, converted) < 0.95 * far
    assert work.steps == 30 and work.tokens == 30 * 64 * 32 and work.last_loss < work.first_loss
    assert all(torch.equal(p, before[name]) for name, p in original.named_parameters()), "the original is as it was"
    assert not converted.training and not any(p.requires_grad for p in converted.parameters())
    moved = {
        name.split(".")[-2]
        for name, p in converted.named_parameters()
        if not torch.equal(p, dict(start.named_parameters())[name])
    }
    assert moved == {"k_proj", "v_proj"} if weights == "kv" else {"k_proj", "down_proj", "embed_tokens"} <= moved


def test_the_original_keeps_its_weights_where_a_conversion_shares_its_memory(pair: tuple[Any, Any]) -> None:
    original, converted = pair
    before = {n: p.clone() for n, p in original.named_parameters()}
    polish(CachedTeacher(original), converted, text(8, 1), steps=1, weights="all")
    assert all(torch.equal(p, before[name]) for name, p in original.named_parameters())


def test_the_same_seed_gives_the_same_weights_and_another_one_others(pair: tuple[Any, Any]) -> None:
    original, start = pair

    def polished(seed: int) -> Tensor:
        converted = copy.deepcopy(start)
        polish(CachedTeacher(original), converted, text(130, 1), steps=3, weights="kv", seed=seed)
        return torch.cat([p.flatten() for p in converted.parameters()])

    assert torch.equal(polished(0), polished(0))
    assert not torch.equal(polished(0), polished(1))


def test_small_steps_are_not_lost_in_16_bits(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights whose last digit is larger than a step are moved by a float32 copy of them; float16 scales its loss."""
    monkeypatch.setattr("trainers.polish._MOST_SCALE", 2.0**60)  # it has to be found

    def gained(dtype: torch.dtype) -> float:
        original, model = (copy.deepcopy(one).to(dtype) for one in pair)
        far = divergence(original, model)
        polish(CachedTeacher(original), model, text(64, 1), steps=10, weights="all")
        assert model.dtype == dtype
        return far - divergence(original, model)

    whole = gained(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert gained(dtype) > 0.5 * whole


def test_float32_weights_of_a_16_bit_model_learn_as_the_others(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As norms that a family keeps in float32: their gradients are of the scaled loss too."""
    whole = tiny_model("gpt_oss", num_key_value_heads=4).eval()
    geometry = geometry_of(whole.config)
    halved = convert(whole, AttentionPlan((HALF,) * geometry.num_layers, geometry.head_dim))
    norms: list[list[float]] = []
    clip = torch.nn.utils.clip_grad_norm_

    def recorded(parameters: list[Tensor], limit: float) -> Tensor:
        norms[-1].append(float(norm := clip(parameters, limit)))
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded)
    for scale in (1.0, 2.0**20):
        original, model = (copy.deepcopy(one).to(torch.float16) for one in (whole, halved))
        for name, module in model.named_modules():
            if name.endswith("norm"):
                module.float()
        monkeypatch.setattr("trainers.polish._MOST_SCALE", scale)
        norms.append([])
        polish(CachedTeacher(original), model, text(64, 1), steps=2, weights="all")
    finite = [[norm for norm in each if math.isfinite(norm)] for each in norms]
    assert len(norms[1]) > len(finite[1]) == 2, "the first scale was too large"
    assert finite[1] == pytest.approx(finite[0], rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gradient_that_is_not_finite_changes_no_weight(
    pair: tuple[Any, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, model = (copy.deepcopy(one).to(dtype) for one in pair)
    before = {name: p.clone() for name, p in model.named_parameters()}
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
    with pytest.raises(TrainingDiverged):
        polish(CachedTeacher(original), model, text(64, 1), steps=2, weights="all")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_each_sequence_goes_through_the_original_once(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original, start = pair
    rows: list[int] = []

    def counting(model: Any, ids: Tensor, **more: Any) -> Any:
        rows.append(len(ids))
        return final(model, ids, **more)

    monkeypatch.setattr("trainers.evaluation.final", counting)
    polish(CachedTeacher(original), copy.deepcopy(start), text(70, 1), steps=4, weights="kv")
    assert sum(rows) == 70


def test_a_step_takes_whole_sequences_one_at_least() -> None:
    assert [polish_rows(length, 100) for length in (256, 2048, 4096)] == [8, 1, 1]
    assert polish_rows(64, 5) == 5
