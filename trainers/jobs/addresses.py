"""Storage addresses (`s3://bucket/path`, what fsspec knows) and folders, opened as file systems."""

from __future__ import annotations

import os
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

NATIVE = ("s3", "gs", "gcs", "hdfs", "abfs", "abfss", "file")
"""File systems that pyarrow supports itself; other kinds need their own fsspec package."""

CHECKPOINT_INDEX = "checkpoints.json"
"""The index of a run's training checkpoints, see `trainers.jobs.checkpoints`."""


def below(address: str, path: str) -> str:
    """Return the address of `path` below another one, without the query of that one."""
    base, mark, query = address.partition("?")
    return f"{base.rstrip('/')}/{path}{mark}{query}"


@lru_cache(maxsize=64)
def open_location(location: str) -> tuple[Any, str]:
    """Return the file system of an address or of an absolute folder, and the path in it.

    The file system is pyarrow's.
    """
    from pyarrow import fs

    scheme = urlparse(location).scheme
    if Path(location).is_absolute():
        return fs.LocalFileSystem(), location
    if scheme in NATIVE:
        return fs.FileSystem.from_uri(location)
    from fsspec.core import url_to_fs

    filesystem, path = url_to_fs(location)
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), path


def copy_folder(source: Path, filesystem: Any, target: str) -> None:
    """Copy all files of a folder to a path of a file system, several at a time."""
    from pyarrow import fs

    if filesystem.type_name not in ("s3", "gcs"):  # object stores have no folders to be made
        filesystem.create_dir(target, recursive=True)
    fs.copy_files(str(source), target, fs.LocalFileSystem(), filesystem, chunk_size=1 << 22)


def fetch(filesystem: Any, path: str, target: Path) -> None:
    """Copy one file of a file system here."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with filesystem.open_input_stream(path) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 22)


def private(folder: Path) -> None:
    """Make a folder of this user's alone.

    Raises:
        PermissionError: For one of somebody else's: pickles are read there.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{folder} belongs to another user; remove it, or set TMPDIR to one of your folders"
        )


def folders(filesystem: Any, path: str) -> list[str]:
    """Return the folders in a folder; none if it is not there."""
    from pyarrow import fs

    infos = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return [info.path for info in infos if info.type == fs.FileType.Directory]
