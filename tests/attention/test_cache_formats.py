"""Names, bytes and flags of the caches that engines hold."""

from __future__ import annotations

import pytest

from attention.cache_formats import CACHE_FORMATS, CacheFormatError, CachePair, format_advice, offered_formats
from attention.plan import AttentionPlan, LayerPlan


@pytest.mark.parametrize(
    ("name", "bits", "head"),
    [("f16", 16, 128), ("bf16", 16, 128), ("fp8", 8, 64), ("q8_0", 8.5, 68), ("q5_1", 6, 48), ("q4_0", 4.5, 36)],
)
def test_a_format_takes_the_bytes_of_its_blocks(name: str, bits: float, head: int) -> None:
    assert CACHE_FORMATS[name].bits == bits
    assert CACHE_FORMATS[name].share == bits / 16
    assert CACHE_FORMATS[name].head_bytes(64) == head


def test_bytes_of_a_token_count_keys_and_values_apart() -> None:
    """4 query heads: 2 key heads and 1 value head in one layer, 4 and 4 in the other."""
    layers = (LayerPlan((0, 0, 1, 1), (0, 0, 0, 0)), LayerPlan.identity(4))
    plan = AttentionPlan(layers, 32)
    assert CachePair.parse("f16").bytes_per_token(plan) == plan.kv_bytes_per_token("float16")
    assert CachePair.parse("q8_0,q4_0").bytes_per_token(plan) == 6 * 34 + 5 * 18


def test_a_pair_is_read_and_named_alike() -> None:
    assert CachePair.parse(" Q8_0, q4_0").name == "q8_0,q4_0"
    assert CachePair.parse("q8_0,q8_0").name == "q8_0"
    assert CachePair.parse("q8_0,q4_0").engines == ("llama.cpp",)
    assert CachePair.parse("fp8").engines == ("vLLM",)
    assert CachePair.parse("f16").engines == ("llama.cpp", "vLLM")
    assert CachePair.parse("f16,q8_0").flags("llama.cpp") == "--cache-type-k f16 --cache-type-v q8_0 --flash-attn on"
    assert CachePair.parse("bf16").flags("vLLM") == "--kv-cache-dtype bfloat16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q8", "expected one of f16, bf16, fp8, q8_0, q5_1, q4_0"),
        ("f16,f16,f16", "or two of them"),
        ("fp8,q8_0", "no engine supports keys in fp8 with values in q8_0"),
    ],
)
def test_what_no_engine_holds_is_refused(text: str, message: str) -> None:
    with pytest.raises(CacheFormatError, match=message):
        CachePair.parse(text)


def test_heads_that_are_no_whole_number_of_blocks_are_refused() -> None:
    with pytest.raises(CacheFormatError, match="blocks of 32 numbers of a head, and heads of this model have 80"):
        CachePair.parse("q8_0").bytes_per_token(AttentionPlan.identity(1, 2, 80))


def test_what_a_format_alone_reaches_is_reported() -> None:
    records = offered_formats(AttentionPlan.identity(2, 4, 64))
    assert [record["cache_format"] for record in records] == ["q8_0", "fp8", "q8_0,q4_0", "q4_0"]
    half = format_advice(records, 0.5, "M")
    assert half == (
        "50% without any conversion: a cache in q8_0 (llama.cpp) has 53.12% of the bytes, or fp8 (vLLM) has 50% of the "
        "bytes; measure it: headfold evaluate M --original M --cache-format q8_0 (or fp8)"
    )
    assert "headfold evaluate 'a b' --original 'a b' --cache-format" in format_advice(records, 0.5, "a b")
    assert "q8_0,q4_0 (llama.cpp) has 40.62%" in format_advice(records, 0.4, "M")
    assert format_advice(records, 0.125, "M").startswith("12.5% of the 16-bit cache is below what a cache format alone")
    for_vllm = offered_formats(AttentionPlan.identity(2, 4, 64), "vllm")
    assert [record["cache_format"] for record in for_vllm] == ["fp8"]
    assert format_advice(offered_formats(AttentionPlan.identity(2, 4, 64), "transformers"), 0.5, "M") == ""
    for record in records:
        record |= {"loss_increase": 0.00123, "loss_increase_stderr": 0.0004}
    assert "53.12% of the bytes, loss +0.001 ± 0.000, or fp8" in format_advice(records, 0.5, "M")
    assert [r["cache_format"] for r in offered_formats(AttentionPlan.identity(2, 4, 80))] == ["fp8"], "no whole blocks"
