"""Storage at an address (`s3://bucket/path`, `gs://...`): a working folder and its copy there.

Trials, workers and stock tools read and write files, and sqlite and memory-mapped tensors are
files, so a search works in a folder: below HEADFOLD_HOME, which every node sees. What has changed
there goes to the address every minute and at the end. A working folder that is empty (a new head, a
new machine) is filled from the address first.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, urlparse

from attention.base.messages import reason
from attention.io.files import written_whole
from orchestrator.config.schema import ConfigError
from orchestrator.storage.databases import back_up
from trainers.jobs.addresses import CHECKPOINT_INDEX, NATIVE, open_location

logger = logging.getLogger(__name__)

_SECRET_SETTINGS = ("access_key", "secret_key", "session_token", "token", "password")
_PROBE = ".headfold-probe"
_BULK_FOLDERS = (
    "trials",
    "train",
    "promoted",
    "data",
    "calibration",
    "cache",
    "mlartifacts",
    "tune",
)
"""Folders of files that the records of a search name: they go first, before these records."""

_TRAINING_CHECKPOINTS = re.compile(
    rf"(^|/)train/[^/]+/(checkpoint_\d+/|{re.escape(CHECKPOINT_INDEX)}$)"
)
"""Paths that workers write to an address, and read from there, themselves."""

_FileStamp = tuple[int, int]
"""Size in bytes, and time of the last change in nanoseconds."""


def is_remote(storage: str) -> bool:
    """Return whether a `storage` setting is an address, and not a folder of this machine."""
    address = urlparse(storage)
    return len(address.scheme) > 1 and address.scheme != "file"


def working_folder(storage: str, home: Path) -> Path:
    """Return the folder in which a search with this address works, always the same one."""
    address = urlparse(storage)
    path = f"{address.netloc}{address.path}".rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{address.scheme}-{path}").strip("-.")[:60]
    return home / f"{readable}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def check_address(storage: str) -> None:
    """Check an address.

    Raises:
        ConfigError: If it contains a secret, which the message does not repeat, names no bucket, or
            is of an unknown kind.
    """
    from fsspec.registry import known_implementations

    address = urlparse(storage)
    shown = f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"
    if "@" in address.netloc or set(parse_qs(address.query)) & set(_SECRET_SETTINGS):
        raise ConfigError(
            f"storage: the address of {shown} holds credentials, which would end up in records; "
            "give them to the environment instead (for S3 AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or a role of the machine)"
        )
    if address.scheme not in (*NATIVE, *known_implementations):
        raise ConfigError(
            f"storage: got {shown!r}; {address.scheme}:// is no known kind of address: give a "
            "folder that every node sees, or s3://bucket/path, gs://bucket/path"
        )
    if not address.netloc:
        raise ConfigError(
            f"storage: got {shown!r}; an address must name a bucket, e.g. s3://bucket/headfold"
        )


def _without_query(storage: str) -> str:
    return storage.partition("?")[0]


def open_address(storage: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it.

    Raises:
        ConfigError: If it cannot be opened.
    """
    check_address(storage)
    scheme = urlparse(storage).scheme
    try:
        return open_location(storage)
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        if scheme in NATIVE:
            address = _without_query(storage)
            raise ConfigError(f"storage: cannot use {address}: {reason(error)}") from None
        raise ConfigError(
            f"storage: cannot use {scheme}:// here: {error}; s3:// and gs:// need nothing more"
        ) from None


@dataclass
class Mirror:
    """A working folder (`local`) and its copy at `root` of `filesystem`.

    Attributes:
        sent: The stamp of each file when it was sent, by its path in the working folder.
    """

    filesystem: Any
    root: str
    local: Path
    sent: dict[str, _FileStamp] = field(default_factory=dict)

    @classmethod
    def of(cls, storage: str, local: Path) -> Mirror:
        """Open an address and write there once.

        Raises:
            ConfigError: If it cannot be read or written.
        """
        filesystem, root = open_address(storage)
        mirror = cls(filesystem, root.rstrip("/"), local)
        try:
            mirror._write(_PROBE, b"")
            filesystem.delete_file(mirror._path(_PROBE))
        except Exception as error:  # each file system raises its own kinds
            address = _without_query(storage)
            raise ConfigError(f"storage: cannot write to {address}: {reason(error)}") from None
        return mirror

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _open(self, name: str) -> Any:
        """Return a stream to a file at the address; object stores need no folders."""
        if self.filesystem.type_name not in ("s3", "gcs"):
            folder = PurePosixPath(self._path(name)).parent
            self.filesystem.create_dir(str(folder), recursive=True)
        return self.filesystem.open_output_stream(self._path(name))

    def _write(self, name: str, content: bytes) -> None:
        with self._open(name) as stream:
            stream.write(content)

    def names(self) -> list[str]:
        """Return the files at the address."""
        from pyarrow import fs

        selector = fs.FileSelector(self.root, recursive=True, allow_not_found=True)
        return sorted(
            str(PurePosixPath(info.path).relative_to(self.root))
            for info in self.filesystem.get_file_info(selector)
            if info.type == fs.FileType.File
        )

    def pull(self) -> int:
        """Fetch what the working folder does not have; return the number of files."""
        count = 0
        for name in self.names():
            target = self.local / name
            outside = ".." in PurePosixPath(name).parts
            if outside or _TRAINING_CHECKPOINTS.search(name) or target.exists():
                continue
            stream = self.filesystem.open_input_stream(self._path(name))
            with stream as source, written_whole(target) as fresh, fresh.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 22)
            count += 1
        return count

    def push(self) -> int:
        """Send what has changed, and remove what is gone; return the number of files sent.

        Files go before the records that name them. Records are read before anything is sent: one at
        the address never names a file that was written after it.
        """
        before = self._files()
        records = {name: self._read(name) for name in self._changed(before) if not _is_bulk(name)}
        files = self._files()
        count = sum(
            self._send(name, files[name]) for name in self._changed(files) if _is_bulk(name)
        )
        for name, content in records.items():
            if content is not None:
                self._write(name, content)
                self.sent[name] = before[name]
                count += 1
        for name in [name for name in self.sent if name not in files]:
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.delete_file(self._path(name))
            del self.sent[name]
        return count

    def _changed(self, files: dict[str, _FileStamp]) -> list[str]:
        return [name for name, stamp in files.items() if self.sent.get(name) != stamp]

    def _files(self) -> dict[str, _FileStamp]:
        """Return the stamp of each file to send.

        Hidden ones are half-written, locks, or ours; links are made anew; what workers send
        themselves is theirs.
        """
        stamps: dict[str, _FileStamp] = {}
        for folder, folders, names in os.walk(self.local):
            folders[:] = [f for f in folders if not f.startswith(".")]
            for name in names:
                path = Path(folder) / name
                relative = path.relative_to(self.local).as_posix()
                if name.startswith(".") or name.endswith((".lock", "-wal", "-shm", "-journal")):
                    continue
                if path.is_symlink() or _TRAINING_CHECKPOINTS.search(relative):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    newest = stat.st_mtime_ns
                    log = path.with_name(f"{name}-wal")  # sqlite's
                    if log.exists():
                        newest = max(newest, log.stat().st_mtime_ns)
                    stamps[relative] = (stat.st_size, newest)
        return stamps

    def _read(self, name: str) -> bytes | None:
        path = self.local / name
        try:
            if path.suffix != ".db":
                return path.read_bytes()
            with tempfile.TemporaryDirectory() as folder:  # a database in use: its copy, whole
                copy = Path(folder) / path.name
                back_up(path, copy, Path(folder))
                return copy.read_bytes()
        except (FileNotFoundError, sqlite3.Error):
            return None

    def _send(self, name: str, stamp: _FileStamp) -> bool:
        """Send one file; one that is written to meanwhile is sent again the next time."""
        path = self.local / name
        try:
            with path.open("rb") as source, self._open(name) as out:
                shutil.copyfileobj(source, out, 1 << 22)
            stat = path.stat()
        except FileNotFoundError:
            return False  # a checkpoint that was dropped for a newer one
        if (stat.st_size, stat.st_mtime_ns) == stamp:
            self.sent[name] = stamp
        return True


def _is_bulk(name: str) -> bool:
    """Return whether a file lies in one of the bulk folders, of the storage or of a search."""
    return any(part in _BULK_FOLDERS for part in PurePosixPath(name).parts[:-1][:2])


@contextlib.contextmanager
def mirrored(storage: str, local: Path, seconds: float | None = None) -> Iterator[Mirror | None]:
    """Keep the address of a `storage` setting up to date with its working folder.

    For a folder there is nothing to do. An address that is away for a while is reported once and
    tried again; the files are in the working folder all the while.
    """
    if not is_remote(storage):
        yield None
        return
    mirror = Mirror.of(storage, local)
    address = _without_query(storage)
    if count := mirror.pull():
        print(f"storage  {count} file(s) fetched from {address} to {local}", flush=True)
        print(
            "         training checkpoints there are pickles: go on only if you trust who writes "
            "to that address",
            flush=True,
        )
    ended = threading.Event()
    failed = False
    if seconds is None:
        seconds = float(os.environ.get("HEADFOLD_SYNC_SECONDS", 60))

    def push() -> None:
        nonlocal failed
        try:
            mirror.push()
            failed = False
        except Exception as error:  # each file system raises its own kinds
            if not failed:
                logger.warning(
                    "storage: cannot send to %s: %s; the files are in %s",
                    address,
                    reason(error),
                    local,
                )
            failed = True

    def push_repeatedly() -> None:
        while not ended.wait(seconds):
            push()

    thread = threading.Thread(target=push_repeatedly, name="headfold-mirror", daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        ended.set()
        thread.join()
        failed = False
        push()
        if not failed:
            print(f"storage  {address} (working folder {local})", flush=True)
