"""Out of memory: how it is recognised, and what is freed before another try."""

from __future__ import annotations

import torch

from attention.base.memory import release_memory

SIGNS = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch, CUDA or its libraries ran out of memory.

    They do not all say so by the type.
    """
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)


def free_memory() -> None:
    """Free what is in reference cycles, such as closed engines of DeepSpeed.

    The exception of a failed attempt must be gone: it refers to the tensors.
    """
    release_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
