"""One working folder at a time writes to an address: `.headfold/holder.json` there says which.

The holder counts heartbeats in it. A newcomer with another folder is refused while they move, by
its own clock; else it takes over, with an `epoch` that is one higher. A holder that finds a higher
epoch there writes nothing more. Drivers that share one working folder are one holder.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypedDict, TypeVar, cast

from orchestrator.config.schema import ConfigError
from orchestrator.storage.conditional import ConditionalObjects, StoredObject, WriteConflictError

_MISSED_BEATS = 5
_READS = 5
_READ_PAUSE_SECONDS = 0.05
_Record = TypeVar("_Record")


class AddressHolder(TypedDict):
    """The content of `.headfold/holder.json`.

    Attributes:
        folder: Id of the working folder.
        since: When it took the address, in ISO 8601.
        beat: The count of heartbeats.
        beat_seconds: Between two of them.
        released: Whether its last driver has ended in an orderly way.
    """

    folder: str
    host: str
    pid: int
    since: str
    epoch: int
    beat: int
    beat_seconds: float
    released: bool


class AddressTakenError(ConfigError):
    """An address that another working folder writes to now."""


class AddressLease:
    """The right of a working folder to write to an address, from `acquire` to `release`."""

    def __init__(
        self,
        objects: ConditionalObjects,
        path: str,
        *,
        address: str,
        folder: str,
        beat_seconds: float,
    ) -> None:
        self._objects = objects
        self._path = path
        self._address = address
        self._tag: str | None = None
        self._lock = threading.Lock()
        self.lost: str | None = None
        self.record: AddressHolder = {
            "folder": folder,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "epoch": 1,
            "beat": 0,
            "beat_seconds": beat_seconds,
            "released": False,
        }

    @property
    def epoch(self) -> int:
        """The number of takeovers of the address up to this one."""
        return self.record["epoch"]

    def acquire(self) -> None:
        """Take the address.

        Raises:
            AddressTakenError: If a driver with another working folder uses it.
        """
        current = self._read()
        before = current and current[0]
        if current is not None:
            holder, self._tag = current
            self.record["epoch"] = holder["epoch"]
            if holder["folder"] != self.record["folder"]:
                if not holder["released"]:
                    self._tag = self._wait_for_end(holder, self._tag)
                self.record["epoch"] += 1
        try:
            self._write()
        except WriteConflictError:
            self._adopt_or_lose()
            if self.lost is not None:
                raise AddressTakenError(self._refusal(self._read())) from None
        if not self._objects.atomic:
            # Another may have read the same: the last to write has it
            if before is not None and before["folder"] != self.record["folder"]:
                time.sleep(min(1.0, self.record["beat_seconds"]))
            now = self._read()
            if now is None or now[0]["folder"] != self.record["folder"]:
                raise AddressTakenError(self._refusal(now))

    def _wait_for_end(self, holder: AddressHolder, tag: str) -> str:
        """Wait until a holder has missed its heartbeats; return the tag of its last."""
        seconds = holder["beat_seconds"]
        print(
            f"storage  {self._address} was not released by {describe_holder(holder)}: looking for "
            f"{_MISSED_BEATS * seconds:.0f} s whether it still runs",
            flush=True,
        )
        deadline = time.monotonic() + _MISSED_BEATS * seconds
        while time.monotonic() < deadline:
            time.sleep(max(0.02, min(seconds / 2, deadline - time.monotonic())))
            now = self._read()
            if now is None or now[0]["released"]:
                break
            if (now[0]["folder"], now[0]["beat"]) != (holder["folder"], holder["beat"]):
                raise AddressTakenError(self._refusal(now))
        current = self._read()
        return current[1] if current is not None else tag

    def _refusal(self, current: tuple[AddressHolder, str] | None) -> str:
        process = "another process"
        if current is not None:
            process = describe_holder(current[0])
        return (
            f"storage: {self._address} is being used by {process}, with its own working "
            "folder; wait for it or stop it, or give this search another storage"
        )

    def beat(self) -> None:
        """Write a heartbeat, unless another folder has taken over.

        Raises:
            OSError: If the address is away.
        """
        with self._lock:
            if self.lost is not None:
                return
            self.record["beat"] += 1
            if not self._objects.atomic:
                self._adopt_or_lose()
                return
            try:
                self._write()
            except WriteConflictError:
                self._adopt_or_lose()

    def verify(self) -> None:
        """Look at the address whether it is still this folder's.

        Raises:
            AddressTakenError: If it is not.
        """
        with self._lock:
            self._adopt_or_lose()
        self.check()

    def check(self) -> None:
        """Check that no record read until now names another folder as the holder.

        Raises:
            AddressTakenError: If something does.
        """
        if self.lost is not None:
            raise AddressTakenError(self.lost)

    def release(self) -> None:
        """Say at the address that nobody uses it; a newcomer need not wait then."""
        with self._lock:
            if self.lost is None:
                self.record["released"] = True
                with contextlib.suppress(WriteConflictError):
                    self._write()

    def _adopt_or_lose(self) -> None:
        """Write over what another driver of this folder, or a former holder, has written."""
        for _ in range(5):
            current = self._read()
            if current is not None:
                holder, self._tag = current
                is_ours = holder["folder"] == self.record["folder"]
                if not is_ours and holder["epoch"] >= self.record["epoch"]:
                    self._lose(holder)
                    return
                if is_ours:
                    self.record["beat"] = max(self.record["beat"], holder["beat"] + 1)
            else:
                self._tag = None
            with contextlib.suppress(WriteConflictError):
                self._write()
                return

    def _lose(self, holder: AddressHolder) -> None:
        self.lost = (
            f"storage: {self._address} was taken over by {describe_holder(holder)}, with its own "
            "working folder; this driver stops, and sends nothing more"
        )

    def _write(self) -> None:
        content = json.dumps(self.record, indent=1).encode()
        self._tag = self._objects.write(self._path, content, self._tag)

    def _read(self) -> tuple[AddressHolder, str] | None:
        for attempt in range(_READS):
            stored = self._objects.read(self._path)
            if stored is None:
                return None
            try:
                return read_record(stored, AddressHolder, self._path), stored.tag
            except ConfigError:
                # On a file system that replaces no file in one step, a beat may be half there
                if attempt == _READS - 1:
                    raise
                time.sleep(_READ_PAUSE_SECONDS)
        return None


def describe_holder(holder: AddressHolder) -> str:
    """Return who holds an address, in words."""
    return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"


def read_record(stored: StoredObject, kind: Callable[..., _Record], path: str) -> _Record:
    """Return the JSON object of a kind of record that was read from an address.

    Raises:
        ConfigError: If it is none.
    """
    try:
        record = json.loads(stored.content)
    except ValueError:
        record = None
    keys: frozenset[str] = getattr(kind, "__required_keys__", frozenset())
    if not isinstance(record, dict) or not keys <= set(record):
        raise ConfigError(
            f"storage: {path} is not what was written there: expected a JSON object with "
            f"{', '.join(sorted(keys))}; if no driver uses the address, remove that file"
        )
    return cast(_Record, record)
