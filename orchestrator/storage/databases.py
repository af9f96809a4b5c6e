"""Copies of an sqlite database that is in use."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from attention.io.files import written_whole


def back_up(database: Path, backup: Path, scratch: Path | None = None) -> None:
    """Copy a database that is in use, whole or not at all.

    Args:
        scratch: A folder on a local disk, since sqlite and network file systems do not go together
            (None: the folder of the database).
    """
    backup.parent.mkdir(parents=True, exist_ok=True)
    local = (scratch or database.parent) / f".{backup.name}.copy"
    local.unlink(missing_ok=True)
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(local)) as target:
        source.backup(target)
    with written_whole(backup) as fresh:
        shutil.copyfile(local, fresh)
    local.unlink()


def restore(database: Path, backup: Path) -> bool:
    """Restore a database from its backup, if only that exists; return whether it did."""
    if database.exists() or not backup.exists():
        return False
    with written_whole(database) as fresh:
        shutil.copyfile(backup, fresh)
    return True
