"""Storage at an address (`s3://bucket/path`, `gs://...`): a working folder, and a copy of it that is kept up to date.

Trials, workers and stock tools read and write files, and sqlite and memory-mapped tensors are files, so a search works
in a folder: below HEADFOLD_HOME, which every node sees. What has changed there goes to the address every minute and at
the end. A working folder that is empty (a new head, a new machine) is filled from the address first.
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

SECRET_SETTINGS = ("access_key", "secret_key", "session_token", "token", "password")
PROBE = ".headfold-probe"
BULK = ("trials", "train", "promoted", "data", "calibration", "cache", "mlartifacts", "tune")
"""Folders whose files the records of a search refer to: they go first, so that no record comes before what it names."""

OF_WORKERS = re.compile(rf"(^|/)train/[^/]+/(checkpoint_\d+/|{re.escape(CHECKPOINT_INDEX)}$)")
"""What workers write to an address, and read from there, themselves: training checkpoints."""


def is_remote(storage: str) -> bool:
    """Whether a `storage` setting is an address, and not a folder of this machine."""
    address = urlparse(storage)
    return len(address.scheme) > 1 and address.scheme != "file"


def working_folder(storage: str, home: Path) -> Path:
    """Where the files of an address lie while a search runs: the same folder for the same address."""
    address = urlparse(storage)
    place = f"{address.netloc}{address.path}".rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{address.scheme}-{place}").strip("-.")[:60]
    return home / f"{readable}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def check_address(storage: str) -> None:
    """Raises ConfigError for an address that holds a secret; the message does not repeat it."""
    from fsspec.registry import known_implementations

    address = urlparse(storage)
    shown = f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"
    if "@" in address.netloc or set(parse_qs(address.query)) & set(SECRET_SETTINGS):
        raise ConfigError(
            f"storage: the address of {shown} holds credentials, which would end up in records; give them to the "
            "environment instead (for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role of the machine)"
        )
    if address.scheme not in (*NATIVE, *known_implementations):
        raise ConfigError(
            f"storage: got {shown!r}; {address.scheme}:// is no known kind of address: give a folder that every node "
            "sees, or s3://bucket/path, gs://bucket/path"
        )
    if not address.netloc:
        raise ConfigError(f"storage: got {shown!r}; an address must name a bucket, e.g. s3://bucket/headfold")


def without_query(storage: str) -> str:
    return storage.partition("?")[0]


def open_address(storage: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it. Raises ConfigError for a kind that nothing here serves."""
    check_address(storage)
    scheme = urlparse(storage).scheme
    try:
        return open_location(storage)
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        if scheme in NATIVE:
            raise ConfigError(f"storage: cannot use {without_query(storage)}: {reason(error)}") from None
        raise ConfigError(f"storage: cannot use {scheme}:// here: {error}; s3:// and gs:// need nothing more") from None


@dataclass
class Mirror:
    """A working folder (`local`) and its copy at `root` of `filesystem`; `known`: what lies there, by our own doing."""

    filesystem: Any
    root: str
    local: Path
    known: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, storage: str, local: Path) -> Mirror:
        """Open an address and write there once. Raises ConfigError if it cannot be read or written."""
        filesystem, root = open_address(storage)
        made = cls(filesystem, root.rstrip("/"), local)
        try:
            made._write(PROBE, b"")
            filesystem.delete_file(made._at(PROBE))
        except Exception as error:  # each file system raises its own kinds
            raise ConfigError(f"storage: cannot write to {without_query(storage)}: {reason(error)}") from None
        return made

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _open(self, name: str) -> Any:
        """A stream to a file at the address. Object stores have no folders to be made."""
        if self.filesystem.type_name not in ("s3", "gcs"):
            self.filesystem.create_dir(str(PurePosixPath(self._at(name)).parent), recursive=True)
        return self.filesystem.open_output_stream(self._at(name))

    def _write(self, name: str, content: bytes) -> None:
        with self._open(name) as stream:
            stream.write(content)

    def names(self) -> list[str]:
        """The files that lie at the address."""
        from pyarrow import fs

        selector = fs.FileSelector(self.root, recursive=True, allow_not_found=True)
        paths = [i.path for i in self.filesystem.get_file_info(selector) if i.type == fs.FileType.File]
        return sorted(str(PurePosixPath(path).relative_to(self.root)) for path in paths)

    def pull(self) -> int:
        """Fetch what the working folder does not have. Returns how many files came."""
        came = 0
        for name in self.names():
            target = self.local / name
            if ".." in PurePosixPath(name).parts or OF_WORKERS.search(name) or target.exists():
                continue
            stream = self.filesystem.open_input_stream(self._at(name))
            with stream as source, written_whole(target) as fresh, fresh.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 22)
            came += 1
        return came

    def push(self) -> int:
        """Send what has changed, files before the records that name them, then drop what is gone. Files sent.

        Records are read before anything is sent: a record at the address never names what came to be after it.
        """
        before = self._files()
        records = {name: self._read(name) for name in before if not _is_bulk(name) and self._changed(name, before)}
        files = self._files()
        sent = sum(self._send(name, files[name]) for name in files if _is_bulk(name) and self._changed(name, files))
        for name, content in records.items():
            if content is not None:
                self._write(name, content)
                self.known[name] = before[name]
                sent += 1
        for name in [name for name in self.known if name not in files]:
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.delete_file(self._at(name))
            del self.known[name]
        return sent

    def _changed(self, name: str, files: dict[str, tuple[int, int]]) -> bool:
        return self.known.get(name) != files[name]

    def _files(self) -> dict[str, tuple[int, int]]:
        """Size and time of each file. Hidden ones are half-written, locks, or ours; links are made anew; what workers
        send themselves is theirs."""
        stamps = {}
        for folder, folders, names in os.walk(self.local):
            folders[:] = [f for f in folders if not f.startswith(".")]
            for name in names:
                path = Path(folder) / name
                if name.startswith(".") or name.endswith((".lock", "-wal", "-shm", "-journal")) or path.is_symlink():
                    continue
                if OF_WORKERS.search(path.relative_to(self.local).as_posix()):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    stat, log = path.stat(), path.with_name(f"{name}-wal")
                    newest = max(stat.st_mtime_ns, log.stat().st_mtime_ns if log.exists() else 0)  # sqlite's
                    stamps[path.relative_to(self.local).as_posix()] = (stat.st_size, newest)
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

    def _send(self, name: str, stamp: tuple[int, int]) -> bool:
        """Send one file; one that is written to meanwhile is sent again the next time."""
        path = self.local / name
        try:
            with path.open("rb") as source, self._open(name) as out:
                shutil.copyfileobj(source, out, 1 << 22)
            stat = path.stat()
        except FileNotFoundError:
            return False  # a checkpoint that was dropped for a newer one
        if (stat.st_size, stat.st_mtime_ns) == stamp:
            self.known[name] = stamp
        return True


def _is_bulk(name: str) -> bool:
    """Whether a file lies in one of the bulk folders, of the storage or of a search."""
    return any(part in BULK for part in PurePosixPath(name).parts[:-1][:2])


@contextlib.contextmanager
def mirrored(storage: str, local: Path, seconds: float | None = None) -> Iterator[Mirror | None]:
    """Keep the address of a `storage` setting up to date with its working folder; nothing to do for a folder.

    An address that is away for a while is told once and tried again; the files are in the working folder all the while.
    """
    if not is_remote(storage):
        yield None
        return
    mirror, shown = Mirror.of(storage, local), without_query(storage)
    if came := mirror.pull():
        print(f"storage  {came} file(s) fetched from {shown} to {local}", flush=True)
        print(
            "         training checkpoints there are pickles: go on only if you trust who writes to that address",
            flush=True,
        )
    over, failed = threading.Event(), False
    period = float(os.environ.get("HEADFOLD_SYNC_SECONDS", 60)) if seconds is None else seconds

    def push() -> None:
        nonlocal failed
        try:
            mirror.push()
            failed = False
        except Exception as error:  # each file system raises its own kinds
            if not failed:
                logger.warning("storage: cannot send to %s: %s; the files are in %s", shown, reason(error), local)
            failed = True

    def keep() -> None:
        while not over.wait(period):
            push()

    thread = threading.Thread(target=keep, name="headfold-mirror", daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        over.set()
        thread.join()
        failed = False
        push()
        if not failed:
            print(f"storage  {shown} (working folder {local})", flush=True)
