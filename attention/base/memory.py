"""Memory of this process.

Measures the resident memory, and runs cheap, frequent collections of reference cycles.

A full collection looks at every object of the process. After the imports of torch, transformers and
DeepSpeed those are more than a million, none of them garbage (models under hooks and DeepSpeed's
engines are), and a look at all takes some 0.4 s: more than a step of a small model.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
from pathlib import Path

_USUAL = gc.get_threshold()
SELDOM = 50_000
"""New objects between two collections while libraries are imported: with Python's 700 these
collections take a tenth of the time of all imports."""

_settled = False


def collect_seldom() -> None:
    """Raise the threshold of garbage collection during imports, until `freeze_garbage`."""
    gc.set_threshold(SELDOM, *_USUAL[1:])


def freeze_garbage() -> None:
    """Exempt the objects that are alive now from all later garbage collections.

    Call it after the imports and before models are built. Only the first call in a process has an
    effect.
    """
    global _settled
    if _settled:
        return
    _settled = True
    gc.freeze()
    gc.set_threshold(*_USUAL)
    atexit.register(gc.unfreeze)  # else libraries that look for leaks at the end find all of it


def kernel_field(file: str, name: str) -> int:
    """Return a field that the kernel gives in kB, e.g. of /proc/meminfo.

    Returns:
        Bytes; 0 on systems that have no such file.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def container_memory(root: str = "/") -> int | None:
    """Return the bytes that are free within the memory limits of this process's control groups.

    Files that the kernel caches count as free. Both versions of control groups are read, of the
    process's group and of those above it, as far as a container shows them.

    Args:
        root: Where `proc` and `sys` are.

    Returns:
        Bytes; None without a limit.
    """
    free: list[int] = []
    try:
        lines = Path(root, "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            folder, names = Path(root, "sys/fs/cgroup"), _VERSION_2
        elif "memory" in controllers.split(","):
            folder, names = Path(root, "sys/fs/cgroup/memory"), _VERSION_1
        else:
            continue
        path = folder / group.lstrip("/")
        for each in [path, *path.parents]:
            if each.is_relative_to(folder) and (left := _group_memory(each, *names)) is not None:
                free.append(left)
    return min(free, default=None)


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def _group_memory(group: Path, limit: str, used: str, cached: str) -> int | None:
    try:
        most, now = ((group / name).read_text(encoding="utf-8").strip() for name in (limit, used))
        statistics = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    if most == "max":
        return None
    files = next((int(line.split()[1]) for line in statistics if line.startswith(f"{cached} ")), 0)
    return max(0, int(most) - int(now) + files)


def memory_now() -> int:
    """Return the resident memory of this process in bytes."""
    return kernel_field("/proc/self/status", "VmRSS")


def memory_peak() -> int:
    """Return the largest resident memory that this process has had, in bytes."""
    return kernel_field("/proc/self/status", "VmHWM")


def release_memory() -> None:
    """Collect reference cycles, and return freed memory to the system where the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
