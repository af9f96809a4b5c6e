"""Matrix products of float32 by the fastest code of the device, and of bfloat16 on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

ACCELERATED = ("cuda",)
HALVES = (torch.bfloat16, torch.float16)
CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16")
# Relative to the largest entry; a product of factors in bfloat16 differs by 1e-3
_EXACT = 1e-5


def multiplies_bfloat16() -> bool:
    """Return whether the CPUs here multiply bfloat16 faster than float32 (AVX-512 BF16 or AMX)."""
    return any(_capabilities().get(name, False) for name in CPU_BFLOAT16)


@contextmanager
def tensor_cores(
    device: torch.device, dtype: torch.dtype, model: nn.Module | None = None
) -> Iterator[None]:
    """Multiply float32 by TF32 within, on a GPU and for a model of 16 bits; else `exact_products`.

    TF32 has 11 significant bits, as many as float16 and three more than bfloat16: results of such a
    model enter the products unrounded, and sums stay in float32. A float32 model keeps float32
    products. The setting is global to the process and is restored afterwards.

    Args:
        device: Where the products are.
        dtype: Of the model whose layers are calibrated or fitted.
        model: A model that runs within. Its rotary embeddings multiply positions by frequencies in
            float32: TF32 has no odd number above 2,048.
    """
    if device.type not in ACCELERATED or dtype not in HALVES:
        with exact_products():
            yield
        return
    handles = []
    for name, module in () if model is None else model.named_modules():
        if "rotary" in name.rpartition(".")[2]:
            handles += [
                module.register_forward_pre_hook(lambda *_: _set("highest")),
                module.register_forward_hook(lambda *_: _set("high"), always_call=True),
            ]
    try:
        with _precision("high"):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 by oneDNN within, where that is faster than MKL.

    Factors and sums stay in float32. The first product of each shape takes longer: it is for passes
    of the same length, not for tokens that are generated one by one. The setting is global to the
    process and is restored afterwards.
    """
    if not onednn_is_faster():
        yield
        return
    with _precision("medium"):
        yield


@cache
def onednn_is_faster() -> bool:
    """Return whether float32 products by oneDNN are faster than by MKL, and as exact.

    MKL takes code without AVX-512 on CPUs of AMD. torch leaves float32 products to oneDNN where the
    precision "medium" allows it fewer bits, of which it makes no use without AMX; a product checks
    that. That precision holds for GPUs too: where there is one it stays as it is.
    """
    capabilities = _capabilities()
    if (
        torch.cuda.is_available()
        or not str(capabilities.get("cpu_name", "")).startswith("AMD")
        or not capabilities.get("avx512_bf16", False)
    ):
        return False
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 256, 256, generator=generator)
    expected = one.double() @ other.double()
    with _precision("medium"):
        error = (one @ other - expected).abs().max() / expected.abs().max()
    return error.item() < _EXACT


def _capabilities() -> Mapping[str, Any]:
    """Return the processor's name and instructions; empty with an older torch."""
    read = getattr(torch.cpu, "get_capabilities", None)
    return {} if read is None else read()


@contextmanager
def _precision(name: str) -> Iterator[None]:
    """Set the precision of float32 products, and restore it."""
    before = torch.get_float32_matmul_precision()
    _set(name)
    try:
        yield
    finally:
        _set(before)


def _set(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
