"""Permissions of what is written: those that the umask allows, whatever a library has given its temporary files."""

from __future__ import annotations

import os
from pathlib import Path


def honour_umask(path: str | Path) -> None:
    """Give a file, or a folder and all in it, the permissions that a plain `open` and `mkdir` would have given."""
    path, mask = Path(path), _umask()
    for one in (path, *(path.rglob("*") if path.is_dir() else ())):
        if not one.is_symlink():
            one.chmod((0o777 if one.is_dir() else 0o666) & ~mask)


def _umask() -> int:
    """Read and not set where the system tells it: a changed umask holds for all threads, if only for a moment."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
    except (OSError, StopIteration):
        mask = os.umask(0o077)
        os.umask(mask)
        return mask
