"""Copies of an sqlite database that is in use."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

HOST = "127.0.0.1"
SQLITE = "sqlite:///"
RESTART_SECONDS = 5.0


def back_up(database: Path, backup: Path, scratch: Path | None = None) -> None:
    """Copy a database that is in use, whole or not at all. `scratch`: a folder on a local disk (its own)."""
    backup.parent.mkdir(parents=True, exist_ok=True)
    local = (scratch or database.parent) / f".{backup.name}.copy"  # sqlite and network file systems do not go together
    local.unlink(missing_ok=True)
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(local)) as target:
        source.backup(target)
    fresh = backup.with_name(f".{backup.name}.new")
    shutil.copyfile(local, fresh)
    fresh.replace(backup)
    local.unlink()


def restore(database: Path, backup: Path) -> bool:
    """Take the database from its backup, if only that exists. Whether it did."""
    if database.exists() or not backup.exists():
        return False
    database.parent.mkdir(parents=True, exist_ok=True)
    fresh = database.with_name(f".{database.name}.new")
    shutil.copyfile(backup, fresh)
    fresh.replace(database)
    return True
