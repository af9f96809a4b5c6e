"""Training checkpoints in a folder that is another disk than the node's own: staged there, and copied meanwhile.

Two different disks are injected: a test has one temporary folder.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import steps, writing

from trainers.jobs import checkpoints
from trainers.jobs.checkpoints import CheckpointNotSentError, CheckpointStore


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scratch folder of this node."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setattr(checkpoints.tempfile, "gettempdir", lambda: str(place))
    monkeypatch.setattr(checkpoints, "_on_different_disks", lambda *_: True)
    return place


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "work"), "run")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Files reach the folder only once it is set."""
    gate, real = threading.Event(), checkpoints.copy_folder

    def copy(*arguments: Any) -> None:
        assert gate.wait(60)
        real(*arguments)

    monkeypatch.setattr(checkpoints, "copy_folder", copy)
    yield gate
    gate.set()


def test_training_continues_while_a_checkpoint_is_copied_to_its_folder(
    store: CheckpointStore, gate: threading.Event, scratch: Path
) -> None:
    store.save(1, writing("one"))  # returns at once
    store.advance()
    assert steps(store) == []
    assert list(scratch.rglob("state.pt")) and not list(store.root.rglob("state.pt"))
    second = threading.Thread(target=store.save, args=(2, writing("two")), daemon=True)
    second.start()
    second.join(0.2)
    assert second.is_alive(), "two were on their way at once"
    gate.set()
    second.join(60)
    store.settle()
    assert steps(store) == [1, 2]
    newest, _, damage = store.newest_whole()
    assert newest is not None and not damage
    assert (store.folder(newest) / "deep" / "state.pt").read_text() == "two"
    assert not list(scratch.iterdir()), "what was copied is no longer here"
    assert {p.name for p in store.root.iterdir()} == {"checkpoints.json", "checkpoint_000001", "checkpoint_000002"}


@pytest.mark.parametrize("moment", ["half copied", "copied", "renamed", "in the index"])
def test_a_kill_leaves_the_checkpoint_before(
    store: CheckpointStore, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    for step in (1, 2):
        store.save(step, writing(str(step)), {"step": step})

    def half(source: Path, _: Any, target: str) -> None:
        shutil.copytree(source, target)
        (Path(target) / "deep" / "state.pt").write_text("")
        raise KeyboardInterrupt

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    write = CheckpointStore._write
    with monkeypatch.context() as patch:
        if moment == "half copied":
            patch.setattr(checkpoints, "copy_folder", half)
        elif moment == "copied":
            patch.setattr(CheckpointStore, "_enter", killed)
        elif moment == "renamed":
            patch.setattr(CheckpointStore, "_write", killed)
        else:
            patch.setattr(CheckpointStore, "_write", lambda *arguments: (write(*arguments), killed()))
        with pytest.raises((KeyboardInterrupt, CheckpointNotSentError)):
            store.save(3, writing("3"), {"step": 3})
    again = CheckpointStore(str(tmp_path / "work"), "run")
    newest, reports, damage = again.newest_whole()
    assert newest is not None and not damage
    assert newest.step == (3 if moment == "in the index" else 2) == reports[-1]["step"]
    assert (again.folder(newest) / "deep" / "state.pt").read_text() == str(newest.step)
    again.save(3, writing("3"), {"step": 3})
    assert steps(again) == [2, 3]
    assert {p.name for p in again.root.iterdir()} == {"checkpoints.json", "checkpoint_000002", "checkpoint_000003"}
    assert not list(scratch.iterdir())


def test_a_folder_that_takes_nothing_leaves_those_before_and_fails_a_report(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    store.save(1, writing("one"), {"step": 1})
    monkeypatch.setattr(checkpoints, "copy_folder", full)
    store.save(2, writing("two"))
    store.settle()
    assert steps(store) == [1]
    assert f"of step 2 did not come to {store.root}: [Errno 28] No space left" in caplog.text
    with pytest.raises(CheckpointNotSentError, match="No space left on device"):
        store.save(3, writing("three"), {"step": 3})


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_a_node_without_room_writes_to_the_folder_at_once(
    store: CheckpointStore, scratch: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    usage = shutil.disk_usage(scratch)._replace(free=free)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage)
    written: list[Path] = []
    store.expected_bytes = 1 << 30
    store.save(1, lambda folder: written.append(folder), {"step": 1})
    (folder,) = written
    assert folder.is_relative_to(store.root if free == 0 else scratch)
    assert steps(store) == [1]


def both(rank: int, place: str) -> Any:
    """The files that each of two workers on separate nodes writes and finds."""
    checkpoints.tempfile.gettempdir = lambda: f"{place}/scratch-{rank}"
    checkpoints._on_different_disks = lambda *_: True
    Path(f"{place}/scratch-{rank}").mkdir(parents=True)

    def write(folder: Path) -> None:
        (folder / f"part-{rank}").write_text(f"of {rank}")

    store = CheckpointStore(f"{place}/work", "run", rank, 2)
    store.save(1, write)
    store.save(2, write, {"step": 2} if rank == 0 else {})
    saved, reports, damage = CheckpointStore(f"{place}/work", "run", rank, 2).newest_whole()
    assert saved is not None
    result = {p.name: p.read_text() for p in store.folder(saved).iterdir()}
    remaining = sorted(p.name for p in Path(place).rglob(".*"))
    return saved.step, sorted(saved.digests), result, [r["step"] for r in reports], damage, remaining


def test_two_workers_copy_their_own_files(on_both: Any, tmp_path: Path) -> None:
    one, other = on_both(tmp_path / "both", both, str(tmp_path / "place"))
    parts = {"part-0": "of 0", "part-1": "of 1"}
    assert one == other == (2, sorted(parts), parts, [2], [], [])


def test_a_damaged_checkpoint_of_another_run_is_not_opened(store: CheckpointStore) -> None:
    store.save(1, writing("one"), {"step": 1})
    newest, _, _ = store.newest_whole()
    assert newest is not None
    folder = store.folder(newest)
    other = store.of_run("other").of_run("run")
    with other.opened(str(folder)) as opened:
        assert opened == folder
    (folder / "deep" / "state.pt").write_text("0ne")
    with pytest.raises(OSError, match="is not what was written .*; remove this folder"), other.opened(str(folder)):
        pass
    former = store.root / "checkpoint_000009"  # of a version that had no index
    former.mkdir()
    with other.opened(str(former)) as opened:
        assert opened == former
