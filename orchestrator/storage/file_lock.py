"""A short lock between processes that share a folder, for the time of one operation."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock on a file, which is created and stays; wait for it as long as it takes.

    The kernel releases it when its holder dies. Where the file system has no locks there is none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        with contextlib.suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
