"""The files at an address, and how a working folder differs from it.

`.headfold/manifest.json` at the address has each file with its size, digest and generation; the
working folder keeps the state in which it last agreed with the address, in a file of the same name.
A search there is compared by its records, above all by its journal, which is only appended to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Literal, NotRequired, TypedDict

FORMAT = 1
STATE_FOLDER = ".headfold"
"""At the address and in the working folder: what belongs to neither search nor store."""
MANIFEST = f"{STATE_FOLDER}/manifest.json"

BULK_FOLDERS = (
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
_DERIVED = (
    "waiting.json",
    "estimate.json",
    "report.html",
    "front.png",
    "rungs.png",
    "caches.png",
    "mlflow.db",
)
"""Files that follow from the others: they decide nothing."""

FileStamp = tuple[int, int]
"""Size in bytes, and time of the last change in nanoseconds."""
SyncSide = Literal["address", "folder"]
State = Literal["same", "ahead", "behind", "diverged"]
"""State of a working folder relative to the address."""


class FileEntry(TypedDict):
    """A file at an address."""

    size: int
    sha256: str | None
    """None if a former version has sent it."""
    generation: int
    """Generation of the manifest with which it was sent last."""
    tag: NotRequired[str]
    """Tag of the object, for records: conditional writes refer to it."""


class SyncedFile(FileEntry):
    """A file of which the working folder and the address had the same content."""

    stamp: FileStamp
    """Stamp of the file in the working folder."""


class Manifest(TypedDict):
    """The files at an address. `generation` counts the writes of it, `epoch` the takeovers."""

    format: int
    generation: int
    epoch: int
    writer: str
    """Process, host and time, in words."""
    files: dict[str, FileEntry]


class SyncedState(TypedDict):
    """The state in which a working folder last agreed with its address."""

    format: int
    generation: int
    epoch: int
    files: dict[str, SyncedFile]


def is_bulk(name: str) -> bool:
    """Return whether a file is in one of the bulk folders, of the storage or of a search."""
    return any(part in BULK_FOLDERS for part in PurePosixPath(name).parts[:-1][:2])


def is_decisive(name: str) -> bool:
    """Return whether a file is a record that no other file implies."""
    return not is_bulk(name) and "/" in name and PurePosixPath(name).name not in _DERIVED


def unit_of(name: str) -> str:
    """Return the search that a file belongs to; "" for one of the storage itself."""
    unit, slash, _ = name.partition("/")
    return unit if slash else ""


def digest(content: bytes) -> str:
    """Return the SHA-256 of a content."""
    return hashlib.sha256(content).hexdigest()


def compare_records(
    local: Mapping[str, bytes], remote: Mapping[str, bytes], base: Mapping[str, FileEntry]
) -> State:
    """Return how a search in a working folder differs from the one at the address.

    Args:
        local: Content of its decisive records that both have, or one of them has, by name.
        remote: The same at the address.
        base: What both were when they last agreed.
    """
    states = {
        name: _compare(name, local.get(name), remote.get(name), base.get(name))
        for name in {*local, *remote}
    }
    journals = {state for name, state in states.items() if name.endswith("/journal.jsonl")}
    promotions = {state for name, state in states.items() if name.endswith("/promotion.json")}
    others = {state for state in states.values() if state not in ("same", "unknown")}
    if "diverged" in journals | promotions:
        return "diverged"
    if "ahead" in journals:
        return "diverged" if "behind" in promotions else "ahead"
    if "behind" in journals:
        return "diverged" if "ahead" in promotions else "behind"
    if not others and "unknown" not in states.values():
        return "same"
    if "unknown" in states.values() or len(others) > 1 or "diverged" in others:
        return "diverged"
    return "ahead" if "ahead" in others else "behind"


def _compare(
    name: str, local: bytes | None, remote: bytes | None, base: FileEntry | None
) -> State | Literal["unknown"]:
    if local == remote:
        return "same"
    if local is None:
        return "behind"  # what is missing here is fetched, and never removed there
    if remote is None:
        return "ahead" if base is None else "behind"
    if name.endswith("/journal.jsonl"):
        whole = local[: local.rfind(b"\n") + 1]  # a kill may have cut the last line short
        if remote.startswith(whole):
            return "behind"
        return "ahead" if whole.startswith(remote) else "diverged"
    if base is None or base["sha256"] is None:
        return "unknown"
    if digest(local) == base["sha256"]:
        return "behind"
    return "ahead" if digest(remote) == base["sha256"] else "diverged"
