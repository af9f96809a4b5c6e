"""Write speed at the place of the training checkpoints, measured before a training.

All workers write at the same time, as they do with a checkpoint: for a second or so, and only where
a checkpoint is large enough to matter. The result is stored next to the run's curve.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attention.base.timing import duration
from attention.io.files import write_whole
from trainers.jobs.checkpoints import CheckpointStore, gather_objects
from trainers.jobs.train_job import TrainJob

LARGE = 1 << 30
"""Bytes of a checkpoint from which on its place is measured."""
_NAME = "write_rate.json"
_PROBES = tuple(mebibytes << 20 for mebibytes in (1, 4, 16, 64))
_ENOUGH_SECONDS = 0.3
"""Longest time of one probe, after which no larger one is written."""
_SHARE = 0.1
"""Share of a training's time above which the time of checkpoints is reported."""


@dataclass(frozen=True)
class CheckpointCost:
    """The time that the checkpoints of a training take.

    Attributes:
        checkpoint_bytes: Of one, all workers together.
        bytes_per_second: That its place took of all workers together.
        minutes: Between two.
    """

    checkpoint_bytes: int
    bytes_per_second: float
    minutes: float | None

    @property
    def seconds(self) -> float:
        """From the start of a checkpoint until it is at its place."""
        return self.checkpoint_bytes / self.bytes_per_second

    def describe(self) -> str:
        """Return size, time and rate in words."""
        how_often = "" if self.minutes is None else f", every {duration(60 * self.minutes)}"
        return (
            f"a checkpoint of {decimal_bytes(self.checkpoint_bytes)} takes about "
            f"{duration(self.seconds)} at {decimal_bytes(self.bytes_per_second)}/s{how_often}"
        )

    @property
    def warning(self) -> str | None:
        """Advice where checkpoints take more than a tenth of the time; None elsewhere."""
        if self.minutes is None or self.seconds <= _SHARE * 60 * self.minutes:
            return None
        return (
            f"{self.describe()}: more than a tenth of the time; give storage that takes "
            f"{_needed_rate(self.checkpoint_bytes, self.minutes)}, or a longer checkpoint_minutes"
        )


def checkpoint_cost(
    job: TrainJob, store: CheckpointStore, checkpoint_bytes: int
) -> CheckpointCost | None:
    """Measure the place of a job's checkpoints; all workers call it together.

    Returns:
        None where a checkpoint is too small to matter, or the place cannot be written to, which
        the first checkpoint will say.
    """
    if checkpoint_bytes < LARGE:
        return None
    rates = gather_objects(_rate(store), store.world_size)
    if any(rate is None for rate in rates):
        return None
    cost = CheckpointCost(checkpoint_bytes, sum(rates), job.checkpoint_minutes)
    if store.rank == 0:
        store.named.mkdir(parents=True, exist_ok=True)
        write_whole(store.named / _NAME, json.dumps(asdict(cost)))
    return cost


def read_cost(folder: Path) -> CheckpointCost | None:
    """Return what the run in `folder` has measured; None if it has not."""
    with contextlib.suppress(FileNotFoundError):
        return CheckpointCost(**json.loads((folder / _NAME).read_text(encoding="utf-8")))
    return None


def describe_checkpoints(checkpoint_bytes: int, minutes: float) -> dict[str, str]:
    """Return what checkpoints will need, by what it is about; nothing for small ones."""
    if checkpoint_bytes < LARGE:
        return {}
    needed = _needed_rate(checkpoint_bytes, minutes)
    every = duration(60 * minutes)
    words = f"{decimal_bytes(checkpoint_bytes)} each, every {every}; at {needed} they are a tenth"
    return {"checkpoints": f"{words} of the time"}


def _needed_rate(checkpoint_bytes: int, minutes: float) -> str:
    """Return at what rate checkpoints take a tenth of the time, e.g. 522 MB/s."""
    return f"{decimal_bytes(checkpoint_bytes / (_SHARE * 60 * minutes))}/s"


def decimal_bytes(count: float) -> str:
    """Return bytes as the makers of disks count them, e.g. 94 GB."""
    power = next((power for power in (3, 2, 1) if count >= 1000**power), 0)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def _rate(store: CheckpointStore) -> float | None:
    """Return the bytes per second that this worker writes."""
    file = str(store.root / f".probe-{store.rank}")
    rate: float | None = None
    try:
        if store.files.type_name not in ("s3", "gcs"):  # which have no folders
            store.files.create_dir(str(store.root), recursive=True)
        block = os.urandom(1 << 20)
        for size in _PROBES:
            started = time.perf_counter()
            _write(store, file, block, size >> 20)
            seconds = time.perf_counter() - started
            rate = size / max(seconds, 1e-9)
            if seconds > _ENOUGH_SECONDS:
                break
    except OSError:
        rate = None
    finally:
        with contextlib.suppress(OSError):
            store.files.delete_file(file)
    return rate


def _write(store: CheckpointStore, file: str, block: bytes, count: int) -> None:
    """Write `count` blocks, to the disk and not to a cache of it."""
    if not store.remote:
        with Path(file).open("wb", buffering=0) as stream:
            for _ in range(count):
                stream.write(block)
            os.fsync(stream.fileno())
        return
    stream: Any
    with store.files.open_output_stream(file) as stream:
        for _ in range(count):
            stream.write(block)
