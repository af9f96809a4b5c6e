"""Files of a cache folder that several processes add to: measured curves, prices of groups."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attention.io.permissions import honour_umask


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make `folder` and wait until no other process adds to its files. Where the file system has no locks, two that
    write at one moment may lose what one has written, which is then worked out again."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_whole(file: Path, content: bytes) -> None:
    """Write a file in one step: whoever reads it sees the old content or the new."""
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
    honour_umask(name)
    Path(name).replace(file)
