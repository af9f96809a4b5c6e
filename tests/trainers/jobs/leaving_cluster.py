"""A training on a separate cluster on this machine, whose node gets a cloud's notice and then ends.

`python leaving_cluster.py JOB.json CLOUD` prints the events as one JSON object. The metadata server is one on this
machine, which only the leaving node knows.
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
from metadata_server import MetadataServer
from ray._private.state import actors  # Ray's public list requires the dashboard

from trainers.jobs.checkpoints import CheckpointStore
from trainers.jobs.train_job import TrainJob
from trainers.jobs.worker import run_training

SECONDS = 15
"""From the notice to the end of the node."""


def until(condition: Callable[[], Any], what: str, seconds: float = 200) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.1)
    return result


def worker_node() -> str | None:
    alive = actors(actor_state_name="ALIVE").values()
    return next((a["Address"]["NodeID"] for a in alive if a["ActorClassName"] == "RayTrainWorker"), None)


def newest(job: TrainJob) -> int:
    saved, _ = CheckpointStore.of(job).read()
    return saved[-1].step if saved else 0


def happened(cluster: Any, job: TrainJob, server: MetadataServer) -> dict[str, Any]:
    leaving = cluster.add_node(num_cpus=1, env_vars=server.environment)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    report: dict[str, Any] = {}
    train = threading.Thread(target=lambda: report.update(run_training(job)))
    train.start()
    first = until(worker_node, "a worker")
    curve = Path(job.storage_path, job.run_name, "curve.jsonl")
    until(curve.exists, "a first step")
    nobody = dict.fromkeys(server.environment, "http://127.0.0.1:9")
    cluster.add_node(num_cpus=1, env_vars=nobody)
    assert newest(job) == 0, "without a notice nothing is saved between milestones"
    announced = time.monotonic()
    server.announce(SECONDS)
    step = until(lambda: newest(job), "a checkpoint", SECONDS)
    seconds = time.monotonic() - announced
    time.sleep(max(0.0, SECONDS - seconds))
    cluster.remove_node(leaving, allow_graceful=False)
    second = until(lambda: (node := worker_node()) != first and node, "a worker elsewhere")
    train.join(400)
    return {
        "checkpoint_before_the_end": step,
        "seconds_to_the_checkpoint": seconds,
        "nodes": [first, second],
        "report": report,
    }


if __name__ == "__main__":
    given = TrainJob.from_json(Path(sys.argv[1]).read_text())
    metadata = MetadataServer(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="hf-ray-", dir="/tmp") as short:  # paths of sockets are limited
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": short}
        one: Any = local_cluster(head)
        try:
            print(json.dumps(happened(one, given, metadata)))
        finally:
            ray.shutdown()
            one.shutdown()
            metadata.close()
