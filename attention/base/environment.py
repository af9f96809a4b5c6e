"""Environment variables that hold for a part of a program."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

# By variable, since the environment is of the process: a request to a server that sets one does not
# hold up work that sets another.
_LOCKS: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the body, and restore it after that.

    One thread at a time is in such a body of the same variable.
    """
    with _LOCKS[name]:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
