"""Wide heads in a stock model: a larger head dim, each frequency several times, and no line of our code to run it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_references import logits
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attention.calibration.calibrate import calibrate
from attention.conversion.convert import convert
from attention.families import families, geometry_of
from attention.geometry import RotaryLayout
from attention.io import checkpoint
from attention.io.targets import TargetError, target
from attention.io.wide_form import FAMILIES, WideFormError, frequencies_of, slice_order, wide_config
from attention.plan import AttentionPlan, LayerPlan

Tiny = Callable[..., PreTrainedModel]
ONE = (0, 0, 0, 0)
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def wide(model: PreTrainedModel, tokens: Tensor, *widths: int) -> PreTrainedModel:
    layers = tuple(LayerPlan(ONE, ONE, m, m) for m in widths)
    plan = AttentionPlan(layers, geometry_of(model.config).head_dim)
    return convert(model, plan, fusion="least_squares", calibration=calibrate(model, tokens))


@pytest.mark.parametrize("rope", [None, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_transformers_loads_it_to_the_same_logits(
    family: str, width: int, rope: dict[str, Any] | None, tiny_model: Tiny, tiny_tokens: Tensor, tmp_path: Path
) -> None:
    model = tiny_model(family, **({"rope_parameters": rope} if rope else {}))
    headfold = wide(model, tiny_tokens, width, width)
    checkpoint.save(headfold, tmp_path / "stock")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()
    assert type(stock) is families()[family].model_class
    assert stock.config.head_dim == width * geometry_of(model.config).head_dim
    assert stock.config.num_key_value_heads == 1
    torch.testing.assert_close(logits(stock, tiny_tokens), logits(headfold, tiny_tokens), rtol=0, atol=2e-5)
    apart = (logits(stock, tiny_tokens) - logits(model, tiny_tokens)).abs().max()
    assert apart > 1e-3, "a comparison that could not fail"
    assert checkpoint.original_heads(tmp_path / "stock", stock.config.head_dim) is None


def test_the_original_s_heads_are_a_fraction_where_wider_ones_do_not_fill_its_bytes(tmp_path: Path) -> None:
    """64 key and value heads of 32 dims are 21 1/3 of 96: 8 of those are 37.5 % of the bytes."""
    checkpoint.write_note(tmp_path, AttentionPlan.identity(1, 2, 96), checkpoint.original_note(64, 32))
    heads = checkpoint.original_heads(tmp_path, 96)
    assert heads is not None and 8 / heads == pytest.approx(0.375)
    assert checkpoint.original_shape(tmp_path, 96) == (64, 32)


def test_slices_come_pair_by_pair() -> None:
    """Two slices of six dims, four of them rotary: pairs of one frequency side by side, free dims last."""
    order = slice_order(RotaryLayout(6, 4), 2)
    assert order == [0, 6, 1, 7, 2, 8, 3, 9, 4, 5, 10, 11]
    assert slice_order(RotaryLayout(4, 4, "interleaved"), 2) == [0, 1, 4, 5, 2, 3, 6, 7]


def test_each_frequency_stands_as_often_as_heads_are_wide(tiny_model: Tiny) -> None:
    config = tiny_model("llama").config
    dim = geometry_of(config).head_dim
    layer = LayerPlan(ONE, ONE, 3, 3)
    stock, plan = wide_config(config, AttentionPlan((layer,) * 2, dim))
    assert plan == AttentionPlan((LayerPlan(ONE, ONE),) * 2, 3 * dim)
    rope = stock.rope_parameters
    exponents = torch.arange(0, 3 * dim, 2, dtype=torch.float64) / (3 * dim)
    served = 1 / (torch.tensor(rope["short_factor"], dtype=torch.float64) * rope["rope_theta"] ** exponents)
    expected = frequencies_of(config)[0].repeat_interleave(3)
    torch.testing.assert_close(served, expected, rtol=1e-12, atol=0)
    assert rope["attention_factor"] == 1.0


def test_what_no_stock_model_has(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    mixed = wide(tiny_model("llama"), tiny_tokens, 1, 2)
    with pytest.raises(TargetError, match=r"heads of 8 and 16 dims; export to target transformers"):
        target("gqa").support_for(mixed.config, mixed.plan)
    gpt2 = tiny_model("gpt2")
    plan = AttentionPlan((LayerPlan(ONE, ONE, 2, 2),) * 2, geometry_of(gpt2.config).head_dim)
    with pytest.raises(WideFormError, match="no separate head dim"):
        wide_config(gpt2.config, plan)
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    dynamic = tiny_model("llama", rope_parameters=rope)
    with pytest.raises(WideFormError, match="depend on the length of the text"):
        wide_config(dynamic.config, AttentionPlan((LayerPlan(ONE, ONE, 2, 2),) * 2, 8))


@pytest.mark.parametrize("name", ["gqa", "vllm", "gguf", "transformers"])
def test_targets_hold_it_at_its_own_bytes(name: str, tiny_model: Tiny, tiny_tokens: Tensor, tmp_path: Path) -> None:
    """Written and read back, with the logits of the model."""
    model = wide(tiny_model("llama"), tiny_tokens, 2, 2)
    one = target(name)
    support = one.support_for(model.config, model.plan)
    assert support.bytes_per_token("float16") == model.plan.kv_bytes_per_token("float16")
    lowered = one.lower(model)
    config = lowered.model.config
    one.write(lowered.model, tmp_path, "float32", None)
    again = one.read(tmp_path, config)
    torch.testing.assert_close(logits(again, tiny_tokens), logits(model, tiny_tokens), rtol=0, atol=2e-5)


def test_counts_of_each_layer_of_wide_heads(tiny_model: Tiny, tiny_tokens: Tensor, tmp_path: Path) -> None:
    """One and two heads of twice the width, in DeciLM's and deci's form."""
    model = tiny_model("llama")
    layers = (LayerPlan(ONE, ONE, 2, 2), LayerPlan((0, 0, 1, 1), (0, 0, 1, 1), 2, 2))
    plan = AttentionPlan(layers, geometry_of(model.config).head_dim)
    converted = convert(model, plan, fusion="least_squares", calibration=calibrate(model, tiny_tokens))
    for name in ("vllm", "gguf"):
        one = target(name)
        support = one.support_for(converted.config, plan)
        assert (support.key_heads, support.head_dim) == ((1, 2), 16)
        folder = tmp_path / name
        folder.mkdir()
        lowered = one.lower(converted)
        config = lowered.model.config
        one.write(lowered.model, folder, "float32", None)
        again = one.read(folder, config)
        torch.testing.assert_close(logits(again, tiny_tokens), logits(converted, tiny_tokens), rtol=0, atol=2e-5)
