"""A checkpoint in the cache of the hub's library, which is all that there is of the hub offline, as the tests run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


def put_in_hub_cache(monkeypatch: pytest.MonkeyPatch, cache: Path, name: str, folder: Path) -> str:
    """Copy `folder` to an empty cache under a name of the hub, which is returned."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    place = cache / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, place / "snapshots" / ("0" * 40))
    return name
