"""Storage at an address (`s3://bucket/path`, `gs://...`): a working folder and its copy there.

Trials, workers and stock tools read and write files, and sqlite and memory-mapped tensors are
files, so a search works in a folder: below HEADFOLD_HOME, which every node sees. What has changed
there goes to the address every minute and at the end. A working folder that is empty (a new head, a
new machine) is filled from the address first, and one that lags behind is brought up to date; where
both have gone on since they last agreed, somebody must say which of the two counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import sqlite3
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast
from urllib.parse import parse_qs, urlparse

from attention.base.messages import reason
from attention.io.files import written_whole
from orchestrator.config.schema import ConfigError
from orchestrator.storage.conditional import (
    ComparedObjects,
    ConditionalObjects,
    WriteConflictError,
    conditional_objects,
    open_object,
    write_object,
)
from orchestrator.storage.databases import back_up
from orchestrator.storage.file_lock import file_lock
from orchestrator.storage.lease import AddressHolder, AddressLease, AddressTakenError, read_record
from orchestrator.storage.manifest import (
    FORMAT,
    MANIFEST,
    STATE_FOLDER,
    FileEntry,
    FileStamp,
    Manifest,
    Side,
    State,
    SyncedFile,
    SyncedState,
    compare_records,
    digest,
    is_bulk,
    is_decisive,
    unit_of,
)
from trainers.jobs.addresses import CHECKPOINT_INDEX, NATIVE, open_location

logger = logging.getLogger(__name__)

_SECRET_SETTINGS = ("access_key", "secret_key", "session_token", "token", "password")
_PROBE = ".headfold-probe"
_Result = TypeVar("_Result")
_SMALL = 1 << 20
"""Files of trials up to this size, in bytes, are fetched with the records that name them."""
_ON_DEMAND = ("trials", "promoted", "train", "data", "calibration", "tune")
"""Folders of a search whose larger files are fetched only for what is open in it."""
_TRANSFERS = 8  # at a time
_COMMIT_SECONDS = 60.0

_TRAINING_CHECKPOINTS = re.compile(
    rf"(^|/)train/[^/]+/(checkpoint_\d+/|{re.escape(CHECKPOINT_INDEX)}$)"
)
"""Paths that workers write to an address, and read from there, themselves."""


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


class Mirror:
    """A working folder (`local`) and its copy at `root` of `filesystem`.

    Attributes:
        objects: The same place, for writes that refer to what was read.
        lease: The right to write there, once it was claimed.
        former: Who had it before.
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
        self.address = _without_query(address or root)
        self.lease: AddressLease | None = None
        self.former: AddressHolder | None = None
        self.synced: dict[str, SyncedFile] = {}
        self.remote: Manifest | None = None
        self._remote_tag: str | None = None
        self._state_stamp: FileStamp | None = None
        self._users: Any = None

    @classmethod
    def of(cls, storage: str, local: Path) -> Mirror:
        """Open an address and write there once.

        Raises:
            ConfigError: If it cannot be read or written.
        """
        filesystem, root = open_address(storage)
        mirror = cls(filesystem, root, local, address=storage)
        try:
            probe = mirror._path(f"{_PROBE}-{uuid.uuid4().hex}")
            write_object(filesystem, probe, b"")
            filesystem.delete_file(probe)
        except Exception as error:  # each file system raises its own kinds
            raise ConfigError(
                f"storage: cannot write to {mirror.address}: {reason(error)}"
            ) from None
        mirror.objects = conditional_objects(filesystem, mirror.root, storage)
        return mirror

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
            if not name.startswith((f"{STATE_FOLDER}/", _PROBE))
        }

    # ---- who writes there ------------------------------------------------------------------------

    def claim(self, beat_seconds: float = 6.0) -> None:
        """Take the address for this working folder, before anything is read or sent.

        Raises:
            AddressTakenError: If a driver with another working folder uses it.
        """
        users = self.local / STATE_FOLDER / "users"
        users.parent.mkdir(parents=True, exist_ok=True)
        self._users = users.open("a")
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
            self.former = lease.acquire()
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
        """Give the address free, if no other driver of this working folder is left."""
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
        """Return the manifest at the address, read again where a driver beside has sent files."""
        stamp = None
        with contextlib.suppress(OSError):
            stat = self._state.stat()
            stamp = (stat.st_size, stat.st_mtime_ns)
        if self.remote is None or stamp != self._state_stamp:
            found = self.objects.read(self._path(MANIFEST))
            self._remote_tag = found.tag if found is not None else None
            self.remote = (
                read_record(found, Manifest, self._path(MANIFEST))
                if found is not None
                else {"format": FORMAT, "generation": 0, "epoch": 0, "files": {}}
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
        # Copied in one step: files are being sent meanwhile
        record = {**remote, "files": dict(remote["files"])}
        content = json.dumps(record, sort_keys=True).encode()
        path = self._path(MANIFEST)
        try:
            self._remote_tag = self.objects.write(path, content, self._remote_tag)
        except WriteConflictError:
            # A late write of a driver that was taken over, or ours before a kill
            self._verify()
            found = self.objects.read(path)
            self._remote_tag = self.objects.write(path, content, found and found.tag)
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

    # ---- from the address ------------------------------------------------------------------------

    def pull(self, side: Side | None = None) -> int:
        """Bring the working folder up to date; return the number of files fetched.

        Records and small files come first, and large files of the storage itself; those of a search
        when it goes on, see `fetch_search`. What is replaced here is set aside.

        Args:
            side: Which of the two counts where both have changed; None: that is an error.

        Raises:
            ConfigError: If both have changed since they last agreed.
        """
        with file_lock(self.local / STATE_FOLDER / "lock"):
            return self._pull(side)

    def _pull(self, side: Side | None) -> int:
        remote = self._open()
        listing = self._listing()
        entries = self._entries(remote, listing)
        state = self._read_state()
        files = self._files()
        # Nobody else has written there since
        unmoved = self._remote_tag is not None and (
            (state["generation"], state["epoch"]) == (remote["generation"], remote["epoch"])
        )
        self.synced = {name: known for name, known in state["files"].items() if name in files}
        units: dict[str, State] = dict.fromkeys({unit_of(n) for n in (*entries, *files)}, "ahead")
        contents = {}
        if not unmoved:
            for unit in units:
                units[unit], contents[unit] = self._compare(unit, entries, files, state["files"])
        diverged = sorted(unit for unit, found in units.items() if found == "diverged")
        if diverged and side is None:
            raise ConfigError(self._report(diverged, contents))
        fetched: list[str] = []
        for unit in sorted(units):
            ours = units[unit] == "ahead" or (unit in diverged and side == "folder")
            if ours and unit in diverged:
                self._replace_there(unit, entries, files)
            fetched += self._missing(unit, entries, files, ours)
        remote["files"] = entries
        self._fetch(sorted(fetched, key=is_bulk))
        if self.lease is not None and self.lease.epoch != remote["epoch"]:
            self._commit()  # what a former holder sends from now on is refused
        elif fetched or not unmoved:
            self._save_state()
        return len(fetched)

    def _entries(self, remote: Manifest, listing: dict[str, int]) -> dict[str, FileEntry]:
        """Return what lies at the address: as the manifest says, where the sizes agree.

        A kill leaves files there that were sent after the last manifest.
        """
        entries: dict[str, FileEntry] = {}
        for name, size in listing.items():
            known = remote["files"].get(name)
            if ".." in PurePosixPath(name).parts or _TRAINING_CHECKPOINTS.search(name):
                continue
            if known is not None and known["size"] == size:
                entries[name] = known
            else:
                entries[name] = {"size": size, "sha256": None, "generation": 0}
        return entries

    def _compare(
        self,
        unit: str,
        entries: dict[str, FileEntry],
        files: dict[str, FileStamp],
        base: dict[str, SyncedFile],
    ) -> tuple[State, tuple[dict[str, bytes], dict[str, bytes]]]:
        """Return how a search here differs from the one at the address, and its records in both."""
        here = {n for n in files if unit_of(n) == unit and is_decisive(n)}
        there = {n for n in entries if unit_of(n) == unit and is_decisive(n)}
        if not here and not there:
            return ("behind" if any(unit_of(n) == unit for n in entries) else "ahead"), ({}, {})
        local = {n: content for n in here if (content := self._read(n)) is not None}
        if not local:
            return "behind", ({}, {})
        with ThreadPoolExecutor(_TRANSFERS) as pool:
            names = sorted(there)
            remote = dict(zip(names, pool.map(self._read_there, names), strict=True))
        state = compare_records(local, remote, base)
        return ("behind" if state == "same" else state), (local, remote)

    def _read_there(self, name: str) -> bytes:
        with self.filesystem.open_input_stream(self._path(name)) as stream:
            return stream.read()

    def _missing(
        self,
        unit: str,
        entries: dict[str, FileEntry],
        files: dict[str, FileStamp],
        ours: bool,
    ) -> list[str]:
        """Return the files of a search to fetch; where the address counts, set aside what differs.

        Args:
            ours: Whether what this folder has counts.
        """
        names = []
        for name in [n for n in entries if unit_of(n) == unit]:
            here = name in files
            if here and (ours or self._agrees(name, entries[name], files[name])):
                continue
            if here:
                self._set_aside(name)
            if not self._is_on_demand(name, entries[name]):
                names.append(name)
        if not ours:
            for name in [n for n in files if unit_of(n) == unit and n not in entries]:
                if is_decisive(name) or name in self.synced:
                    self._set_aside(name)
        return names

    def _agrees(self, name: str, entry: FileEntry, stamp: FileStamp) -> bool:
        """Return whether a file here is the one at the address."""
        known = self.synced.get(name)
        if entry["sha256"] is None:
            # Of a former version: large files were written once, under a name of their own
            if is_bulk(name):
                return stamp[0] == entry["size"]
            return self._read(name) == self._read_there(name)
        if known is not None and known["stamp"] == stamp:
            return known["sha256"] == entry["sha256"]
        if not name.endswith(".db") and stamp[0] != entry["size"]:
            return False
        if self._digest(name) != entry["sha256"]:
            return False
        self.synced[name] = {**entry, "stamp": stamp}
        return True

    def _digest(self, name: str) -> str | None:
        if name.endswith(".db"):
            content = self._read(name)
            return digest(content) if content is not None else None
        try:
            with (self.local / name).open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except FileNotFoundError:
            return None

    def _set_aside(self, name: str) -> None:
        """Move a file of the working folder into `.headfold/replaced/`, out of the way."""
        self.synced.pop(name, None)
        target = self._aside / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = self.local / name
        for suffix in ("", "-wal", "-shm") if name.endswith(".db") else ("",):
            with contextlib.suppress(FileNotFoundError):
                source.with_name(source.name + suffix).rename(
                    target.with_name(target.name + suffix)
                )

    @property
    def _aside(self) -> Path:
        epoch = self.lease.epoch if self.lease is not None else 0
        return self.local / STATE_FOLDER / "replaced" / str(epoch)

    def _replace_there(
        self, unit: str, entries: dict[str, FileEntry], files: dict[str, FileStamp]
    ) -> None:
        """Keep the records of a search at the address aside there, and drop its other files."""
        epoch = self.lease.epoch if self.lease is not None else 0
        for name in [n for n in entries if unit_of(n) == unit]:
            if is_decisive(name):
                aside = self._path(f"{STATE_FOLDER}/replaced/{epoch}/{name}")
                write_object(self.filesystem, aside, self._read_there(name))
            if name not in files:
                self.filesystem.delete_file(self._path(name))
                del entries[name]
            self.synced.pop(name, None)

    def _is_on_demand(self, name: str, entry: FileEntry) -> bool:
        parts = PurePosixPath(name).parts
        return len(parts) > 2 and parts[1] in _ON_DEMAND and entry["size"] > _SMALL

    def fetch_search(self, unit: str, trials: Collection[str]) -> int:
        """Fetch what a search goes on with; return the number of files.

        That is all of it but the weights of other trials than these, and Ray Tune's files, which
        nobody reads.

        Args:
            unit: Its folder in the storage.
            trials: Ids of those that are open or may be promoted.
        """
        with file_lock(self.local / STATE_FOLDER / "lock"):
            wanted = []
            for name in self._open()["files"]:
                parts = PurePosixPath(name).parts
                if unit_of(name) != unit or len(parts) < 2 or parts[1] == "tune":
                    continue
                of_trial = parts[1] in ("trials", "promoted", "train")
                if of_trial and not any(trial in parts[2] for trial in trials):
                    continue
                if not (self.local / name).exists():
                    wanted.append(name)
            if wanted:
                size = sum(self._open()["files"][name]["size"] for name in wanted)
                print(
                    f"storage  {len(wanted)} file(s) of {unit}, {size / 2**30:.2f} GiB, come from "
                    f"{self.address}",
                    flush=True,
                )
                self._fetch(wanted)
                self._save_state()
            return len(wanted)

    def _fetch(self, names: Iterable[str]) -> None:
        """Fetch files, several at a time: what is not bulk before the rest."""
        bulk = []
        with ThreadPoolExecutor(_TRANSFERS) as pool:
            records = []
            for name in names:
                (bulk if is_bulk(name) else records).append(name)
            list(pool.map(self._fetch_one, records))
            list(pool.map(self._fetch_one, bulk))

    def _fetch_one(self, name: str) -> None:
        entries = self._open_entries()
        target = self.local / name
        entry: FileEntry = {**entries[name]}
        hashed = hashlib.sha256()
        size = 0
        stream = self.filesystem.open_input_stream(self._path(name))
        with stream as source, written_whole(target) as fresh, fresh.open("wb") as out:
            while chunk := source.read(1 << 22):
                hashed.update(chunk)
                size += len(chunk)
                out.write(chunk)
        if hashed.hexdigest() != entry["sha256"]:
            # Sent after the manifest, or by a former version: its tag is not known either
            entry = {"size": size, "sha256": hashed.hexdigest(), "generation": entry["generation"]}
            entries[name] = entry
        stat = target.stat()
        self.synced[name] = {**entry, "stamp": (stat.st_size, stat.st_mtime_ns)}

    def _open_entries(self) -> dict[str, FileEntry]:
        assert self.remote is not None, "the manifest is read before files are fetched"
        return self.remote["files"]

    def _report(
        self,
        units: Iterable[str],
        contents: dict[str, tuple[dict[str, bytes], dict[str, bytes]]],
    ) -> str:
        """Return what both sides have of searches that have diverged, and what can be done."""
        lines = [
            f"storage: {self.address} and its working folder {self.local} have both changed since "
            "they last agreed:"
        ]
        for unit in units:
            local, remote = contents[unit]
            differing = sorted(n for n in {*local, *remote} if local.get(n) != remote.get(n))
            lines.append(f"  {unit}: {', '.join(PurePosixPath(n).name for n in differing)} differ")
            lines.append(f"    in the folder:  {_describe(unit, local)}")
            lines.append(f"    at the address: {_describe(unit, remote)}")
        if self.former is not None:
            holder = self.former
            lines.append(
                f"  the address was last used by process {holder['pid']} on {holder['host']}, "
                f"since {holder['since']}"
            )
        lines.append(
            "go on with one of the two: --sync-from address (what the folder has instead is moved "
            f"to {self._aside}), or --sync-from folder (the address keeps its records in "
            f"{STATE_FOLDER}/replaced there)"
        )
        return "\n".join(lines)

    # ---- to the address --------------------------------------------------------------------------

    def push(self) -> int:
        """Send what has changed, and remove what is gone; return the number of files sent.

        Files go before the records that name them. Records are read before anything is sent: one at
        the address never names a file that was written after it. A file whose content is at the
        address already is not sent.

        Raises:
            AddressTakenError: If another working folder has taken the address over.
        """
        self.check()
        with file_lock(self.local / STATE_FOLDER / "lock"):
            return self._push()

    def _push(self) -> int:
        remote = self._open()
        before = self._files()
        records = {name: self._read(name) for name in self._changed(before) if not is_bulk(name)}
        files = self._files()
        bulk = [name for name in self._changed(files) if is_bulk(name)]
        gone = [name for name in self.synced if name not in files]
        if not records and not bulk and not gone:
            return 0
        if self.lease is not None:
            self.lease.verify()
        count = self._send_all(bulk, files)
        for name, content in records.items():
            if content is not None:
                count += self._send_record(name, content, before[name])
        for name in gone:
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.delete_file(self._path(name))
            remote["files"].pop(name, None)
            del self.synced[name]
        if count or gone:
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
        with ThreadPoolExecutor(_TRANSFERS) as pool:
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

    def _files(self) -> dict[str, FileStamp]:
        """Return the stamp of each file to send.

        Hidden ones are half-written, locks, or ours; links are made anew; what workers send
        themselves is theirs.
        """
        stamps: dict[str, FileStamp] = {}
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

    def _send_record(self, name: str, content: bytes, stamp: FileStamp) -> bool:
        """Send a record, unless the address has it already; return whether it was sent."""
        remote = self._open()
        entry: FileEntry = {
            "size": len(content),
            "sha256": digest(content),
            "generation": remote["generation"] + 1,
        }
        known = remote["files"].get(name)
        if known is not None and known["sha256"] == entry["sha256"]:
            self.synced[name] = {**known, "stamp": stamp}
            return False
        path = self._path(name)
        if not self.objects.atomic:
            write_object(self.filesystem, path, content)
        else:
            try:
                entry["tag"] = self.objects.write(path, content, known and known.get("tag"))
            except WriteConflictError:
                # A late write of a driver that was taken over, ours before a kill, or a file of
                # which no tag is known
                self._verify()
                found = self.objects.read(path)
                entry["tag"] = self.objects.write(path, content, found and found.tag)
        remote["files"][name] = entry
        self.synced[name] = {**entry, "stamp": stamp}
        return True

    def _send(self, name: str, stamp: FileStamp) -> bool:
        """Send one file; one that is written to meanwhile is sent again the next time."""
        path = self.local / name
        entries = self._open_entries()
        known = entries.get(name)
        alike = known is not None and known["sha256"] and known["size"] == stamp[0]
        if known is not None and alike and self._digest(name) == known["sha256"]:
            self.synced[name] = {**known, "stamp": stamp}
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


def _describe(unit: str, records: dict[str, bytes]) -> str:
    """Return the state of a search in words, from its records."""
    events = []
    for line in records.get(f"{unit}/journal.jsonl", b"").splitlines():
        with contextlib.suppress(ValueError):
            events.append(json.loads(line))
    if not events:
        return f"{len(records)} record(s), no journal" if records else "nothing"
    trials = sum(event.get("event") == "trial" for event in events)
    ends = sum(event.get("event") == "end" for event in events)
    last = datetime.fromtimestamp(events[-1].get("time") or 0, UTC).isoformat(timespec="seconds")
    ended = b'"ended"' in records.get(f"{unit}/state.json", b"")
    return (
        f"{len(events)} events, the last of {last}; {trials} trial(s), {ends} ended; the search "
        f"has {'ended' if ended else 'not ended'}"
    )


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
    storage: str, local: Path, seconds: float | None = None, side: Side | None = None
) -> Iterator[Mirror | None]:
    """Keep the address of a `storage` setting up to date with its working folder.

    For a folder there is nothing to do. An address that is away for a while is reported once and
    tried again; the files are in the working folder all the while.

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
            "(pip install 'headfold[s3]'), on Google Cloud with google-auth",
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


def _fill(mirror: Mirror, side: Side | None) -> None:
    """Bring the working folder up to date, and say so."""
    if count := _at_start(mirror.address, partial(mirror.pull, side)):
        print(
            f"storage  {count} file(s) fetched from {mirror.address} to {mirror.local}", flush=True
        )
        print(
            "         training checkpoints there are pickles: go on only if you trust who writes "
            "to that address",
            flush=True,
        )
