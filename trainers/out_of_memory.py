"""Out of memory: how it is recognised, and what is freed before another try."""

from __future__ import annotations

import gc

import torch

SIGNS = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch, CUDA or its libraries ran out of memory.

    They do not all say so by the type.
    """
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)


def free_memory() -> None:
    """Free the memory of a failed attempt. Its exception must be gone: it refers to the tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
