"""Environment variables that hold for a part of a program."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()  # the environment is of the process, not of the thread


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the body, and restore it after that.

    One thread at a time is in such a body.
    """
    with _LOCK:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
