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
from orchestrator.cluster.capacity import Nodes, cluster_nodes
from orchestrator.cluster.placement import ACCELERATOR_PREFIX
from orchestrator.storage.paths import in_ray_job

DASHBOARD = "RAY_API_SERVER_ADDRESS"  # where Ray's own parts look for the dashboard
_CHECKOUT = Path(__file__).resolve().parents[2]


def last_error(text: str) -> str:
    """Return the last line of a traceback that names an exception and its message.

    Ray's own wrappers come last.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    pattern = r"([\w.]+\.)?\w*(Error|Exception|Diverged|Interrupt)\b.*: ."
    errors = [line for line in lines if re.match(pattern, line)]
    causes = [line for line in errors if not line.startswith("ray.exceptions.")]
    return (causes or errors or lines or ["unknown error"])[-1][:1000]


def ray_train_intervals(health_check_seconds: float) -> None:
    """Set how often Ray Train checks workers, and how long it waits for them, in this process."""
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(health_check_seconds))
    # A node may be added after minutes, a spot node after days; with the default of one minute,
    # waiting for it fails
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(7 * 24 * 3600))


def prepare_process() -> None:
    """Prepare a process that starts trainings or loads models.

    Ray Train checks workers ten times per second, and transformers prints neither warnings nor
    progress bars.
    """
    from transformers.utils import logging as transformers_logging

    ray_train_intervals(health_check_seconds=0.1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def local_nodes() -> list[Nodes]:
    """Return the nodes of a Ray that is started on this machine alone."""
    import torch

    from orchestrator.cluster.ray_internals import accelerator_of_machine, cpus_of_machine

    resources = {"CPU": cpus_of_machine(), "GPU": float(torch.cuda.device_count())}
    if accelerator_type := accelerator_of_machine():
        resources[f"{ACCELERATOR_PREFIX}{accelerator_type}"] = 1.0
    return [Nodes(1, resources)]


def starts_ray() -> bool:
    """Return whether a search would start Ray on this machine alone.

    Connecting takes longer than the checks that can be made before it.
    """
    import ray

    return not ray.is_initialized() and not os.environ.get("RAY_ADDRESS")


@contextlib.contextmanager
def connected() -> Iterator[list[Nodes]]:
    """Connect to the cluster of RAY_ADDRESS (a job), or start Ray on this machine.

    Yields:
        The cluster's nodes, of an autoscaling one at its full size.
    """
    import ray

    if ray.is_initialized():
        yield cluster_nodes()
        return
    earlier = os.environ.get(DASHBOARD)
    with stage("starting Ray"):
        start()
    try:
        yield cluster_nodes()
    finally:
        ray.shutdown()
        os.environ.pop(DASHBOARD, None)
        if earlier is not None:
            os.environ[DASHBOARD] = earlier


def start() -> None:
    """Call `ray.init`, with the dashboard's address in the environment of all workers.

    Without it, or with the address of another Ray on the machine, Ray Train never removes the
    placement groups of stopped trials, and the search does not continue.
    """
    import ray

    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    # No HF_TOKEN here: Ray writes a runtime environment into its logs. Nodes that read private
    # models have their own.
    passed = ("HF_HUB_OFFLINE", "HF_HOME", "HF_ENDPOINT")
    environment = {key: os.environ[key] for key in passed if key in os.environ}
    environment["TOKENIZERS_PARALLELISM"] = "false"
    if not in_ray_job():  # a job's working folder is on the path of all its processes
        paths = [str(_CHECKOUT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    address = os.environ.get("RAY_ADDRESS")
    if address:
        from ray.dashboard.utils import get_address_for_submission_client

        environment[DASHBOARD] = get_address_for_submission_client(address)
        of_job = _environment_of_job()
        added = {key: value for key, value in environment.items() if key not in of_job}
        ray.init(address=address, runtime_env={"env_vars": added}, **quiet)
        return
    port = free_port()
    dashboard = f"http://127.0.0.1:{port}"
    environment[DASHBOARD] = dashboard
    os.environ[DASHBOARD] = dashboard
    # This machine is not taken away at short notice: one process less for each training
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
    """Return the variables of `ray job submit --runtime-env-json`, which cannot be set again."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    return job.get("runtime_env", {}).get("env_vars", {})
