"""A lock of a cache folder that several processes add files to: curves, prices of groups."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked_folder(folder: Path) -> Generator[None, None, None]:
    """Make `folder` and hold a lock of it while the body runs.

    Where the file system has no locks, two simultaneous writers may lose one's results, which are
    then computed again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
