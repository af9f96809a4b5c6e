"""A separate cluster on one machine: a head and nodes with fake GPUs of two kinds, of which one comes late.

The GPUs are numbers that Ray counts; nothing runs on them. `python two_kinds.py JOB.json FOLDER` prints what happened
as one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from local_cluster import local_cluster
from ray._private.state import actors  # Ray's public list requires the dashboard
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from orchestrator.cluster.capacity import cluster_nodes, concurrency, resolve_strategy
from orchestrator.cluster.pending_resources import describe_pending
from orchestrator.cluster.placement import Demand, ProcessResources, task_options
from orchestrator.cluster.pool_client import open_pool, train_on_pool
from orchestrator.cluster.ray_internals import on_head
from orchestrator.cluster.ray_tasks import run_task
from orchestrator.config.schema import ConfigError, SearchConfig
from trainers.jobs.train_job import TrainJob

PLANNING = {"trial_cpus": 0.1, "trial_gpus": 1, "accelerator_type": "A100", "trial_accelerator_type": "A10G"}
CONFIG = SearchConfig.model_validate(
    {
        "name": "fake",
        "model": {"path": "none"},
        "search": {"kv_ratios": [0.5]},
        "train": {"num_workers": 8, "batch_size": 8, "gpus_per_worker": 1, "cpus_per_worker": 0.1},
        "resources": PLANNING,
    }
)


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return result


def kind_of(node_id: str) -> str:
    """ "A10G", "A100" or "head"."""
    (resources,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
    return next((name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")), "head")


def here() -> str:
    return kind_of(ray.get_runtime_context().get_node_id())


def sleep(file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    time.sleep(1000)


@ray.remote(num_cpus=0.01)
class Trial:
    """A trial's process, which waits for its task."""

    def plan(self, file: str) -> None:
        run_task(task_options(CONFIG), sleep, file)


def orphan(folder: Path) -> bool:
    """Whether a trial's task outlives the trial's process."""
    file, trial = folder / "pid", Trial.remote()
    trial.plan.remote(str(file))
    until(lambda: file.exists() and file.read_text())
    process = Path("/proc", file.read_text())
    ray.kill(trial)
    return not until(lambda: not process.exists(), 30)


def lie(demand: Demand) -> list[str]:
    """The kinds of nodes that run a trial's workers."""
    shape = resolve_strategy(demand.shape, cluster_nodes())
    group = placement_group([ProcessResources.of_worker(shape).bundle] * shape.workers, strategy=shape.strategy)
    assert group.wait(30)
    kinds = [kind_of(node) for node in placement_group_table(group)["bundles_to_node_id"].values()]
    remove_placement_group(group)
    return kinds


def workers_on() -> list[str]:
    """The kinds of nodes on which Ray Train's workers live."""
    alive = actors(actor_state_name="ALIVE").values()
    return [kind_of(a["Address"]["NodeID"]) for a in alive if a["ActorClassName"] == "RayTrainWorker"]


def main(job: TrainJob, folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hf-ray-", dir="/tmp") as short:  # paths of sockets are limited
        head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": short}
        cluster: Any = local_cluster(head)
        try:
            return told(cluster, job, folder)
        finally:
            ray.shutdown()
            cluster.shutdown()


def told(cluster: Any, job: TrainJob, folder: Path) -> dict[str, Any]:
    cluster.add_node(num_cpus=1, num_gpus=4, resources={"accelerator_type:A10G": 1})
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    demand, out = Demand.of(CONFIG), {}
    try:
        concurrency(cluster_nodes(), demand)
    except ConfigError as error:
        out["refused"] = str(error)
    out["planned_on"] = run_task(task_options(CONFIG), here)
    out["on_head"] = [on_head(), run_task(task_options(CONFIG), on_head)]
    out["orphan"] = orphan(folder)
    expected = placement_group([demand.worker.bundle] * 8, strategy="STRICT_PACK")
    out["waits_for"] = until(lambda: describe_pending(demand))
    remove_placement_group(expected)
    out["waits_no_more"] = until(lambda: describe_pending(demand) is None)
    with open_pool(str(folder)) as pool:
        trained: dict[str, Any] = {}
        train = threading.Thread(target=lambda: trained.update(train_on_pool(pool, job, lambda report: None)))
        train.start()
        workers = Demand(0.05, 0, *job.shape[:3], job.accelerator_type)
        out["trial_waits_for"] = until(lambda: describe_pending(workers))
        time.sleep(float(os.environ["LATE_SECONDS"]))
        out["waited"] = train.is_alive()
        cluster.add_node(num_cpus=2, num_gpus=8, resources={"accelerator_type:A100": 1})
        train.join(300)
        # Of groups that Ray Train gave up, workers may live a little longer
        until(lambda: len(workers_on()) <= job.settings.num_workers)
        out |= {"step": trained.get("step"), "trained_on": workers_on()}
    out["room"] = concurrency(cluster_nodes(), demand)
    out["workers_lie_on"] = lie(demand)
    out["capacity"] = [asdict(some) for some in cluster_nodes()]
    return out


if __name__ == "__main__":
    print(json.dumps(main(TrainJob.from_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))))
