"""A working folder and its copy at an address: who writes there, and what both of them hold."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sqlite3
import tempfile
import uuid
from pathlib import Path, PurePosixPath
from typing import Any, cast

from attention.io.file_lock import file_lock
from attention.io.files import sha256, written_whole
from orchestrator.storage.conditional import (
    ComparedObjects,
    ConditionalObjects,
    WriteConflictError,
)
from orchestrator.storage.databases import back_up
from orchestrator.storage.lease import AddressLease, AddressTakenError, describe_holder, read_record
from orchestrator.storage.manifest import (
    FORMAT,
    MANIFEST,
    STATE_FOLDER,
    FileEntry,
    FileStamp,
    Manifest,
    SyncedFile,
    SyncedState,
    digest,
)
from trainers.jobs.addresses import CHECKPOINT_INDEX

TRANSFERS = 8
"""Files that are sent or fetched at a time."""

PROBE = ".headfold-probe"

TRAINING_CHECKPOINTS = re.compile(
    rf"(^|/)train/[^/]+/(relaxation/[^/]+/states/)?(checkpoint_\d+/|{re.escape(CHECKPOINT_INDEX)}$)"
)
"""Paths that workers write to an address, and read from there, themselves."""


def without_query(storage: str) -> str:
    """Return an address without the settings of its file system."""
    return storage.partition("?")[0]


class AddressFolder:
    """A working folder (`local`) and its copy at `root` of `filesystem`.

    Attributes:
        objects: The same place, for writes that refer to what was read.
        lease: The right to write there, once it was claimed.
        synced: The files of which both have the same content, by their path in the folder.
        remote: The manifest at the address; None before it was read.
    """

    def __init__(
        self,
        filesystem: Any,
        root: str,
        local: Path,
        *,
        objects: ConditionalObjects | None = None,
        address: str | None = None,
    ) -> None:
        self.filesystem = filesystem
        self.root = root.rstrip("/")
        self.local = local
        self.objects = objects or ComparedObjects(filesystem)
        self.address = without_query(address or root)
        self.lease: AddressLease | None = None
        self.synced: dict[str, SyncedFile] = {}
        self.remote: Manifest | None = None
        self._remote_tag: str | None = None
        self._state_stamp: FileStamp | None = None
        self._users: Any = None

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    @property
    def _state(self) -> Path:
        return self.local / MANIFEST

    def names(self) -> list[str]:
        """Return the files at the address."""
        return sorted(self._listing())

    def _listing(self) -> dict[str, int]:
        """Return the sizes of the files at the address, without what workers send themselves."""
        from pyarrow import fs

        selector = fs.FileSelector(self.root, recursive=True, allow_not_found=True)
        sizes = {
            str(PurePosixPath(info.path).relative_to(self.root)): info.size
            for info in self.filesystem.get_file_info(selector)
            if info.type == fs.FileType.File
        }
        return {
            name: size
            for name, size in sizes.items()
            if not name.startswith((f"{STATE_FOLDER}/", PROBE))
        }

    # ---- who writes there ------------------------------------------------------------------------

    def claim(self, beat_seconds: float = 6.0) -> None:
        """Take the address for this working folder, before anything is read or sent.

        Raises:
            AddressTakenError: If a driver with another working folder uses it.
        """
        users = self.local / STATE_FOLDER / "users"
        users.parent.mkdir(parents=True, exist_ok=True)
        self._users = users.open("a+")  # NFS has no shared lock of a file that is only written
        with contextlib.suppress(OSError):
            fcntl.flock(self._users, fcntl.LOCK_SH)
        lease = AddressLease(
            self.objects,
            self._path(f"{STATE_FOLDER}/holder.json"),
            address=self.address,
            folder=self._identity(),
            beat_seconds=beat_seconds,
        )
        try:
            lease.acquire()
        except BaseException:
            self._users.close()
            self._users = None
            raise
        self.lease = lease

    def _identity(self) -> str:
        """Return the id of this working folder; a copy of the folder has another one."""
        file = self.local / STATE_FOLDER / "folder.json"
        with file_lock(file.with_name("lock")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads(file.read_text(encoding="utf-8"))
                if record["inode"] == file.stat().st_ino:
                    return record["id"]
            file.unlink(missing_ok=True)
            with file.open("w", encoding="utf-8") as stream:
                identity = uuid.uuid4().hex
                inode = os.fstat(stream.fileno()).st_ino
                json.dump({"id": identity, "inode": inode}, stream)
            return identity

    def release(self) -> None:
        """Release the address, if no other driver of this working folder is running."""
        if self._users is None:
            return
        last = True
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            last = False
        except OSError:
            pass  # a file system without locks
        try:
            if last and self.lease is not None:
                self.lease.release()
        finally:
            self._users.close()
            self._users = None

    def check(self) -> None:
        """Check that no other working folder has taken the address over, as far as was seen.

        Raises:
            AddressTakenError: If one has.
        """
        if self.lease is not None:
            self.lease.check()

    def _verify(self) -> None:
        if self.lease is None:
            raise AddressTakenError(f"storage: {self.address} was changed by another process")
        self.lease.verify()

    # ---- the two manifests -----------------------------------------------------------------------

    def _open(self) -> Manifest:
        """Return the manifest at the address, read again where another driver has sent files."""
        stamp = None
        with contextlib.suppress(OSError):
            stat = self._state.stat()
            stamp = (stat.st_size, stat.st_mtime_ns)
        if self.remote is None or stamp != self._state_stamp:
            stored = self.objects.read(self._path(MANIFEST))
            self._remote_tag = stored.tag if stored is not None else None
            self.remote = (
                read_record(stored, Manifest, self._path(MANIFEST))
                if stored is not None
                else {"format": FORMAT, "generation": 0, "epoch": 0, "writer": "", "files": {}}
            )
            self.synced = self._read_state()["files"]
            self._state_stamp = stamp
        return self.remote

    def _read_state(self) -> SyncedState:
        try:
            state = json.loads(self._state.read_text(encoding="utf-8"))
            for entry in state["files"].values():
                size, changed = entry["stamp"]
                entry["stamp"] = (size, changed)
            return cast(SyncedState, state)
        except (OSError, ValueError, KeyError, TypeError):  # as if nothing were known of it
            return {"format": FORMAT, "generation": -1, "epoch": -1, "files": {}}

    def _commit(self) -> None:
        """Write the manifest with the next generation, and what of it is here."""
        remote = self._open()
        remote["generation"] += 1
        if self.lease is not None:
            remote["epoch"] = self.lease.epoch
            remote["writer"] = describe_holder(self.lease.record)
        # Copied in one step: files are being sent meanwhile
        record = {**remote, "files": dict(remote["files"])}
        content = json.dumps(record, sort_keys=True).encode()
        path = self._path(MANIFEST)
        try:
            self._remote_tag = self.objects.write(path, content, self._remote_tag)
        except WriteConflictError:
            # A late write of a driver that was taken over, or ours before a kill
            self._verify()
            stored = self.objects.read(path)
            self._remote_tag = self.objects.write(path, content, stored and stored.tag)
        self._save_state()

    def _save_state(self) -> None:
        remote = self._open()
        state: SyncedState = {
            "format": FORMAT,
            "generation": remote["generation"],
            "epoch": remote["epoch"],
            "files": dict(self.synced),
        }
        with written_whole(self._state) as fresh:
            fresh.write_text(json.dumps(state), encoding="utf-8")
        stat = self._state.stat()
        self._state_stamp = (stat.st_size, stat.st_mtime_ns)

    # ---- files ----------------------------------------------------------------------------------

    def _files(self) -> dict[str, FileStamp]:
        """Return the stamp of each file to send.

        Hidden ones are half-written, locks, or ours; links are made anew; what workers send
        themselves is theirs.

        Raises:
            OSError: For a folder that cannot be read: its files are not gone.
        """

        def unreadable(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        stamps: dict[str, FileStamp] = {}
        for folder, folders, names in os.walk(self.local, onerror=unreadable):
            folders[:] = [f for f in folders if not f.startswith(".")]
            for name in names:
                path = Path(folder) / name
                relative = path.relative_to(self.local).as_posix()
                if name.startswith(".") or name.endswith((".lock", "-wal", "-shm", "-journal")):
                    continue
                if path.is_symlink() or TRAINING_CHECKPOINTS.search(relative):
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

    def _read_there(self, name: str) -> bytes:
        with self.filesystem.open_input_stream(self._path(name)) as stream:
            return stream.read()

    def _digest(self, name: str) -> str | None:
        if name.endswith(".db"):
            content = self._read(name)
            return digest(content) if content is not None else None
        try:
            return sha256(self.local / name)
        except FileNotFoundError:
            return None

    def _open_entries(self) -> dict[str, FileEntry]:
        assert self.remote is not None, "the manifest is read before files are fetched"
        return self.remote["files"]
