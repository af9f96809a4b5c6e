"""Keys and values as they come back from the cache of an engine (`attention.cache_formats`).

llama.cpp's block formats are computed as its reference quantisation does (`ggml-quants.c`), with
the orthonormal Hadamard transform before it that llama.cpp applies since April 2026 to heads of a
multiple of 64 numbers, and its products of such keys take queries that are rounded too; vLLM's fp8
is e4m3 with saturation, under a scale of each layer.

Legend: d width of a head, n numbers of a block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.cache_formats import CacheFormat, CacheFormatError, CachePair
from attention.families import family_of
from attention.modeling.growing_cache import cache_keyword

ROTATED_MULTIPLE = 64
"""llama.cpp transforms heads whose width is a multiple of this, and values in parts of it."""
FP8_MOST = 448.0  # the largest number of e4m3

# ---- blocks of ggml -----------------------------------------------------------------------------


def _half(x: Tensor) -> Tensor:
    return x.half().float()


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, and 0 for a block of zeros."""
    return torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)


def _round_q8_0(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    exact = blocks * _inverse(scale)
    # roundf: halves away from zero, where torch.round takes the even neighbour
    whole = exact.abs().floor()
    whole = whole + (2 * (exact.abs() - whole)).floor()
    return whole * exact.sign() * _half(scale)


def _round_q5_1(blocks: Tensor) -> Tensor:
    least = blocks.amin(-1, keepdim=True)
    scale = (blocks.amax(-1, keepdim=True) - least) / 31
    steps = ((blocks - least) * _inverse(scale) + 0.5).trunc().clamp_max(31)
    return steps * _half(scale) + _half(least)


def _round_q4_0(blocks: Tensor) -> Tensor:
    # The first of the largest magnitude, with its sign, is -8 steps
    index = blocks.abs().argmax(-1, keepdim=True)
    scale = blocks.gather(-1, index) / -8
    steps = (blocks * _inverse(scale) + 8.5).trunc().clamp(0, 15) - 8
    return steps * _half(scale)


def _round_fp8(x: Tensor, scale: float) -> Tensor:
    bounded = (x / scale).clamp(-FP8_MOST, FP8_MOST)
    return bounded.to(torch.float8_e4m3fn).float() * scale


_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "q8_0": _round_q8_0,
    "q5_1": _round_q5_1,
    "q4_0": _round_q4_0,
}
_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


def round_numbers(x: Tensor, cache_format: CacheFormat, scale: float = 1.0) -> Tensor:
    """Return `[..., d]` as it is read back from a cache of this format, in the dtype of `x`.

    Args:
        scale: Of fp8: what numbers are divided by before they are rounded.

    Raises:
        CacheFormatError: For a width that is no whole number of blocks.
    """
    cache_format.head_bytes(x.shape[-1])
    name = cache_format.name
    if name in _DTYPES:
        return x.to(_DTYPES[name]).to(x.dtype)
    if name == "fp8":
        return _round_fp8(x.float(), scale).to(x.dtype)
    blocks = x.float().unflatten(-1, (-1, cache_format.block))
    return _BLOCKS[name](blocks).flatten(-2).to(x.dtype)


# ---- Hadamard -----------------------------------------------------------------------------------


def hadamard(size: int) -> Tensor:
    """Return the orthonormal, symmetric Hadamard matrix of a power of two, `[size, size]`."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"size must be a power of two, got {size}")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)],
        )
    return matrix / size**0.5


def rotation_size(cache_format: CacheFormat, width: int, side: str) -> int:
    """Return the size of the Hadamard transform that llama.cpp applies before it rounds.

    1 where it applies none: to formats without blocks, and to heads whose width is no multiple of
    64.

    Args:
        side: "key" or "value".
    """
    if cache_format.block == 1 or width % ROTATED_MULTIPLE:
        return 1
    # Of keys the largest power of two that divides the width
    return width & -width if side == "key" else ROTATED_MULTIPLE


def round_head(
    x: Tensor,
    cache_format: CacheFormat,
    side: str,
    *,
    scale: float = 1.0,
    order: Sequence[int] | None = None,
) -> Tensor:
    """Return heads `[..., d]` as the engine's attention reads them.

    Rounded as `round_numbers` does, in the basis in which the engine holds them.

    Args:
        side: "key", also of queries, or "value".
        scale: Of fp8.
        order: The dims of `x` in the order in which the engine has them; None for the same.
    """
    if cache_format.block == 1:
        return round_numbers(x, cache_format, scale)
    there = x.float() if order is None else x.float()[..., list(order)]
    size = rotation_size(cache_format, x.shape[-1], side)
    if size == 1:
        there = round_numbers(there, cache_format)
    else:
        matrix = hadamard(size).to(x.device)
        # As one product: of heads whose tokens are apart in memory, as queries are, torch would
        # first copy the matrix for each token
        turned = there.reshape(-1, size) @ matrix
        rounded = round_numbers(turned.view(there.shape), cache_format)
        there = (rounded.reshape(-1, size) @ matrix).view(there.shape)
    if order is not None:
        back = torch.empty_like(there)
        back[..., list(order)] = there
        there = back
    return there.to(x.dtype)


# ---- models -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scales:
    """The divisors of a layer's keys and values in fp8."""

    keys: float = 1.0
    values: float = 1.0


class RoundingCache:
    """A cache that rounds keys and values before it holds them.

    Without a cache beneath it returns them rounded, as a prefill reads them.
    """

    def __init__(
        self, cache: Any, pair: CachePair, scales: Scales, order: Sequence[int] | None
    ) -> None:
        self._cache = cache
        self._pair = pair
        self._scales = scales
        self._order = order

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Round `[B, G^K, T, d]` and `[B, G^V, T, d]`; return what the cache returns of them."""
        keys = round_head(
            key_states, self._pair.keys, "key", scale=self._scales.keys, order=self._order
        )
        values = round_head(value_states, self._pair.values, "value", scale=self._scales.values)
        if self._cache is None:
            return keys, values
        return self._cache.update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@contextmanager
def rounded_cache(
    model: PreTrainedModel,
    pair: CachePair | None,
    *,
    scales: Sequence[Scales] | None = None,
    key_order: Sequence[int] | None = None,
) -> Iterator[None]:
    """Let a model, stock or converted, read keys and values as `pair` holds them.

    Within, whole sequences and decoding see the same numbers. None changes nothing.

    Args:
        model: The model.
        pair: The formats of keys and values.
        scales: For fp8, one entry per converted layer; 1 by default and in other layers, as vLLM
            uses where a checkpoint has none.
        key_order: The dims of queries and keys in the order in which the engine has them; None for
            the same.

    Raises:
        CacheFormatError: For a model whose attention takes no cache of transformers.
    """
    if pair is None:
        yield
        return
    handles: list[Any] = []
    family = family_of(model.config)
    modules = [*family.attention_modules(model), *family.other_attention_modules(model)]
    scales = [*(scales or ()), *[Scales()] * len(modules)]
    before = str(model.config._attn_implementation)
    try:
        for module, scale in zip(modules, scales, strict=False):
            hook = _hook(module, pair, scale, key_order)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if pair.queries is not None:
            model.config._attn_implementation = _rounding_queries(before, pair.queries, key_order)
        yield
    finally:
        model.config._attn_implementation = before
        for handle in handles:
            handle.remove()


def _hook(
    module: nn.Module, pair: CachePair, scales: Scales, order: Sequence[int] | None
) -> Callable[..., Any]:
    name = cache_keyword(module)
    if name is None:
        raise CacheFormatError(
            f"{type(module).__name__} takes no cache, so its keys and values cannot be rounded"
        )

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {name: RoundingCache(kwargs.get(name), pair, scales, order)}

    return before


def _rounding_queries(
    implementation: str, query_format: CacheFormat, order: Sequence[int] | None
) -> str:
    """Return the name of an attention function that rounds queries before another.

    It is registered with transformers, with that one's mask.
    """

    def attention(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        compute: Any = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)  # type: ignore[arg-type]
        rounded = round_head(query, query_format, "key", order=order)
        return compute(module, rounded, *args, **kwargs)

    name = f"{implementation}_of_{query_format.name}_queries"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name
