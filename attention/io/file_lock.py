"""A short lock between processes that share a folder, for the time of one operation."""

from __future__ import annotations

import contextlib
import fcntl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_PATIENCE = 10.0  # seconds, until a wait is reported


@contextlib.contextmanager
def file_lock(path: Path, *, wait: bool = True, note: str = "") -> Iterator[bool]:
    """Hold a lock on a file, which is created and stays.

    The kernel releases it when its holder dies. Where the file system has no locks there is none.

    Args:
        path: The file.
        wait: Whether to wait for another holder, as long as it takes.
        note: Printed once if that takes more than some seconds.

    Yields:
        False if another process has the lock, and this one does not wait for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        locked = True
        try:
            if wait:
                _wait_for(stream, note)
            else:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = False
        except OSError:
            pass  # the file system has no locks
        yield locked


def _wait_for(stream: IO[str], note: str) -> None:
    end = time.monotonic() + _PATIENCE
    while note and time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.05)
    if note:
        print(note, file=sys.stderr, flush=True)
    fcntl.flock(stream, fcntl.LOCK_EX)
