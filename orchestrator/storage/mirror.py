"""Storage at an address (`s3://bucket/path`, `gs://...`): a working folder and its copy there.

Trials, workers and stock tools read and write files, and sqlite and memory-mapped tensors are
files, so a search works in a folder: below HEADFOLD_HOME, which every node sees. Changes there are
sent to the address every minute and at the end. A working folder that is empty (a new head, a new
machine) is filled from the address first, and an older one is updated; where both have changed
since they last agreed, the user must choose one of the two.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlparse

from attention.base.messages import reason
from orchestrator.config.schema import ConfigError
from orchestrator.storage.address_folder import (
    PROBE,
    TRANSFERS,
    without_query,
)
from orchestrator.storage.conditional import (
    WriteConflictError,
    conditional_objects,
    open_object,
    write_object,
)
from orchestrator.storage.fetched_folder import FetchedFolder
from orchestrator.storage.lease import AddressTakenError
from orchestrator.storage.manifest import (
    FileEntry,
    FileStamp,
    SyncSide,
    digest,
    is_bulk,
)
from trainers.jobs.addresses import NATIVE, open_location

logger = logging.getLogger(__name__)

_SECRET_WORDS = ("key", "secret", "token", "passw", "credential")
_CONTAINER_FIRST = ("abfs", "abfss")
_Result = TypeVar("_Result")
_COMMIT_SECONDS = 60.0


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
    # Azure's form is abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH
    user = address.netloc.rpartition("@")[0]
    with_user = bool(user) and (address.scheme not in _CONTAINER_FIRST or ":" in user)
    names = [name.lower() for name in parse_qs(address.query)]
    secret = any(name == "sig" or word in name for name in names for word in _SECRET_WORDS)
    if with_user or secret:
        raise ConfigError(
            f"storage: the address of {shown} contains credentials, which would be written "
            "into records; give them to the environment instead (for S3 AWS_ACCESS_KEY_ID and "
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
            address = without_query(storage)
            raise ConfigError(f"storage: cannot use {address}: {reason(error)}") from None
        raise ConfigError(
            f"storage: cannot use {scheme}:// here: {error}; s3:// and gs:// need nothing more"
        ) from None


class Mirror(FetchedFolder):
    """A working folder (`local`) whose copy at `root` of `filesystem` is kept up to date."""

    @classmethod
    def of(cls, storage: str, local: Path) -> Mirror:
        """Open an address and write there once.

        Raises:
            ConfigError: If it cannot be read or written.
        """
        filesystem, root = open_address(storage)
        mirror = cls(filesystem, root, local, address=storage)
        try:
            probe = mirror._path(f"{PROBE}-{uuid.uuid4().hex}")
            write_object(filesystem, probe, b"")
            filesystem.delete_file(probe)
        except Exception as error:  # each file system raises its own kinds
            raise ConfigError(
                f"storage: cannot write to {mirror.address}: {reason(error)}"
            ) from None
        mirror.objects = conditional_objects(filesystem, mirror.root, storage)
        return mirror

    def push(self) -> int:
        """Send what has changed, and remove what is gone; return the number of files sent.

        Files go before the records that name them. Records are read before anything is sent: one at
        the address never names a file that was written after it. A file whose content is at the
        address already is not sent.

        Raises:
            AddressTakenError: If another working folder has taken the address over.
        """
        self.check()
        with self._locked():
            return self._push()

    def _push(self) -> int:
        remote = self._open()
        before = self._files()
        records = {name: self._read(name) for name in self._changed(before) if not is_bulk(name)}
        files = self._files()
        bulk = [name for name in self._changed(files) if is_bulk(name)]
        removed = [name for name in self.synced if name not in files]
        if not records and not bulk and not removed:
            return 0
        if self.lease is not None:
            self.lease.verify()
        count = self._send_all(bulk, files)
        for name, content in records.items():
            if content is not None:
                count += self._send_record(name, content, before[name])
        for name in removed:
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.delete_file(self._path(name))
            remote["files"].pop(name, None)
            del self.synced[name]
        if count or removed:
            self._commit()
        else:
            self._save_state()  # touched, not changed
        return count

    def _changed(self, files: dict[str, FileStamp]) -> list[str]:
        return [
            name
            for name, stamp in files.items()
            if name not in self.synced or self.synced[name]["stamp"] != stamp
        ]

    def _send_all(self, names: Iterable[str], files: dict[str, FileStamp]) -> int:
        """Send large files, several at a time; the manifest follows them, minute by minute."""
        count = 0
        committed = time.monotonic()
        with ThreadPoolExecutor(TRANSFERS) as pool:
            running = [pool.submit(self._send, name, files[name]) for name in names]
            try:
                for done in as_completed(running):
                    count += done.result()
                    if time.monotonic() - committed > _COMMIT_SECONDS:
                        self._commit()
                        committed = time.monotonic()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return count

    def _send_record(self, name: str, content: bytes, stamp: FileStamp) -> bool:
        """Send a record, unless the address has it already; return whether it was sent."""
        remote = self._open()
        entry: FileEntry = {
            "size": len(content),
            "sha256": digest(content),
            "generation": remote["generation"] + 1,
        }
        remote_entry = remote["files"].get(name)
        if remote_entry is not None and remote_entry["sha256"] == entry["sha256"]:
            self.synced[name] = {**remote_entry, "stamp": stamp}
            return False
        path = self._path(name)
        if not self.objects.atomic:
            write_object(self.filesystem, path, content)
        else:
            try:
                entry["tag"] = self.objects.write(
                    path, content, remote_entry and remote_entry.get("tag")
                )
            except WriteConflictError:
                # A late write of a driver that was taken over, ours before a kill, or a file of
                # which no tag is known
                self._verify()
                stored = self.objects.read(path)
                entry["tag"] = self.objects.write(path, content, stored and stored.tag)
        remote["files"][name] = entry
        self.synced[name] = {**entry, "stamp": stamp}
        return True

    def _send(self, name: str, stamp: FileStamp) -> bool:
        """Send one file; one that is written to meanwhile is sent again the next time."""
        path = self.local / name
        entries = self._open_entries()
        remote_entry = entries.get(name)
        alike = (
            remote_entry is not None and remote_entry["sha256"] and remote_entry["size"] == stamp[0]
        )
        if remote_entry is not None and alike and self._digest(name) == remote_entry["sha256"]:
            self.synced[name] = {**remote_entry, "stamp": stamp}
            return False
        hashed = hashlib.sha256()
        size = 0
        try:
            with path.open("rb") as source, open_object(self.filesystem, self._path(name)) as out:
                while chunk := source.read(1 << 22):
                    hashed.update(chunk)
                    size += len(chunk)
                    out.write(chunk)
            stat = path.stat()
        except FileNotFoundError:
            return False  # a checkpoint that was dropped for a newer one
        generation = self.remote["generation"] + 1 if self.remote is not None else 0
        entry: FileEntry = {"size": size, "sha256": hashed.hexdigest(), "generation": generation}
        entries[name] = entry
        if (stat.st_size, stat.st_mtime_ns) == stamp:
            self.synced[name] = {**entry, "stamp": stamp}
        return True


def _repeatedly(
    action: Callable[[], None], seconds: float, ended: threading.Event, name: str
) -> threading.Thread:
    def repeat() -> None:
        while not ended.wait(seconds):
            action()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def mirrored(
    storage: str, local: Path, seconds: float | None = None, side: SyncSide | None = None
) -> Iterator[Mirror | None]:
    """Keep the address of a `storage` setting up to date with its working folder.

    For a folder there is nothing to do. An address that is unreachable for a while is reported once
    and tried again; meanwhile the files are in the working folder.

    Args:
        storage: The setting.
        local: The working folder.
        seconds: Between two looks for what has changed (None: HEADFOLD_SYNC_SECONDS).
        side: Which of the two counts where both have changed.

    Raises:
        ConfigError: If another working folder uses the address, or if both have changed.
    """
    if not is_remote(storage):
        yield None
        return
    if seconds is None:
        seconds = float(os.environ.get("HEADFOLD_SYNC_SECONDS", 60))
    beat_seconds = min(6.0, seconds)
    mirror = Mirror.of(storage, local)
    address = mirror.address
    _at_start(address, partial(mirror.claim, beat_seconds))
    all_ended = threading.Event()
    if urlparse(storage).scheme in ("s3", "gs", "gcs") and not mirror.objects.atomic:
        print(
            f"note: writes to {address} are not conditional; on S3 they are with boto3 "
            "(pip install '.[s3]' in a checkout), on Google Cloud with google-auth",
            flush=True,
        )
    beats = _repeatedly(partial(_beat, mirror), beat_seconds, all_ended, "headfold-holder")
    try:
        _fill(mirror, side)
        ended = threading.Event()
        failed = False

        def push() -> None:
            nonlocal failed
            try:
                mirror.push()
                failed = False
            except AddressTakenError as error:
                if not failed:
                    logger.error(str(error))
                failed = True
            except Exception as error:  # each file system raises its own kinds
                if not failed:
                    logger.warning(
                        "storage: cannot send to %s: %s; the files are in %s",
                        address,
                        reason(error),
                        local,
                    )
                failed = True

        pushes = _repeatedly(push, seconds, ended, "headfold-mirror")
        try:
            yield mirror
        finally:
            ended.set()
            pushes.join()
            failed = False
            push()
            if not failed:
                print(f"storage  {address} (working folder {local})", flush=True)
        mirror.check()  # a driver that another has replaced has not done its work
    finally:
        all_ended.set()
        beats.join()
        with contextlib.suppress(Exception):  # an address that is away: a newcomer waits for beats
            mirror.release()


def _beat(mirror: Mirror) -> None:
    with contextlib.suppress(Exception):  # away for a while
        if mirror.lease is not None:
            mirror.lease.beat()


def _at_start(address: str, action: Callable[[], _Result]) -> _Result:
    """Return what a use of an address at the start gives; it must not fail there."""
    try:
        return action()
    except ConfigError:
        raise
    except Exception as error:  # each file system raises its own kinds
        raise ConfigError(f"storage: cannot use {address}: {reason(error)}") from None


def _fill(mirror: Mirror, side: SyncSide | None) -> None:
    """Bring the working folder up to date, and say so."""
    if count := _at_start(mirror.address, partial(mirror.pull, side)):
        print(
            f"storage  {count} file(s) fetched from {mirror.address} to {mirror.local}", flush=True
        )
        print(
            "         training checkpoints there are pickles: continue only if you trust those who "
            "write to that address",
            flush=True,
        )
