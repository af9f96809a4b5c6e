"""The folder on this machine for what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `HEADFOLD_CACHE`, else `headfold` in the user's cache (`XDG_CACHE_HOME`, ~/.cache)."""
    if folder := os.environ.get("HEADFOLD_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headfold"
