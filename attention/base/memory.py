"""Memory of this process: what it holds, and collecting what only refers to itself, often and cheaply.

A full collection looks at every object of the process. After the imports of torch, transformers and DeepSpeed those are
more than a million, none of them garbage (models under hooks and DeepSpeed's engines are), and a look at all takes some
0.4 s: more than a step of a small model.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
from pathlib import Path

_USUAL = gc.get_threshold()
SELDOM = 50_000
"""New objects between two collections while libraries are imported: with Python's 700 these collections take a tenth of
the time of all imports."""

_settled = False


def collect_seldom() -> None:
    """Until `freeze_garbage`: call it before the imports."""
    gc.set_threshold(SELDOM, *_USUAL[1:])


def freeze_garbage() -> None:
    """Leave what is alive now out of later collections, for ever: call it after the imports and before models are made.
    Only the first call in a process does something."""
    global _settled
    if _settled:
        return
    _settled = True
    gc.freeze()
    gc.set_threshold(*_USUAL)
    atexit.register(gc.unfreeze)  # else libraries that look for leaks at the end find all of it


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
