"""One driver per search: a second one is refused, with the process that runs it.

Two things are checked, since a shared file system may lock on one machine only: `flock`, which the
kernel releases when the holder dies, however it dies; and, where the holder was on another machine,
its heartbeat, a count in the file that increases while it lives. The newcomer watches by its own
clock whether the count moves; no two clocks are compared.

A holder that was suspended for so long that another took over must not continue: each lock has an
`epoch`, one higher than that of the lock before, and `check` raises for all but the highest. It is
called before each event of the journal.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import socket
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import NotRequired, TypedDict, cast

from orchestrator.config.schema import ConfigError

logger = logging.getLogger(__name__)

_KEYS = ("host", "pid", "since", "token", "beat")
_BEAT_SECONDS = 2.0
_MISSED_BEATS = 5  # in a row, after which a holder on another machine counts as dead
_SILENT_SECONDS = 60.0


class LockHolder(TypedDict):
    """The content of a lock file.

    Attributes:
        since: When it was acquired, in ISO 8601.
        token: Of the lock that wrote it.
        beat: The count of heartbeats.
        epoch: The number of the lock, one higher at each takeover; locks of a former version have
            none.
    """

    host: str
    pid: int
    since: str
    token: str
    beat: int
    epoch: NotRequired[int]


class SearchLock(contextlib.AbstractContextManager):
    """Locked from `acquire` to `release`, or to the death of the process."""

    def __init__(
        self, path: str | Path, *, beat: float = _BEAT_SECONDS, host: str | None = None
    ) -> None:
        self.path = Path(path)
        self._beat = beat
        self._host = host or socket.gethostname()
        self._token = uuid.uuid4().hex
        self._descriptor = -1
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._since = datetime.now(UTC).isoformat(timespec="seconds")
        self._epoch = 1
        self._what = "this search"
        self._lost: str | None = None

    def acquire(self, what: str = "this search") -> SearchLock:
        """Acquire the lock, after some heartbeats if its holder may be dead.

        Raises:
            ConfigError: If there is a holder, which is named; `what` is its subject. Also if the
                file is no lock.
        """
        self._what = what
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(what)
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = -1
            raise
        self._thread = threading.Thread(target=self._send_beats, name="search-lock", daemon=True)
        self._thread.start()
        return self

    def check_free(self, what: str = "this search") -> None:
        """Check that there is no holder; the time of the last heartbeat stays.

        Raises:
            ConfigError: As `acquire` does.
        """
        try:
            status = self.path.stat()
        except OSError:
            status = None
        self.acquire(what).release()
        if status is not None:  # `last_heartbeat` reads it
            os.utime(self.path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def release(self) -> None:
        """Release the lock; does nothing the second time.

        The file stays, empty: removing it would let two acquire locks on two files of one name.
        """
        if self._descriptor < 0:
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(ConfigError):
            holder = self._read()
            if holder is not None and holder["token"] == self._token:
                os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = -1

    def check(self) -> None:
        """Check that no other process has taken the lock over.

        Raises:
            ConfigError: If one has; this process must write nothing more.
        """
        if self._lost is None:
            self._keep(None)
        if self._lost is not None:
            raise ConfigError(self._lost)

    def _keep(self, beat: int | None) -> None:
        """Write a heartbeat (None: only where a late write of a former holder has replaced it)."""
        try:
            content = self.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return  # the file system is not reachable; neither is the journal
        holder = None
        with contextlib.suppress(ConfigError):
            holder = self._parse(content)
        if holder is not None and holder["token"] == self._token:
            if beat is not None:
                self._write(beat)
        elif holder is not None and holder.get("epoch", 0) < self._epoch:
            self._write(beat or 0)
        else:
            new = "another process, which no longer runs"
            if holder is not None:
                new = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
            self._lost = (
                f"{self._what} was taken over by {new}, as this process (started {self._since}) "
                f"had stood still for {self._beat * _MISSED_BEATS:g} s or more; it stops, and has "
                "changed nothing since"
            )

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self, what: str) -> None:
        locks = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(_refusal(what, self._read())) from None
        except OSError:
            locks = False  # of the file system: the heartbeat alone decides
        holder = self._read()
        perhaps_alive = holder is not None and not (locks and holder["host"] == self._host)
        if holder is not None and perhaps_alive and self._is_alive(holder):
            raise ConfigError(_refusal(what, self._read()))
        self._epoch = (holder.get("epoch", 0) if holder is not None else 0) + 1
        self._write(0)
        if perhaps_alive:
            # Another one may have waited for the same dead holder: the last to write has the lock
            time.sleep(self._beat)
            holder = self._read()
            if holder is None or holder["token"] != self._token:
                raise ConfigError(_refusal(what, holder))

    def _is_alive(self, holder: LockHolder) -> bool:
        for _ in range(_MISSED_BEATS):
            time.sleep(self._beat)
            now = self._read()
            if now and (now["token"], now["beat"]) != (holder["token"], holder["beat"]):
                return True
        return False

    def _send_beats(self) -> None:
        for beat in itertools.count(1):
            if self._ended.wait(self._beat):
                return
            with contextlib.suppress(OSError):  # a full disk: the lock itself stays
                self._keep(beat)
            if self._lost is not None:
                logger.error(self._lost)
                return

    def _write(self, beat: int) -> None:
        record: LockHolder = {
            "host": self._host,
            "pid": os.getpid(),
            "since": self._since,
            "token": self._token,
            "beat": beat,
            "epoch": self._epoch,
        }
        # Of one length, so that a reader never sees the end of an old one
        os.pwrite(self._descriptor, json.dumps(record).ljust(256).encode(), 0)
        os.fsync(self._descriptor)  # over NFS others see it only then

    def _read(self) -> LockHolder | None:
        """Return the holder, as the file says; None if there is none.

        Raises:
            ConfigError: If the file is no lock.
        """
        for attempt in range(3):
            try:
                # Opened anew: over NFS an open descriptor may show what its own machine has cached
                content = self.path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                return None
            with contextlib.suppress(ConfigError):
                return self._parse(content)
            time.sleep(0.05 * attempt)  # a heartbeat may be half written
        return self._parse(content)

    def _parse(self, content: str) -> LockHolder | None:
        if not content.strip("\0 \n"):
            return None
        try:
            record = json.loads(content)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not set(_KEYS) <= set(record):
            raise ConfigError(
                f"{self.path} is no lock of a search: expected a JSON object with "
                f"{', '.join(_KEYS)}, found {content[:60]!r}; if no "
                "process runs this search, remove the file"
            )
        return cast(LockHolder, record)


def last_heartbeat(path: Path, now: float) -> float | None:
    """Return when the holder of a lock wrote its last heartbeat, if it has long been silent.

    For readers alone: it compares the clock here with that of the file system, which `acquire` does
    not.

    Args:
        path: The lock file.
        now: In seconds since 1970, as what is returned.

    Returns:
        None while heartbeats are written, and where there is no file, as in a copy of a search.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    released = status.st_size == 0
    return status.st_mtime if released or now - status.st_mtime > _SILENT_SECONDS else None


def _refusal(what: str, holder: LockHolder | None) -> str:
    process = "another process"
    if holder is not None:
        process = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    return (
        f"{what} is being run by {process}; wait for it or stop it, or give this one another name"
    )
