"""Training checkpoints that workers send to an address themselves: what is named there, when, and what is read back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import steps, writing
from test_carrying import PLAN, SAME, Alone

from trainers.jobs import checkpoints
from trainers.jobs.checkpoints import AddressAwayError, CheckpointNotSentError, CheckpointStore, is_saved
from trainers.jobs.run import run_job
from trainers.jobs.train_job import TrainJob
from trainers.settings import TrainSettings
from trainers.zero import group_of_one


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scratch folder of this node."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setattr(checkpoints.tempfile, "gettempdir", lambda: str(place))
    return place


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def store(tmp_path: Path, bucket: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "work"), "run", address=f"file://{bucket}/train")


class Link:
    """Between here and the address: files pass only while it is `open`, and not at all once it is `cut`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.cut, real = threading.Event(), False, checkpoints.copy_folder

        def copy(source: Path, *rest: Any) -> None:
            assert self.open.wait(60)
            if self.cut:
                raise OSError("the bucket is away")
            real(source, *rest)

        monkeypatch.setattr(checkpoints, "copy_folder", copy)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    created = Link(monkeypatch)
    yield created
    created.open.set()


def until(message: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not message():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_training_continues_while_a_checkpoint_is_being_sent(store: CheckpointStore, link: Link, scratch: Path) -> None:
    store.save(1, writing("one"))  # returns at once
    store.advance()
    assert steps(store) == []
    link.open.set()

    def came() -> bool:
        store.advance()
        return steps(store) == [1]

    until(came)
    assert not list(scratch.rglob("*.pt")), "what was sent is no longer here"


def test_the_next_one_waits_for_the_one_on_its_way(store: CheckpointStore, link: Link) -> None:
    store.save(1, writing("one"))
    second = threading.Thread(target=store.save, args=(2, writing("two")), daemon=True)
    second.start()
    second.join(0.3)
    assert second.is_alive() and steps(store) == []
    link.open.set()
    second.join(60)
    assert not second.is_alive() and steps(store) == [1]
    store.settle()
    assert steps(store) == [1, 2]


def test_a_report_waits_for_the_checkpoint_that_it_names(store: CheckpointStore, link: Link, tmp_path: Path) -> None:
    report: dict[str, Any] = {"step": 3}
    saving = threading.Thread(target=store.save, args=(3, writing("three"), report), daemon=True)
    saving.start()
    saving.join(0.3)
    assert saving.is_alive() and store.read() == ([], [])
    link.open.set()
    saving.join(60)
    path = str(tmp_path / "work" / "run" / "checkpoint_000003")
    assert report["checkpoint_path"] == path
    assert steps(store) == [3] and store.read()[1] == [report]
    assert not (tmp_path / "work").exists(), "nothing lies in the folder that the driver sends"
    address = f"file://{tmp_path}/bucket/train"
    assert is_saved(path, address) and not is_saved(path.replace("03", "04"), address) and not is_saved(path, None)


def test_what_does_not_come_is_reported_and_leaves_those_before(
    store: CheckpointStore, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    link.open.set()
    store.save(1, writing("one"), {"step": 1})
    link.cut = True
    with caplog.at_level(logging.WARNING):
        store.save(2, writing("two"))
        store.settle()
    assert "training checkpoint of step 2 did not come to its address: the bucket is away" in caplog.text
    with pytest.raises(CheckpointNotSentError, match="step 3 .* the bucket is away"):
        store.save(3, writing("three"), {"step": 3})
    assert steps(store) == [1] and [r["step"] for r in store.read()[1]] == [1]
    link.cut = False
    for step in (3, 4, 5):
        store.save(step, writing(str(step)), {"step": step})
    assert steps(store) == [4, 5]
    assert sorted(p.name for p in store.root.iterdir()) == [
        "checkpoint_000004",
        "checkpoint_000005",
        "checkpoints.json",
    ]
    store.keep_only("checkpoint_000005")
    assert steps(store) == [5] and not (store.root / "checkpoint_000004").exists()


def test_an_index_that_cannot_be_written_ends_no_training_between_milestones(
    store: CheckpointStore, link: Link, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise OSError("the bucket is away")

    link.open.set()
    store.save(1, writing("one"), {"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "_write", away)
        store.save(2, writing("two"))
        store.settle()
        assert "training checkpoint of step 2 did not come to its address: the bucket is away" in caplog.text
        with pytest.raises(CheckpointNotSentError, match="step 3 .* the bucket is away"):
            store.save(3, writing("three"), {"step": 3})
    assert steps(store) == [1]
    store.save(4, writing("four"), {"step": 4})
    assert steps(store) == [1, 4]


class Away:
    """A file system that does not answer."""

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            raise OSError("no route to host")

        return call


def test_an_address_that_does_not_answer_is_named_and_is_no_damage(store: CheckpointStore, link: Link) -> None:
    link.open.set()
    store.save(1, writing("one"), {"step": 1})
    (saved,), _ = store.read()
    files, store.files = store.files, Away()  # pyright: ignore[reportAttributeAccessIssue]
    for request in (store.read, lambda: store.damage(saved)):
        with pytest.raises(AddressAwayError, match="run at their address: .*no route to host"):
            request()
    store.files = files
    assert store.damage(saved) is None


@pytest.mark.parametrize("moment", ["half sent", "sent", "in the index", "one removed"])
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_is_whole(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moment: str
) -> None:
    for step in (1, 2):
        store.save(step, writing(str(step)), {"step": step})

    def half(source: Path, files: Any, target: str) -> None:
        Path(target, "deep").mkdir(parents=True)
        Path(target, "deep", "state.pt").write_text("")
        raise KeyboardInterrupt

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    write, remove = CheckpointStore._write, CheckpointStore._remove_all_but
    with monkeypatch.context() as patch:
        if moment == "half sent":
            patch.setattr(checkpoints, "copy_folder", half)
        elif moment == "sent":
            patch.setattr(CheckpointStore, "_write", killed)
        elif moment == "in the index":
            patch.setattr(CheckpointStore, "_write", lambda *arguments: (write(*arguments), killed()))
        else:
            patch.setattr(CheckpointStore, "_remove_all_but", lambda *arguments: (remove(*arguments), killed()))
        with pytest.raises((KeyboardInterrupt, CheckpointNotSentError)):
            store.save(3, writing("3"), {"step": 3})
    again = CheckpointStore(str(tmp_path / "work"), "run", address=f"file://{tmp_path}/bucket/train")
    newest, reports, damage = again.newest_whole()
    assert newest is not None and not damage
    assert newest.step == (2 if moment in ("half sent", "sent") else 3) == reports[-1]["step"]
    assert (again.folder(newest) / "deep" / "state.pt").read_text() == str(newest.step)
    again.release()
    again.save(3, writing("3"), {"step": 3})
    assert steps(again) == [2, 3] and {p.name for p in again.root.glob("check*_*")} == {k.name for k in again.read()[0]}


def test_an_address_that_is_away_is_no_damage(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(1, writing("one"), {"step": 1})

    def away(*_: Any) -> None:
        raise OSError("the bucket is away")

    monkeypatch.setattr(checkpoints, "fetch", away)
    with pytest.raises(OSError, match="away"):
        store.newest_whole()


def both(rank: int, place: str) -> Any:
    """The files that each of two workers writes, and finds on its node."""
    checkpoints.tempfile.gettempdir = lambda: f"{place}/scratch"

    def write(folder: Path) -> None:
        (folder / f"part-{rank}").write_text(f"of {rank}")

    def store() -> CheckpointStore:
        return CheckpointStore(f"{place}/work", "run", rank, 2, f"file://{place}/bucket")

    first = store()
    first.save(1, write)
    first.settle()
    first.save(2, write, {"step": 2} if rank == 0 else {})
    again = store()
    stored, reports, damage = again.newest_whole()
    assert stored is not None
    result = {p.name: p.read_text() for p in again.folder(stored).iterdir()}
    again.release()
    remaining = list(Path(f"{place}/scratch").rglob("part-*"))
    return stored.step, sorted(stored.digests), result, [r["step"] for r in reports], damage, remaining


def test_two_workers_send_their_own_files_and_fetch_all_together(on_both: Any, tmp_path: Path) -> None:
    one, other = on_both(tmp_path / "both", both, str(tmp_path / "place"))
    assert one == other
    parts = {"part-0": "of 0", "part-1": "of 1"}
    assert one == (2, sorted(parts), parts, [2], [], [])


# ---- whole jobs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tiny_job: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    group_of_one()
    generator = torch.Generator().manual_seed(0)
    train, held_out = (torch.randint(0, 64, (rows, 16), generator=generator) for rows in (100, 9))
    settings = TrainSettings(learning_rate=3e-3, seed=1)
    folder = tmp_path_factory.mktemp("at-an-address")
    return tiny_job(folder, PLAN, train, held_out, settings, milestones=(2, 4, 6), keep_best=True)


@pytest.fixture(scope="module")
def whole(job: TrainJob) -> dict[str, Any]:
    return run_job(job, Alone())["metrics"]


@pytest.mark.parametrize("damaged", [(), (4,), (3, 4)])
def test_a_job_resumes_from_the_files_at_the_address(
    job: TrainJob, whole: dict[str, Any], bucket: Path, scratch: Path, tmp_path: Path, damaged: tuple[int, ...]
) -> None:
    there = replace(
        job, out_dir=str(tmp_path / "out"), storage_path=str(tmp_path / "work"), checkpoint_steps=1,
        checkpoint_address=f"file://{bucket}/train",
    )  # fmt: skip
    assert run_job(there, Alone(until=2)) == {"stopped": 4}
    assert [p.name for p in (tmp_path / "work").rglob("*") if p.is_file()] == ["curve.jsonl"]
    root = bucket / "train" / job.run_name
    assert {p.name for p in root.glob("checkpoint_*")} == {"checkpoint_000003", "checkpoint_000004"}
    for step in damaged:
        file = max((root / f"checkpoint_{step:06d}").rglob("*.pt"), key=lambda path: path.stat().st_size)
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
    link = Alone()
    metrics = run_job(there, link)["metrics"]
    assert {name: metrics[name] for name in SAME} == {name: whole[name] for name in SAME}
    assert link.steps == [2, 4, 6]
    assert ("notes" in metrics) == bool(damaged)
    assert not [p for p in scratch.rglob("*") if p.is_file()]
    more = replace(
        there, run_name="more", start_step=6, resume_from=metrics["checkpoint_path"], milestones=(8,), total_steps=8,
        out_dir=str(tmp_path / "more"),
    )  # fmt: skip
    assert run_job(more, Alone())["metrics"]["step"] == 8
    assert not [p for p in scratch.rglob("*") if p.is_file()]
