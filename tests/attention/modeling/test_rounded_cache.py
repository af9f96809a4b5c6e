"""Rounding as ggml and vLLM compute it, and models that read what was rounded."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.cache_formats import CACHE_FORMATS, CachePair
from attention.conversion.convert import convert
from attention.engine_cache import engine_cache
from attention.families import families, geometry_of
from attention.modeling.grouped import cache_bytes
from attention.modeling.growing_cache import cache_of, next_output
from attention.modeling.rounded_cache import Scales, hadamard, rotation_size, round_head, round_numbers, rounded_cache
from attention.plan import AttentionPlan, LayerPlan

ROUTED = ("glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "olmoe", "qwen3_moe")  # a router may take other experts
BLOCKS = ("q8_0", "q5_1", "q4_0")


def _numbers() -> Tensor:
    """Heads of 64 with outliers, one of zeros, one of whole numbers (halves of a step, ties of the largest)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 5, 64, generator=generator) * torch.randn(9, 5, 64, generator=generator).mul(2).exp()
    x[0, 0] = 0
    x[1] = x[1].round()
    x[2, 2] = torch.arange(64) - 31.5
    return x


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_ggml_to_the_bit(name: str) -> None:
    x = _numbers()
    kind = getattr(gguf.GGMLQuantizationType, name.upper())
    packed = gguf.quants.quantize(x.numpy(), kind)
    assert packed.shape[-1] == CACHE_FORMATS[name].head_bytes(64)
    assert np.array_equal(round_numbers(x, CACHE_FORMATS[name]).numpy(), gguf.quants.dequantize(packed, kind))


def _e4m3(x: float) -> float:
    """The nearest number of 4 exponent and 3 mantissa bits, ties to even, saturated."""
    if abs(x) >= 448:
        return math.copysign(448.0, x)
    exponent = max(-6, math.frexp(x)[1] - 1)
    step = 2.0 ** (exponent - 3)
    return round(x / step) * step


def test_fp8_is_e4m3_that_saturates_under_a_scale() -> None:
    x = torch.cat([_numbers().flatten(), torch.tensor([1e4, -1e4, 447.0, 449.0, 0.0009, 2.0**-10, 1.0625])])
    expected = torch.tensor([_e4m3(value) for value in x.tolist()])
    assert torch.equal(round_numbers(x, CACHE_FORMATS["fp8"]), expected)
    scaled = torch.tensor([_e4m3(value) for value in (x / 0.25).tolist()]) * 0.25
    assert torch.equal(round_numbers(x, CACHE_FORMATS["fp8"], 0.25), scaled)


@pytest.mark.parametrize(("name", "word"), [("f16", "e"), ("bf16", "f")])
def test_sixteen_bits_are_rounded_to_the_nearest(name: str, word: str) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(1))
    rounded = round_numbers(x, CACHE_FORMATS[name])
    if word == "e":
        assert rounded.tolist() == [struct.unpack("e", struct.pack("e", value))[0] for value in x.tolist()]
    else:
        assert torch.equal(rounded, x.bfloat16().float()) and not torch.equal(rounded, x)


def test_heads_of_a_multiple_of_64_are_rounded_in_their_hadamard_transform() -> None:
    assert [rotation_size(CACHE_FORMATS["q8_0"], width, "key") for width in (32, 64, 96, 128, 192)] == [
        1,
        64,
        1,
        128,
        64,
    ]
    assert [rotation_size(CACHE_FORMATS["q8_0"], width, "value") for width in (32, 64, 128)] == [1, 64, 64]
    assert rotation_size(CACHE_FORMATS["f16"], 64, "key") == 1
    matrix = hadamard(64).double()
    assert torch.allclose(matrix @ matrix, torch.eye(64, dtype=torch.float64), atol=1e-6)
    x = _numbers()
    expected = round_numbers(x @ hadamard(64), CACHE_FORMATS["q4_0"]) @ hadamard(64)
    assert torch.equal(round_head(x, CACHE_FORMATS["q4_0"], "value"), expected)
    outlier = torch.randn(1, 64, generator=torch.Generator().manual_seed(2))
    outlier[0, 5] = 50
    plain = (round_numbers(outlier, CACHE_FORMATS["q4_0"]) - outlier)[0, :32]
    turned = (round_head(outlier, CACHE_FORMATS["q4_0"], "key") - outlier)[0]
    assert turned.square().mean() < 0.6 * plain.square().mean()


def test_keys_are_rounded_in_the_engines_order_of_dims() -> None:
    x = _numbers()
    order = [dim for i in range(32) for dim in (i, i + 32)]
    there = round_head(x[..., order], CACHE_FORMATS["q4_0"], "key")
    assert torch.equal(round_head(x, CACHE_FORMATS["q4_0"], "key", order=order)[..., order], there)
    assert not torch.equal(
        round_head(x, CACHE_FORMATS["q4_0"], "key"), round_head(x, CACHE_FORMATS["q4_0"], "key", order=order)
    )


def _logits(model: PreTrainedModel, ids: Tensor, pair: CachePair | None) -> Tensor:
    with torch.no_grad(), engine_cache(model, pair):
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("form", ["stock", "headfold"])
@pytest.mark.parametrize("name", ["q4_0", "fp8"])
def test_decoding_reads_what_a_whole_sequence_reads(
    form: str, name: str, tiny_model: Callable[..., PreTrainedModel], tiny_tokens: Tensor
) -> None:
    model = tiny_model("llama", head_dim=32, dtype=torch.float64)  # whose order of sums moves no rounding
    if form == "headfold":
        model = convert(model, AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 0, 1)),) * 2, 32))
    pair, ids = CachePair.parse(name), tiny_tokens[:2]
    whole = _logits(model, ids, pair)
    with torch.no_grad(), engine_cache(model, pair):
        output = model(ids[:, :8], use_cache=True)
        steps = [output.logits]
        for index in range(8, ids.shape[1]):
            output = next_output(model, ids[:, index : index + 1], output)
            steps.append(output.logits)
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-4)
    assert cache_bytes(cache_of(output)) > 0
    exact = _logits(model, ids, None)
    assert (whole - exact).abs().max() > 1e-2
    assert torch.equal(_logits(model, ids, None), exact), "the model is as before"


@pytest.mark.parametrize("form", ["stock", "converted"])
@pytest.mark.parametrize("family", sorted(families()))
def test_every_family_reads_rounded_keys_values_and_queries(
    family: str, form: str, tiny_model: Callable[..., PreTrainedModel], tiny_tokens: Tensor
) -> None:
    """Keys, values and queries each change the result in every layer, so none of them passes unrounded."""
    wide: dict[str, Any] = {"hidden_size": 128}
    if family not in ("gpt2", "gpt_neox", "opt", "phi", "phi3", "stablelm"):
        wide["head_dim"] = 32
    if family == "gemma4_text":
        wide["global_head_dim"] = 32
    if family == "phi3":
        wide["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    model = tiny_model(family, **wide)
    if form == "converted":
        geometry = geometry_of(model.config)
        layer = LayerPlan((0,) * geometry.num_heads, (0,) * geometry.num_heads)
        model = convert(model, AttentionPlan((layer,) * geometry.num_layers, geometry.head_dim))
    ids = tiny_tokens[:1]
    results = {text: _logits(model, ids, CachePair.parse(text)) for text in ("f16", "q8_0,f16", "f16,q8_0")}
    exact = _logits(model, ids, None)
    for logits in results.values():
        assert 0 < (logits - exact).abs().max() < (math.inf if family in ROUTED else 1)
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        module = "attention.modeling.rounded_cache.round_head"
        patch.setattr(module, lambda x, *_, **__: seen.append(x) or x)
        _logits(model, ids, CachePair.parse("q8_0"))
    assert len(seen) == 3 * model.config.num_hidden_layers


def test_scales_are_of_each_layer(tiny_model: Callable[..., PreTrainedModel], tiny_tokens: Tensor) -> None:
    model, pair, ids = tiny_model("llama"), CachePair.parse("fp8"), tiny_tokens[:1]
    plain = _logits(model, ids, pair)
    for scales in ([Scales(), Scales(values=0.3)], [Scales(keys=0.3), Scales()]):
        with torch.no_grad(), rounded_cache(model, pair, scales=scales):
            assert not torch.equal(model(ids).logits, plain)
