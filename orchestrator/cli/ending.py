"""The end of the process: once all is done, Python need not take its million objects apart, which lasts a second."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_code: list[int] = []


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Where what is within ends the process (SystemExit), it is over as soon as threads, the handlers of `atexit` that
    were registered within, and the streams have ended. With any other exception Python ends as always."""
    atexit.register(_end)  # the first to be registered is the last to be called
    try:
        yield
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _code.append(end.code or 0)
        raise


def _end() -> None:
    if not _code:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody listens any more; Python says so in its own way
        return
    os._exit(_code[0])
