"""MLflow on the head of a cluster: a server on the loopback address, and backups of its database.

    python -m orchestrator.tracking.mlflow_server

Settings are environment variables, as `cluster.yaml` sets them: HEADFOLD_MLFLOW_STORE (database),
_ARTIFACTS (folder or object store), _BACKUP (a file on the shared file system; only for sqlite),
_PORT (5000) and _BACKUP_SECONDS (300). A database that is not there is restored from the backup: a
new head node continues with the records of a lost one.
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
class ServerSettings:
    """Settings of the server."""

    store: str
    artifacts: str
    backup: Path | None
    """None for a database that is not a local file, whose own server makes backups."""
    port: int
    backup_seconds: float

    @classmethod
    def of_environment(cls) -> ServerSettings:
        """Read the environment.

        Raises:
            ValueError: Naming the variable that is missing.
        """
        prefix = "HEADFOLD_MLFLOW_"
        values = {
            key.removeprefix(prefix): value
            for key, value in os.environ.items()
            if key.startswith(prefix)
        }
        for name in ("STORE", "ARTIFACTS"):
            if not values.get(name):
                raise ValueError(f"{prefix}{name} must be set, see cluster.yaml")
        backup = values.get("BACKUP")
        return cls(
            store=values["STORE"],
            artifacts=values["ARTIFACTS"],
            backup=Path(backup) if backup and values["STORE"].startswith(SQLITE) else None,
            port=int(values.get("PORT", 5000)),
            backup_seconds=float(values.get("BACKUP_SECONDS", 300)),
        )

    @property
    def database(self) -> Path:
        return Path(self.store.removeprefix(SQLITE))

    @property
    def command(self) -> list[str]:
        server = [sys.executable, "-m", "mlflow", "server", "--host", HOST]
        return [*server, "--port", str(self.port), "--artifacts-destination", self.artifacts]

    @property
    def environment(self) -> dict[str, str]:
        """The store, whose address may have a password, which other users see in arguments."""
        return {
            "MLFLOW_BACKEND_STORE_URI": self.store,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }


def is_taken(port: int) -> bool:
    """Return whether a process listens at a port of the loopback address."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


class Server:
    """The server's process, started again when it ends."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.process: Child | None = None

    def keep_up(self) -> None:
        """Start the process unless it runs."""
        if self.process is None or self.process.poll() is not None:
            if self.process is not None:
                print(
                    f"MLflow exited with code {self.process.returncode}; restarting it",
                    flush=True,
                )
            self.process = Child(self.settings.command, os.environ | self.settings.environment)

    def end(self, patience: float = 20) -> None:
        """End the server with all its workers.

        A server that was starting a worker may wait for it without end: after `patience` seconds it
        is killed, so that the last backup can be made.
        """
        if self.process is not None and self.process.end(patience):
            print(
                f"MLflow did not end within {patience:.0f} s of SIGTERM, and was killed", flush=True
            )


def main() -> int:
    """Serve until SIGTERM or Ctrl-C."""
    settings = ServerSettings.of_environment()
    if is_taken(settings.port):
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
    """Back up the database; an unavailable file system must not end the server."""
    try:
        if database.exists():
            back_up(database, backup)
    except (OSError, sqlite3.Error) as error:
        print(f"cannot back up to {backup}: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
