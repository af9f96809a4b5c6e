"""MLflow on the head of a cluster: a server on the loopback address that is kept up, and a database that is kept safe.

    python -m orchestrator.tracking.mlflow_server

Settings are environment variables, as `cluster.yaml` sets them: HEADFOLD_MLFLOW_STORE (database), _ARTIFACTS (folder or
object store), _BACKUP (a file on the shared file system; only for sqlite), _PORT (5000) and _BACKUP_SECONDS (300).
A database that is not there is taken from the backup: a new head goes on with the records of a lost one.
"""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from orchestrator.child_processes import Child
from orchestrator.storage.databases import back_up, restore

HOST = "127.0.0.1"
SQLITE = "sqlite:///"
RESTART_SECONDS = 5.0


@dataclass(frozen=True)
class Settings:
    """`backup` None: the database is not a file of ours, and safe elsewhere."""

    store: str
    artifacts: str
    backup: Path | None
    port: int
    backup_seconds: float

    @classmethod
    def of_environment(cls) -> Settings:
        """Raises ValueError naming the variable that is missing."""
        prefix = "HEADFOLD_MLFLOW_"
        given = {key.removeprefix(prefix): value for key, value in os.environ.items() if key.startswith(prefix)}
        if missing := next((name for name in ("STORE", "ARTIFACTS") if not given.get(name)), None):
            raise ValueError(f"{prefix}{missing} must be set, see cluster.yaml")
        store, backup = given["STORE"], given.get("BACKUP")
        kept = Path(backup) if backup and store.startswith(SQLITE) else None
        seconds = float(given.get("BACKUP_SECONDS", 300))
        return cls(store, given["ARTIFACTS"], kept, int(given.get("PORT", 5000)), seconds)

    @property
    def database(self) -> Path:
        return Path(self.store.removeprefix(SQLITE))

    @property
    def command(self) -> list[str]:
        server = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(self.port)]
        return [*server, "--backend-store-uri", self.store, "--artifacts-destination", self.artifacts]


def taken(port: int) -> bool:
    """Whether somebody listens there already."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


class Server:
    """The server's process, started again when it ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.process: Child | None = None

    def keep_up(self) -> None:
        if self.process is None or self.process.poll() is not None:
            if self.process is not None:
                print(f"MLflow ended with exit code {self.process.returncode}, starting it again", flush=True)
            environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
            self.process = Child(self.settings.command, environment)

    def end(self, patience: float = 20) -> None:
        """End the server with all its workers. One that was just starting a worker may wait for it for ever: after
        `patience` seconds it is killed, since the last backup is still to be made."""
        if self.process is not None and self.process.end(patience):
            print(f"MLflow did not end within {patience:.0f} s of SIGTERM, and was killed", flush=True)


def main() -> int:
    """Serve until SIGTERM or Ctrl-C."""
    settings = Settings.of_environment()
    if taken(settings.port):
        print(f"port {settings.port} is taken: MLflow is already running", flush=True)
        return 0
    if settings.backup is not None and restore(settings.database, settings.backup):
        print(f"database taken from {settings.backup}", flush=True)
    server = Server(settings)

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    copied = time.monotonic()
    try:
        while True:
            server.keep_up()
            time.sleep(RESTART_SECONDS)
            if settings.backup is not None and time.monotonic() - copied >= settings.backup_seconds:
                copied = time.monotonic()
                try_to_back_up(settings.database, settings.backup)
    except KeyboardInterrupt:
        return 0
    finally:
        server.end()
        if settings.backup is not None:
            try_to_back_up(settings.database, settings.backup)


def try_to_back_up(database: Path, backup: Path) -> None:
    """A file system that is away for a while must not take the server with it."""
    try:
        if database.exists():
            back_up(database, backup)
    except (OSError, sqlite3.Error) as error:
        print(f"no backup to {backup}: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
