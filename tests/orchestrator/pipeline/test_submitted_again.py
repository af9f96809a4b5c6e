"""A job that is submitted again, on a machine that has the storage's address alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from pyarrow import fs
from small_searches import small_search

from orchestrator.pipeline import _new_folder, _unended_search
from orchestrator.storage.mirror import Mirror


def test_it_resumes_with_its_search_after_a_refill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two searches of its name have ended, the third was killed; files come back in the order of their names."""
    config = small_search(tmp_path / "model", tmp_path / "lost", name="demo")
    for ended in ({"ended": "done"}, {"ended": "done"}, {}):
        folder = _new_folder(config, tmp_path / "lost")
        folder.state.write_text(json.dumps({"started": "2026-11-26T05:00:00+00:00", **ended}))
    Mirror(fs.LocalFileSystem(), str(tmp_path / "bucket"), tmp_path / "lost").push()
    shutil.rmtree(tmp_path / "lost")
    Mirror(fs.LocalFileSystem(), str(tmp_path / "bucket"), tmp_path / "lost").pull()
    for second, name in enumerate(("demo-2", "demo-3", "demo")):
        os.utime(tmp_path / "lost" / name / "search.yaml", (second, second))
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    goes_on = _unended_search(config, tmp_path / "lost")
    assert goes_on is not None and goes_on.root == tmp_path / "lost" / "demo-3"
