"""Matrix products in fewer bits: of float32 on the tensor cores of a GPU, of bfloat16 on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ACCELERATED = ("cuda",)
HALVES = (torch.bfloat16, torch.float16)
CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16")


def multiplies_bfloat16() -> bool:
    """Return whether the CPUs here multiply bfloat16 faster than float32 (AVX-512 BF16 or AMX)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in CPU_BFLOAT16)


@contextmanager
def tensor_cores(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Multiply float32 by TF32 within, on a GPU and for a model of 16 bits.

    TF32 has 11 significant bits, as many as float16 and three more than bfloat16: results of such a
    model enter the products unrounded, and sums stay in float32. A float32 model keeps float32
    products. The setting is global to the process and is restored afterwards.

    Args:
        device: Where the products are.
        dtype: Of the model whose layers are calibrated or fitted.
    """
    if device.type not in ACCELERATED or dtype not in HALVES:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
