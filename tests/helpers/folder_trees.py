"""The content of a folder, to compare before and after."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

Tree = dict[str, tuple[str, Any]]


def snapshot(root: Path) -> Tree:
    """Every path below a folder: kind, and bytes or where a link leads."""
    result: Tree = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder) / name
            if path.is_symlink():
                entry: tuple[str, Any] = ("link", str(path.readlink()))
            else:
                entry = ("folder", None) if path.is_dir() else ("file", path.read_bytes())
            result[str(path.relative_to(root))] = entry
    return result
