"""A job whose number of workers changes, on a separate cluster on this machine: one node, then two, then one again.

The GPUs are numbers that Ray counts; the workers compute on the CPU. `python elastic_cluster.py JOB.json` prints how
many workers there were, in that order, and the last report, as one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from local_cluster import local_cluster
from ray._private.state import actors  # Ray's public list requires the dashboard

from trainers.jobs.checkpoints import CheckpointStore
from trainers.jobs.train_job import TrainJob
from trainers.jobs.worker import run_training


def workers() -> int:
    alive = actors(actor_state_name="ALIVE").values()
    return sum(a["ActorClassName"] == "RayTrainWorker" for a in alive)


def until(condition: Callable[[], Any], what: str, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.2)


def newest(job: TrainJob) -> int:
    kept, _ = CheckpointStore.of(job).read()
    return kept[-1].step if kept else 0


def told(cluster: Any, job: TrainJob) -> dict[str, Any]:
    node = {"num_cpus": 1, "num_gpus": 1}
    cluster.add_node(**node)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    report: dict[str, Any] = {}
    seen: list[list[int]] = []

    def settled_at(count: int) -> None:
        """So many workers, and a checkpoint of theirs."""
        until(lambda: workers() == count, f"{count} worker(s); there are {workers()}; so far {seen}")
        step = newest(job)
        until(lambda: newest(job) > step, f"a checkpoint by {count} worker(s); so far {seen}")
        seen.append([workers(), newest(job)])

    train = threading.Thread(target=lambda: report.update(run_training(job)))
    train.start()
    settled_at(1)
    second = cluster.add_node(**node)
    settled_at(2)
    cluster.remove_node(second, allow_graceful=False)
    settled_at(1)
    train.join(500)
    if train.is_alive():
        raise TimeoutError(f"the end; so far {seen} and step {newest(job)}")
    return {"seen": seen, "report": report}


if __name__ == "__main__":
    given = TrainJob.from_json(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory(prefix="hf-ray-", dir="/tmp") as short:  # paths of sockets are limited
        head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": short}
        one: Any = local_cluster(head)
        try:
            print(json.dumps(told(one, given)))
        finally:
            ray.shutdown()
            one.shutdown()
