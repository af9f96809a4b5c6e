"""From an address into a working folder: what is missing here, or has gone on there."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from attention.io.file_lock import file_lock
from attention.io.files import written_whole
from orchestrator.config.schema import ConfigError
from orchestrator.storage.address_folder import (
    TRAINING_CHECKPOINTS,
    TRANSFERS,
    AddressFolder,
)
from orchestrator.storage.conditional import (
    write_object,
)
from orchestrator.storage.manifest import (
    STATE_FOLDER,
    FileEntry,
    FileStamp,
    Manifest,
    State,
    SyncedFile,
    SyncSide,
    compare_records,
    is_bulk,
    is_decisive,
    unit_of,
)

_SMALL = 1 << 20
"""Files of trials up to this size, in bytes, are fetched with the records that name them."""
_ON_DEMAND = ("trials", "promoted", "train", "data", "calibration", "tune")
"""Folders of a search whose larger files are fetched only for what is open in it."""


class FetchedFolder(AddressFolder):
    """A working folder that is brought up to date with its copy at an address."""

    def pull(self, side: SyncSide | None = None) -> int:
        """Bring the working folder up to date; return the number of files fetched.

        Records and small files come first, and large files of the storage itself; those of a search
        when it is resumed, see `fetch_search`. Files that are replaced here are moved to another
        folder.

        Args:
            side: Which of the two counts where both have changed; None: that is an error.

        Raises:
            ConfigError: If both have changed since they last agreed.
        """
        with self._locked():
            return self._pull(side)

    def _locked(self) -> contextlib.AbstractContextManager[bool]:
        """Lock the working folder for a transfer."""
        waiting = f"storage  another process transfers files of {self.local}: waiting for its end"
        return file_lock(self.local / STATE_FOLDER / "lock", note=waiting)

    def _pull(self, side: SyncSide | None) -> int:
        remote = self._open()
        listing = self._listing()
        entries = self._entries(remote, listing)
        state = self._read_state()
        files = self._files()
        # Nobody else has written there since
        unmoved = self._remote_tag is not None and (
            (state["generation"], state["epoch"]) == (remote["generation"], remote["epoch"])
        )
        self.synced = {name: entry for name, entry in state["files"].items() if name in files}
        units: dict[str, State] = dict.fromkeys({unit_of(n) for n in (*entries, *files)}, "ahead")
        contents = {}
        if not unmoved:
            for unit in units:
                units[unit], contents[unit] = self._compare(unit, entries, files, state["files"])
        diverged = sorted(
            unit for unit, state_of_unit in units.items() if state_of_unit == "diverged"
        )
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
        """Return the files at the address: as in the manifest, where the sizes agree.

        A kill leaves files there that were sent after the last manifest.
        """
        entries: dict[str, FileEntry] = {}
        for name, size in listing.items():
            entry = remote["files"].get(name)
            if ".." in PurePosixPath(name).parts or TRAINING_CHECKPOINTS.search(name):
                continue
            if entry is not None and entry["size"] == size:
                entries[name] = entry
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
        with ThreadPoolExecutor(TRANSFERS) as pool:
            names = sorted(there)
            remote = dict(zip(names, pool.map(self._read_there, names), strict=True))
        state = compare_records(local, remote, base)
        return ("behind" if state == "same" else state), (local, remote)

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
        synced = self.synced.get(name)
        if entry["sha256"] is None:
            # Of a former version: large files were written once, under a separate name
            if is_bulk(name):
                return stamp[0] == entry["size"]
            return self._read(name) == self._read_there(name)
        if synced is not None and synced["stamp"] == stamp:
            return synced["sha256"] == entry["sha256"]
        if not name.endswith(".db") and stamp[0] != entry["size"]:
            return False
        if self._digest(name) != entry["sha256"]:
            return False
        self.synced[name] = {**entry, "stamp": stamp}
        return True

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
        """Fetch the files that a search needs to resume; return the number of files.

        That is all of it but the weights of other trials than these, and Ray Tune's files, which
        are never read.

        Args:
            unit: Its folder in the storage.
            trials: Ids of those that are open or may be promoted.
        """
        if not self._names_to_fetch(unit, trials):
            return 0
        with self._locked():
            remote = self._open()
            names = self._names_to_fetch(unit, trials)
            size = sum(remote["files"][name]["size"] for name in names)
            print(
                f"storage  {len(names)} file(s) of {unit}, {size / 2**30:.2f} GiB, come from "
                f"{self.address}",
                flush=True,
            )
            self._fetch(names)
            self._save_state()
            return len(names)

    def _names_to_fetch(self, unit: str, trials: Collection[str]) -> list[str]:
        names = []
        for name in list(self._open_entries()):
            parts = PurePosixPath(name).parts
            if unit_of(name) != unit or parts[1] == "tune":
                continue
            of_trial = parts[1] in ("trials", "promoted", "train")
            if of_trial and not any(trial in parts[2] for trial in trials):
                continue
            if not (self.local / name).exists():
                names.append(name)
        return names

    def _fetch(self, names: Iterable[str]) -> None:
        """Fetch files, several at a time: what is not bulk before the rest."""
        bulk = []
        with ThreadPoolExecutor(TRANSFERS) as pool:
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
        if writer := self._open()["writer"]:
            lines.append(f"  the address was last written by {writer}")
        lines.append(
            "continue from one of them: --sync-from address (what the folder has instead is moved "
            f"to {self._aside}), or --sync-from folder (the address keeps its records in "
            f"{STATE_FOLDER}/replaced there)"
        )
        return "\n".join(lines)


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
        f"{len(events)} events, the last of {last}; {trials} trial(s), {ends} finished; the search "
        f"is {'finished' if ended else 'unfinished'}"
    )
