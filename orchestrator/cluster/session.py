"""The Ray cluster of a search: connect to it, or start it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from attention.base.progress import stage
from orchestrator.cluster.capacity import Nodes, capacity
from orchestrator.cluster.placement import OF_TYPE
from orchestrator.storage.paths import in_ray_job

REPOSITORY = Path(__file__).resolve().parents[2]
DASHBOARD = "RAY_API_SERVER_ADDRESS"  # where Ray's own parts look for the dashboard


def last_error(text: str) -> str:
    """The last line of a traceback that names an exception and says something; Ray's own wrappers come last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"([\w.]+\.)?\w*(Error|Exception|Diverged|Interrupt)\b.*: .", line)]
    causes = [line for line in named if not line.startswith("ray.exceptions.")]
    return (causes or named or lines or ["unknown error"])[-1][:1000]


def ray_train_intervals(look_seconds: float) -> None:
    """For trainings that this process starts: how often Ray Train looks after workers, how long it waits for them."""
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(look_seconds))
    # A node may be added after minutes, a spot node after days; the default of one minute fails who waits for it.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(7 * 24 * 3600))


def prepare_process() -> None:
    """For a process that starts trainings or loads models: Ray Train looks after workers ten times a second, and
    transformers prints neither warnings nor progress bars."""
    from transformers.utils import logging as transformers_logging

    ray_train_intervals(look_seconds=0.1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def local_nodes() -> list[Nodes]:
    """What a Ray that is started on this machine alone will have."""
    import torch

    from orchestrator.cluster.ray_internals import accelerator_of_machine, cpus_of_machine

    kind = accelerator_of_machine()
    counted = {"CPU": cpus_of_machine(), "GPU": float(torch.cuda.device_count())}
    return [Nodes(1, counted | ({f"{OF_TYPE}{kind}": 1.0} if kind else {}))]


def starts_ray() -> bool:
    """Whether a search would start Ray on this machine alone, which takes longer than what can be refused before."""
    import ray

    return not ray.is_initialized() and not os.environ.get("RAY_ADDRESS")


@contextlib.contextmanager
def connected() -> Iterator[list[Nodes]]:
    """Connect to the cluster of RAY_ADDRESS (a job), or start Ray on this machine; yields the cluster's nodes, of an
    autoscaling one at its full size."""
    import ray

    if ray.is_initialized():
        yield capacity()
        return
    earlier = os.environ.get(DASHBOARD)
    with stage("starting Ray"):
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
