"""Seconds of phases, and the memory of this process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path


class Phases(dict[str, float]):
    """Seconds of each named phase: `with phases("plan"): ...`."""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.perf_counter() - started


def kernel_field(file: str, name: str) -> int:
    """Bytes of a field that the kernel gives in kB, e.g. of /proc/meminfo; 0 on systems that have no such file."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def memory_now() -> int:
    """Resident memory of this process."""
    return kernel_field("/proc/self/status", "VmRSS")


def memory_peak() -> int:
    """The most that this process has had resident so far."""
    return kernel_field("/proc/self/status", "VmHWM")


def release_memory() -> None:
    """Free what only refers to itself, and hand freed memory back to the system where the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
