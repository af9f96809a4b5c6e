"""Files written in one step: the old content or the new, never half of either."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attention.io.files import sha256, write_whole, written_whole


def test_a_file_is_made_replaced_and_digested(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "x.json"
    for content in ("one ä", b"two"):
        write_whole(file, content)
        raw = content if isinstance(content, bytes) else content.encode()
        assert file.read_bytes() == raw and sha256(file) == hashlib.sha256(raw).hexdigest()
    assert list(file.parent.iterdir()) == [file]


def test_what_fails_or_is_interrupted_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "x"
    write_whole(file, "old")
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises(type(error)), written_whole(file) as fresh:
            fresh.write_text("half")
            assert file.read_text() == "old"
            raise error
    assert [p.name for p in tmp_path.iterdir()] == ["x"] and file.read_text() == "old"


def test_threads_and_what_a_killed_process_left_are_not_in_the_way(tmp_path: Path) -> None:
    file, remaining = tmp_path / "x", tmp_path / f".x.{os.getpid()}.new"
    remaining.write_text("half")
    texts = [f"{i}" * 100_000 for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_whole(file, text), texts))
    assert file.read_text() in texts and remaining.read_text() == "half"
    assert sorted(p.name for p in tmp_path.iterdir()) == [remaining.name, "x"]
