"""The Ray cluster of a search: connect or start, count what it has, derive how many trials run at a time."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.schema import ConfigError, SearchConfig
from orchestrator.storage.paths import in_ray_job

REPOSITORY = Path(__file__).resolve().parents[2]
LOOK_SECONDS = 5.0
DASHBOARD = "RAY_API_SERVER_ADDRESS"  # where Ray's own parts look for the dashboard


@dataclass(frozen=True)
class Demand:
    """What one trial needs: its driver and its Ray Train workers."""

    trial_cpus: float
    trial_gpus: float
    workers: int
    cpus_per_worker: float
    gpus_per_worker: float

    @classmethod
    def of(cls, config: SearchConfig) -> Demand:
        return cls(config.resources.trial_cpus, config.resources.trial_gpus, *config.train.shape)


def concurrency(resources: Mapping[str, float], demand: Demand, limit: int | str = "auto") -> int:
    """How many trials fit a cluster with `resources` (keys CPU and GPU) at a time, at most `limit`.

    Without this cap drivers take every CPU and wait for workers that can never start. Raises ConfigError if not even
    one trial fits.
    """
    fit = math.inf
    for kind in ("GPU", "CPU"):
        name, have = f"{kind.lower()}s", float(resources.get(kind, 0))
        of_worker, of_trial = getattr(demand, f"{name}_per_worker"), getattr(demand, f"trial_{name}")
        need = of_trial + demand.workers * of_worker
        if need > have + 1e-6:
            raise ConfigError(
                f"train.num_workers: {demand.workers} worker(s) need {need:g} {kind} "
                f"({demand.workers} x {of_worker:g} and {of_trial:g} for the trial itself), but the cluster has "
                f"{have:g}; lower train.num_workers, train.{name}_per_worker or resources.trial_{name}, or add nodes"
            )
        fit = min(fit, (have + 1e-6) // need if need else fit)
    return int(fit if limit == "auto" else min(fit, int(limit)))


class Room:
    """How many trials fit the cluster as it is now; asked anew every few seconds, since nodes come and go. Always at
    least one, which waits for workers until nodes come back."""

    def __init__(self, demand: Demand, limit: int | str = "auto") -> None:
        self._demand, self._limit, self._looked = demand, limit, -math.inf
        self._fitting: int | None = None

    def trials(self) -> int:
        """The number, which is printed when it has changed."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            before, self._fitting = self._fitting, 0
            with contextlib.suppress(ConfigError):
                self._fitting = concurrency(capacity(), self._demand, self._limit)
            if before is not None and self._fitting != before:
                waits = "" if self._fitting else "; the search waits for nodes"
                print(f"cluster  has changed: room for {self._fitting} trial(s) at a time{waits}", flush=True)
        return max(1, self._fitting or 0)


def last_error(text: str) -> str:
    """The last line of a traceback that names an exception and says something; Ray's own wrappers come last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"([\w.]+\.)?\w*(Error|Exception|Diverged|Interrupt)\b.*: .", line)]
    causes = [line for line in named if not line.startswith("ray.exceptions.")]
    return (causes or named or lines or ["unknown error"])[-1][:1000]


def ray_train_intervals(look_seconds: float) -> None:
    """For trainings that this process starts: how often Ray Train looks after workers, how long it waits for them."""
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(look_seconds))
    # A node that is being added takes minutes; the default of one minute would fail the trial that waits for it.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "1800")


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
    earlier = os.environ.get(DASHBOARD)
    start()
    try:
        yield capacity()
    finally:
        ray.shutdown()
        os.environ.pop(DASHBOARD, None)
        if earlier is not None:
            os.environ[DASHBOARD] = earlier


def start() -> None:
    """`ray.init`, with the dashboard's address known to all workers: without it, or with that of another Ray on the
    machine, Ray Train never removes the placement groups of stopped trials, and the search stands still."""
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

        environment[DASHBOARD] = get_address_for_submission_client(address)
        settled = _environment_of_job()
        added = {key: value for key, value in environment.items() if key not in settled}
        ray.init(address=address, runtime_env={"env_vars": added}, **quiet)
        return
    port = free_port()
    environment[DASHBOARD] = os.environ[DASHBOARD] = f"http://127.0.0.1:{port}"
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
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    return job.get("runtime_env", {}).get("env_vars", {})


def capacity() -> dict[str, float]:
    """CPU and GPU of the cluster, of an autoscaling one at its full size."""
    import ray

    from orchestrator.cluster.ray_private import largest_cluster

    have, most = ray.cluster_resources(), largest_cluster()
    return {kind: max(float(have.get(kind, 0)), float(most.get(kind, 0))) for kind in ("CPU", "GPU")}
