"""One driver a search: a second one is refused, and told who is at work.

Two things are asked, since a shared file system may lock on one machine only. `flock`: the kernel gives it back when
its holder dies, however it dies. And, where the holder was on another machine, its heartbeat: a count in the file that
increases while it lives. Whoever comes watches whether the count moves, by a clock of his own; no two clocks are
compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import socket
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.config.schema import ConfigError

BEAT_SECONDS = 2.0
PATIENCE = 5
"""Heartbeats that must be missed on end before a holder on another machine counts as dead."""


class SearchLock(contextlib.AbstractContextManager):
    """Held from `acquire` to `release`, or to the death of the process."""

    def __init__(self, path: str | Path, *, beat: float = BEAT_SECONDS, host: str | None = None) -> None:
        self.path, self._beat, self._host = Path(path), beat, host or socket.gethostname()
        self._token, self._descriptor = uuid.uuid4().hex, -1
        self._ended, self._thread = threading.Event(), None
        self._since = datetime.now(UTC).isoformat(timespec="seconds")

    def acquire(self, what: str = "this search") -> SearchLock:
        """Raises ConfigError naming the holder if there is one. Waits some heartbeats for one that may be dead."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(what)
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = -1
            raise
        self._thread = threading.Thread(target=self._keep_beating, name="search-lock", daemon=True)
        self._thread.start()
        return self

    def release(self) -> None:
        """Idempotent. The file stays, empty: removing it would let two hold locks on two files of one name."""
        if self._descriptor < 0:
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._read().get("token") == self._token:
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = -1

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self, what: str) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(_refusal(what, self._read())) from None
        except OSError:
            pass  # a file system without locks: the heartbeat alone decides
        holder = self._read()
        if holder and holder["host"] != self._host and self._lives(holder):
            raise ConfigError(_refusal(what, self._read()))
        self._write(0)
        if holder and holder["host"] != self._host:
            time.sleep(self._beat)  # another one may have waited for the same dead holder: the last to write has it
            if self._read().get("token") != self._token:
                raise ConfigError(_refusal(what, self._read()))

    def _lives(self, holder: dict[str, Any]) -> bool:
        for _ in range(PATIENCE):
            time.sleep(self._beat)
            now = self._read()
            if now and (now["token"], now["beat"]) != (holder["token"], holder["beat"]):
                return True
        return False

    def _keep_beating(self) -> None:
        for beat in itertools.count(1):
            if self._ended.wait(self._beat):
                return
            with contextlib.suppress(OSError):  # a full disk: the lock itself holds on
                self._write(beat)

    def _write(self, beat: int) -> None:
        record = {"host": self._host, "pid": os.getpid(), "since": self._since, "token": self._token, "beat": beat}
        # Of one length, so that a reader never sees the end of an old one
        os.pwrite(self._descriptor, json.dumps(record).ljust(256).encode(), 0)

    def _read(self) -> dict[str, Any]:
        """Who holds it, as the file says; empty if nobody does."""
        try:
            # Opened anew: over NFS an open descriptor may show what its own machine has cached
            return json.loads(self.path.read_text(encoding="utf-8") or "{}")
        except (OSError, ValueError):
            return {}


def _refusal(what: str, holder: dict[str, Any]) -> str:
    who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}" if holder else "another process"
    return f"{what} is being run by {who}; wait for it or stop it, or give this one another name"
