"""The Ray cluster of a search: connect or start, count what it has, derive how many trials run at a time."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import ConfigError, SearchConfig
from orchestrator.folders import in_ray_job

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Demand:
    """What one trial needs: its driver and its Ray Train workers."""

    driver_cpus: float
    driver_gpus: float
    workers: int
    cpus_per_worker: float
    gpus_per_worker: float

    @classmethod
    def of(cls, config: SearchConfig) -> Demand:
        train, own = config.train, config.resources
        return cls(own.driver_cpus, own.driver_gpus, train.num_workers, train.cpus_per_worker, train.gpus_per_worker)

    @property
    def cpus(self) -> float:
        return self.driver_cpus + self.workers * self.cpus_per_worker

    @property
    def gpus(self) -> float:
        return self.driver_gpus + self.workers * self.gpus_per_worker


def concurrency(resources: Mapping[str, float], demand: Demand, limit: int | str = "auto") -> int:
    """How many trials fit a cluster with `resources` (keys CPU and GPU) at a time, at most `limit`.

    Without this cap drivers take every CPU and wait for workers that can never start. Raises ConfigError if not even
    one trial fits.
    """
    have = {"CPU": float(resources.get("CPU", 0)), "GPU": float(resources.get("GPU", 0))}
    need = {"CPU": demand.cpus, "GPU": demand.gpus}
    for kind in ("GPU", "CPU"):
        if need[kind] > have[kind] + 1e-6:
            raise ConfigError(
                f"train.num_workers: {demand.workers} worker(s) need {need[kind]:g} {kind} "
                f"({_sum(demand, kind)}), but the cluster has {have[kind]:g}; lower train.num_workers or "
                f"train.{kind.lower()}s_per_worker, or add nodes"
            )
    fit = min(int((have[kind] + 1e-6) // need[kind]) for kind in have if need[kind] > 0)
    return fit if limit == "auto" else min(fit, int(limit))


def _sum(demand: Demand, kind: str) -> str:
    of_worker, of_driver = (
        (demand.gpus_per_worker, demand.driver_gpus) if kind == "GPU" else (demand.cpus_per_worker, demand.driver_cpus)
    )
    return f"{demand.workers} x {of_worker:g} and {of_driver:g} for the trial's driver"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def connected() -> Iterator[dict[str, float]]:
    """Connect to the cluster of RAY_ADDRESS (a job), or start Ray on this machine; yields the cluster's resources.

    For an autoscaling cluster these are the resources at its full size.
    """
    import ray

    if ray.is_initialized():
        yield capacity()
        return
    start()
    try:
        yield capacity()
    finally:
        ray.shutdown()


def start() -> None:
    """`ray.init`, with the dashboard's address known to all workers.

    Ray Train's cleaner of placement groups asks the dashboard whether a stopped trial is gone. Without a dashboard, or
    with that of another Ray on the machine, the groups of stopped trials stay for ever and the search stands still.
    """
    import ray

    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    # No HF_TOKEN here: Ray writes a runtime environment into its logs. Nodes that read private models have their own.
    passed = ("HF_HUB_OFFLINE", "HF_HOME", "HF_ENDPOINT")
    environment = {"TOKENIZERS_PARALLELISM": "false"} | {key: os.environ[key] for key in passed if key in os.environ}
    if not in_ray_job():  # a job's working folder is on the path of all its processes
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    address = os.environ.get("RAY_ADDRESS")
    if address:
        from ray.dashboard.utils import get_address_for_submission_client

        environment["RAY_API_SERVER_ADDRESS"] = get_address_for_submission_client(address)
        settled = _environment_of_job()
        added = {key: value for key, value in environment.items() if key not in settled}
        ray.init(address=address, runtime_env={"env_vars": added}, **quiet)
        return
    port = free_port()
    environment["RAY_API_SERVER_ADDRESS"] = os.environ["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{port}"
    # Nobody takes this machine away at short notice: one process less for each training.
    environment["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    ray.init(
        address="local",
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=port,
        runtime_env={"env_vars": environment},
        **quiet,
    )


def _environment_of_job() -> dict[str, str]:
    """The variables that `ray job submit --runtime-env-json` has set; Ray refuses to have them set again."""
    record = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    return record.get("runtime_env", {}).get("env_vars", {})


def capacity() -> dict[str, float]:
    """CPU and GPU of the cluster, of an autoscaling one at its full size."""
    import ray
    import ray._private.state as cluster_state

    have = ray.cluster_resources()
    most = cluster_state.state.get_max_resources_from_cluster_config() or {}
    return {kind: max(float(have.get(kind, 0)), float(most.get(kind, 0))) for kind in ("CPU", "GPU")}
