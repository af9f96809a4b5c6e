"""The reports of a Ray Train worker: numbers, with the address of a checkpoint, and gauges."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch.distributed as dist
from ray.util.metrics import Gauge

from trainers.jobs.spot_notices import NoticeWatch, drain_node
from trainers.jobs.train_job import TrainJob

POINTER = "checkpoint.json"  # in what Ray Train knows as a checkpoint
WORKER_GAUGES = {
    "tokens_per_second": (
        "headfold_tokens_per_second",
        "Tokens per second of a training, all workers together",
    ),
    "mfu": (
        "headfold_mfu",
        "Share of the GPUs' peak that a training uses, 0 to 1; for GPUs of a known peak",
    ),
}
"""The gauges of a line of a job's curve in Ray's metrics: name and description, by key. They are
labelled by search (the name of its folder) and trial (that of the run); Ray exports them as `ray_`
and the name, from the node of rank 0."""


class RayLink:
    """The link of a worker.

    In a worker pool's group all workers wait at a milestone for the pool's answer.
    """

    def __init__(self, pool: Any = None, group: str = "") -> None:
        context = ray.train.get_context()
        self.rank = context.get_world_rank()
        self.world_size = context.get_world_size()
        self.pool = pool
        self.group = group
        self.shown: set[str] = set()
        self._watched = os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1") != "0"
        self._notices: NoticeWatch | None = None
        if self._watched and context.get_local_rank() == 0:
            node = ray.get_runtime_context()
            drain = partial(drain_node, address=node.gcs_address, node_id=node.get_node_id())
            self._notices = NoticeWatch(drain)

    def leaving(self) -> bool:
        if not self._watched:
            return False
        draining = ray.train.get_preemption_info() is not None  # which all workers ask together
        return draining or (self._notices is not None and self._notices.seen.is_set())

    def show(self, job: TrainJob, line: dict[str, Any]) -> None:
        self.shown |= line.keys() & WORKER_GAUGES.keys()
        set_gauges(job, {key: line[key] for key in line.keys() & WORKER_GAUGES.keys()})

    def report(self, metrics: dict[str, Any], last: bool) -> bool:
        if self.pool is None:
            with self._pointer(metrics) as pointer:
                ray.train.report(metrics, **pointer)
            return True
        go = [
            ray.get(self.pool.report.remote(self.group, metrics, last)) if self.rank == 0 else None
        ]
        if self.world_size > 1:
            dist.broadcast_object_list(go, src=0)
        return bool(go[0])

    @contextlib.contextmanager
    def _pointer(self, metrics: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what `ray.train.report` is given of a checkpoint, by rank 0 alone.

        A small file with its address. Ray keeps the newest; checkpoints themselves are kept and
        removed by their own index (`trainers.jobs.checkpoints`), which also knows those between two
        reports, and which of them are damaged.
        """
        if self.rank != 0:
            yield {}
            return
        with tempfile.TemporaryDirectory() as folder:
            where = {key: metrics.get(key) for key in ("checkpoint_path", "step")}
            (Path(folder) / POINTER).write_text(json.dumps(where))
            # A separate folder, also for a repeated report.
            name = f"reported_{metrics['step']:06d}-{uuid.uuid4().hex[:8]}"
            yield {
                "checkpoint": ray.train.Checkpoint.from_directory(folder),
                "checkpoint_dir_name": name,
            }


def set_gauges(job: TrainJob, values: dict[str, float]) -> None:
    """Set gauges of this process for a job; `values` by the keys of GAUGES."""
    labels = {"search": Path(job.storage_path).parent.name, "trial": job.run_name}
    for key, value in values.items():
        _gauge(key).set(float(value), labels)


@lru_cache
def _gauge(key: str) -> Gauge:
    name, description = WORKER_GAUGES[key]
    return Gauge(name, description, ("search", "trial"))
