"""A short lock between processes that share a folder, for the time of one operation."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock on a file, which is created and stays.

    The kernel releases it when its holder dies. Where the file system has no locks there is none.

    Args:
        path: The file.
        wait: Whether to wait for another holder, as long as it takes.

    Yields:
        False if another process has the lock, and this one does not wait for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        locked = True
        try:
            fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = False
        except OSError:
            pass  # the file system has no locks
        yield locked
