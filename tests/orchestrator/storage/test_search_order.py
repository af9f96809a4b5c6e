"""Which search of a name is the newest, and which has ended: by records, never by the times of files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pyarrow import fs

from orchestrator.storage.journal import Journal
from orchestrator.storage.mirror import Mirror
from orchestrator.storage.paths import SearchFolder


def begun(storage: Path, began: float, **state: str) -> SearchFolder:
    folder = SearchFolder.fresh(storage, "demo")
    Journal(folder.journal).append("search", format=2, rungs=2, time=began)
    folder.snapshot.write_text("name: demo\n")
    folder.state.write_text(json.dumps({"started": "2026-11-01T00:00:00+00:00", **state}))
    return folder


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Two searches that have ended, and a third that was killed."""
    storage = tmp_path / "storage"
    begun(storage, 1000.0, ended="done")
    begun(storage, 2000.0, ended="done")
    begun(storage, 3000.0)
    return storage


def test_after_a_refill_the_newest_search_is_the_same(storage: Path, tmp_path: Path) -> None:
    Mirror(fs.LocalFileSystem(), str(tmp_path / "bucket"), storage).push()
    fresh = tmp_path / "fresh"
    Mirror(fs.LocalFileSystem(), str(tmp_path / "bucket"), fresh).pull()
    # Files come in any order
    for order, name in enumerate(("demo-3", "demo-2", "demo")):
        os.utime(fresh / name / "search.yaml", (order, order))
    assert SearchFolder.newest(fresh, "demo").root.name == "demo-3"
    assert [folder.root.name for folder in SearchFolder.unended(fresh, "demo")] == ["demo-3"]


def test_searches_of_one_moment_are_ordered_by_their_number(tmp_path: Path) -> None:
    for _ in range(11):
        begun(tmp_path, 1000.0)
    assert SearchFolder.newest(tmp_path, "demo").root.name == "demo-11"


def test_without_a_journal_the_state_says_when_a_search_began(storage: Path) -> None:
    (storage / "demo" / "journal.jsonl").unlink()
    assert SearchFolder.newest(storage, "demo").root.name == "demo", "in November 2026"


@pytest.mark.parametrize("content", ["", '{"ended": "do', "[1]", "null", "\x00\xff"])
def test_a_state_that_cannot_be_read_is_that_of_a_search_that_has_not_ended(storage: Path, content: str) -> None:
    state = storage / "demo-2" / "state.json"
    state.write_bytes(content.encode("latin-1"))
    assert [folder.root.name for folder in SearchFolder.unended(storage, "demo")] == ["demo-2", "demo-3"]
    assert SearchFolder(storage / "demo-2").read_state() == {}


def test_a_name_that_ends_in_a_number_is_of_another_search(storage: Path) -> None:
    other = SearchFolder.fresh(storage, "demo-3")
    assert other.root.name == "demo-3-2"
    Journal(other.journal).append("search", format=2, rungs=2, time=4000.0)
    other.snapshot.write_text("name: demo-3\n")
    assert SearchFolder.newest(storage, "demo").root.name == "demo-3"
    assert SearchFolder.unended(storage, "demo-3") == [other]
    (storage / "demo-2" / "search.yaml").write_text("name: demo-2\n")
    assert SearchFolder.newest(storage, "demo-2").root.name == "demo-2"
