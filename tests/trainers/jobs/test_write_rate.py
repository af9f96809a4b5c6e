"""Write speed at the place of checkpoints, and its report."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainers.jobs import write_rate
from trainers.jobs.checkpoints import CheckpointStore
from trainers.jobs.train_job import TrainJob
from trainers.jobs.write_rate import CheckpointCost, checkpoint_cost, describe_checkpoints, read_cost


@pytest.fixture
def job(tmp_path: Path) -> TrainJob:
    return TrainJob(
        model_dir="model",
        train_file="train",
        eval_file="eval",
        out_dir=str(tmp_path / "out"),
        storage_path=str(tmp_path / "work"),
        run_name="run",
        milestones=(1,),
        checkpoint_minutes=30.0,
    )


def test_a_seven_billion_checkpoint_on_slow_storage_is_warned_of() -> None:
    slow = CheckpointCost(94_000_000_000, 100e6, 30.0)
    output = "a checkpoint of 94 GB takes about 16 min at 100 MB/s, every 30 min"
    assert slow.describe() == output
    assert slow.warning is not None and slow.warning.startswith(f"{output}: more than a tenth of the time")
    assert "storage that takes 522 MB/s" in slow.warning
    assert replace(slow, bytes_per_second=1e9).warning is None
    assert replace(slow, minutes=None).warning is None
    expected = "94 GB each, every 30 min; at 522 MB/s they are a tenth of the time"
    assert describe_checkpoints(94_000_000_000, 30) == {"checkpoints": expected}
    assert describe_checkpoints(94_000_000, 30) == {}


@pytest.mark.parametrize("at_address", [False, True])
def test_the_place_is_measured_where_checkpoints_are_large(
    job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_address: bool
) -> None:
    job = replace(job, checkpoint_address=f"file://{tmp_path}/bucket" if at_address else None)
    store = CheckpointStore.of(job)
    assert checkpoint_cost(job, store, 1000) is None and read_cost(store.named) is None
    monkeypatch.setattr(write_rate, "LARGE", 0)
    started = time.perf_counter()
    cost = checkpoint_cost(job, store, 1000)
    assert cost is not None and read_cost(store.named) == cost
    assert 1e5 < cost.bytes_per_second < 1e12
    assert time.perf_counter() - started < 60
    assert not list(store.root.glob(".probe*"))


def test_a_slow_place_is_given_little(job: TrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    def slowly(store: Any, file: str, block: bytes, count: int) -> None:
        written.append(count)
        Path(file).write_bytes(b"")
        clock.now += 0.1 * count

    monkeypatch.setattr(write_rate, "time", clock)

    monkeypatch.setattr(write_rate, "LARGE", 0)
    monkeypatch.setattr(write_rate, "_write", slowly)
    cost = checkpoint_cost(job, CheckpointStore.of(job), 1000)
    assert written == [1, 4]
    assert cost is not None and cost.bytes_per_second == pytest.approx(10 * 2**20)


def test_a_place_that_cannot_be_written_to_is_not_measured(job: TrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> None:
        raise OSError("the bucket is away")

    monkeypatch.setattr(write_rate, "LARGE", 0)
    monkeypatch.setattr(write_rate, "_write", away)
    assert checkpoint_cost(job, CheckpointStore.of(job), 1000) is None
