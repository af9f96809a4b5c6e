"""Decoding one token over a long cache: with maps, expanded, multi-head, and stock GQA of equal bytes.

Legend: H query heads, G kept heads, S cached tokens, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import pack_gqa, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from attention.conversion.convert import build
from attention.modeling.decoding import HeadMaps, decode
from attention.modeling.grouped import expand_heads
from attention.modeling.growing_cache import GrowingLayer, cache_argument
from attention.plan import LayerPlan
from benchmarks.models import DEMO, LLAMA_7B, decoupled_plan, llama, random_model
from benchmarks.report import Row, Scale, benchmark, medians

EXPANDED = "headfold_expanded"
WIDE = {"num_attention_heads": 32, "head_dim": 64, "intermediate_size": 5632, "vocab_size": 2048}
RIVALS = {
    "expand": "against expand, then SDPA",
    "mha": "against the untouched multi-head model",
    "gqa": "against stock GQA of equal bytes",
}


def _expanded(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The rival: each query head gets its own copy of its key and value head."""
    return sdpa_attention_forward(
        module, query, expand_heads(key, module.key_map), expand_heads(value, module.value_map), *args, **kwargs
    )


AttentionInterface.register(EXPANDED, _expanded)
AttentionMaskInterface.register(EXPANDED, sdpa_mask)


def _setting(scale: Scale) -> tuple[torch.dtype, list[int]]:
    return (torch.bfloat16, [4096, 32_768]) if scale.device == "cuda" else (torch.float32, [scale.pick(64, 4096)])


@benchmark("decode-layer")
@torch.no_grad()
def of_one_layer(scale: Scale) -> Iterator[Row]:
    """Time one new token in one attention layer (append to the cache, attend), a quarter of the KV heads, decoupled."""
    dtype, lengths = _setting(scale)
    shapes = {"demo": DEMO} if scale.quick else {"demo": DEMO, "32 heads of 64": WIDE, "7B": LLAMA_7B}
    for shape_name, shape in shapes.items():
        for length in lengths:
            heads, width = shape["num_attention_heads"], shape["head_dim"]
            arms = layer_arms(heads, width, length, dtype, scale.device)
            yield from _rows(f"{shape_name}, {length} tokens", medians(arms, scale.pick(2, 9), scale.device))


def layer_arms(heads: int, width: int, length: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Any]]:
    plan = decoupled_plan(1, heads, width).layers[0]
    maps, uniform = HeadMaps.of(plan), heads // 4
    key_map, value_map = (torch.tensor(m, device=device) for m in (plan.key_map, plan.value_map))

    def normal(count: int, tokens: int) -> Tensor:
        return torch.randn(1, count, tokens, width, dtype=dtype, device=device)

    def filled(layer: DynamicLayer, keys: int, values: int) -> Callable[[], tuple[Tensor, Tensor]]:
        layer.update(normal(keys, length), normal(values, length))
        new = normal(keys, 1), normal(values, 1)
        return lambda: layer.update(*new)

    ours = filled(GrowingLayer(), plan.key_heads, plan.value_heads)
    expanded = filled(GrowingLayer(), plan.key_heads, plan.value_heads)
    whole, shared = filled(DynamicLayer(), heads, heads), filled(DynamicLayer(), uniform, uniform)
    query = normal(heads, 1)

    def expand_then_sdpa() -> Tensor:
        key, value = expanded()
        return scaled_dot_product_attention(query, expand_heads(key, key_map), expand_heads(value, value_map))

    # Stock transformers packs the queries of a group on the CPU and lets the kernel repeat on CUDA.
    packed: Any = query if device == "cuda" else pack_gqa(query, heads // uniform)
    return {
        "ours": lambda: decode(query, *ours(), maps, None, None),
        "expand": expand_then_sdpa,
        "mha": lambda: scaled_dot_product_attention(query, *whole()),
        "gqa": lambda: scaled_dot_product_attention(packed, *shared(), enable_gqa=device == "cuda"),
    }


@benchmark("decode-model")
@torch.no_grad()
def of_whole_models(scale: Scale) -> Iterator[Row]:
    """Time one new token of a whole model, a quarter of the KV heads, decoupled."""
    dtype, lengths = _setting(scale)
    shapes = {"demo width, 4 layers": (DEMO, 4)} | scale.pick({}, {"32 heads of 64, 2 layers": (WIDE, 2)})
    for name, (shape, layers) in shapes.items():
        heads, width = shape["num_attention_heads"], shape["head_dim"]
        plan = decoupled_plan(layers, heads, width)
        config = llama(layers, shape)
        converted: Any = build(config, plan, dtype).eval()
        converted.to(scale.device)
        fours = tuple(h // 4 for h in range(heads))
        models = {
            "ours": (converted, plan.layers),
            "expand": (converted, plan.layers),
            "mha": (random_model(config, dtype, scale.device), (LayerPlan.identity(heads),) * layers),
            "gqa": (
                random_model(llama(layers, shape, kv_heads=heads // 4), dtype, scale.device),
                (LayerPlan(fours, fours),) * layers,
            ),
        }
        for length in lengths:
            for batch in (1, 4):
                arms = {arm: stepper(model, cache, length, arm, batch) for arm, (model, cache) in models.items()}
                times = medians(arms, scale.pick(1, 8 // batch + 1), scale.device, dict.fromkeys(arms, 2))
                yield from _rows(f"{name}, {batch} x {length} tokens", times)


def stepper(model: Any, layers: tuple[LayerPlan, ...], length: int, arm: str, batch: int = 1) -> Callable[[], Any]:
    """A function that decodes one token more of each sequence, on a cache that starts with `length` random tokens."""
    device, dtype = model.device, model.dtype
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    cache, width = DynamicCache(), model.config.head_dim
    if arm in ("ours", "expand"):
        cache.layers.extend(GrowingLayer() for _ in layers)
    for index, layer in enumerate(layers):
        keys, values = (
            torch.randn(batch, n, length, width, device=device, dtype=dtype)
            for n in (layer.key_heads, layer.value_heads)
        )
        cache.update(keys, values, index)

    def step() -> None:
        implementation = model.config._attn_implementation
        model.config._attn_implementation = EXPANDED if arm == "expand" else implementation
        try:
            model(token, **cache_argument(model, cache), use_cache=True)
        finally:
            model.config._attn_implementation = implementation

    return step


def _rows(name: str, times: dict[str, float]) -> Iterator[Row]:
    for rival, words in RIVALS.items():
        yield Row(f"{name}, {words}", 1e3 * times["ours"], 1e3 * times[rival], "ms per step")
