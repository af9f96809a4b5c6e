"""Files that are written in one step, the SHA-256 of what is in them, and their permissions."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Yield an empty file next to `path` that replaces `path` when the body has ended.

    A reader, a kill in the middle or a full disk never leaves half of it: what a kill leaves is
    `.NAME.PID.new`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = _create_temporary(path)
    try:
        yield fresh
        honour_umask(fresh)
        with fresh.open("rb") as stream:
            os.fsync(stream.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file in one step (see `written_whole`), text as UTF-8."""
    with written_whole(path) as fresh:
        fresh.write_bytes(content.encode() if isinstance(content, str) else content)


def names_beside(path: Path) -> Iterator[Path]:
    """Names for what is being written and will be `path`."""
    return (
        path.with_name(f".{path.name}.{os.getpid()}{'' if n == 0 else f'-{n}'}.new")
        for n in range(10_000)
    )


def _create_temporary(path: Path) -> Path:
    for fresh in names_beside(path):
        try:
            fresh.touch(exist_ok=False)
        except FileExistsError:
            continue  # another thread's, or of a killed process that had this number
        return fresh
    raise FileExistsError(
        f"too many unfinished files next to {str(path)!r}; remove {path.parent}/.{path.name}.*.new"
    )


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, as 64 hexadecimal digits."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def honour_umask(path: str | Path) -> None:
    """Give a file, or a folder and all in it, the permissions of a plain `open` and `mkdir`."""
    path = Path(path)
    mask = _umask()
    for one in (path, *(path.rglob("*") if path.is_dir() else ())):
        if not one.is_symlink():
            one.chmod((0o777 if one.is_dir() else 0o666) & ~mask)


def _umask() -> int:
    """Return the umask without setting it, where the system reports it.

    A changed umask holds for all threads, if only for a moment.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
    except (OSError, StopIteration):
        mask = os.umask(0o077)
        os.umask(mask)
        return mask
