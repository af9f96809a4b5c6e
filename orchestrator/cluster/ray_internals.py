"""Private parts of Ray 2.60 that have no public name: check these when Ray is updated."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import yaml
from ray._private import state, worker
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray._private.utils import get_num_cpus
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _HEAD_GROUP_NAME,
    AutoscalingConfigProducer,
)
from ray.autoscaler.v2.schema import ClusterStatus
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.core.generated import gcs_pb2
from ray.exceptions import RayError
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

_NODE_TYPE_LABEL = "ray.io/node-group"
_HEAD_RESOURCE = "node:__internal_head__"  # that the head node alone has


def cpus_of_machine() -> float:
    """Return the CPUs of a Ray that is started on this machine, within a container's limits."""
    return float(get_num_cpus())


def accelerator_of_machine() -> str | None:
    """Return Ray's name for the GPUs of this machine; None without a GPU."""
    return NvidiaGPUAcceleratorManager.get_current_node_accelerator_type()


def free_resources() -> list[dict[str, float]]:
    """Return the unused resources of each node."""
    return list(state.state.available_resources_per_node().values())


# ---- its key-value store -------------------------------------------------------------------------

_NAMESPACE = b"headfold"


def put_value(key: str, value: str) -> None:
    """Store a value for all processes of the cluster, unless the head node cannot be reached."""
    with contextlib.suppress(RayError, RuntimeError):
        _internal_kv_put(key.encode(), value.encode(), namespace=_NAMESPACE)


def delete_value(key: str) -> None:
    """Delete a value, unless the head node cannot be reached."""
    with contextlib.suppress(RayError, RuntimeError):
        _internal_kv_del(key.encode(), namespace=_NAMESPACE)


def get_value(key: str) -> str:
    """Return the value of a key; empty without one."""
    with contextlib.suppress(RayError, RuntimeError):
        return (_internal_kv_get(key.encode(), namespace=_NAMESPACE) or b"").decode()
    return ""


def values() -> list[str]:
    """Return all stored values, or none if the head node cannot be reached."""
    with contextlib.suppress(RayError, RuntimeError):
        keys = _internal_kv_list(b"", namespace=_NAMESPACE)
        return [get_value(key.decode()) for key in sorted(keys)]
    return []


# ---- other jobs ----------------------------------------------------------------------------------


def other_jobs_at_work() -> bool:
    """Return whether a job other than this process's runs, or has left a running actor."""
    job_id = ray.get_runtime_context().get_job_id()
    table = state.state._connect_and_get_accessor().get_job_table(
        skip_submission_job_info_field=True, skip_is_running_tasks_field=True
    )
    messages: Any = gcs_pb2  # whose classes are made as it is imported
    jobs = [messages.JobTableData.FromString(record) for record in table]
    others = {
        job.job_id.hex(): job.is_dead
        for job in jobs
        if job.job_id.hex() != job_id and not job.config.ray_namespace.startswith(_OF_RAY_ITSELF)
    }
    alive = state.actors(actor_state_name="ALIVE").values() if others else ()
    return not all(others.values()) or any(actor["JobID"] in others for actor in alive)


_OF_RAY_ITSELF = "_ray_internal"


# ---- the autoscaler ------------------------------------------------------------------------------


def node_types() -> dict[str, tuple[int, dict[str, float]]]:
    """Return the types of worker nodes that the autoscaler may add.

    Returns:
        By name, the largest number and the resources of each; empty for a cluster that does not
        grow.
    """
    config = autoscaling_config(ray.get_runtime_context().gcs_address)
    limit = config.get("max_workers", 0)
    return {
        name: (
            min(limit, node_type.get("max_workers", limit)),
            dict(node_type.get("resources", {})),
        )
        for name, node_type in config.get("available_node_types", {}).items()
        if name != config.get("head_node_type")
    }


def node_type_of(node: Mapping[str, Any]) -> str | None:
    """Return the name of a node's type; None if it was started without one.

    Args:
        node: As `ray.nodes` has it.
    """
    return node.get("Labels", {}).get(_NODE_TYPE_LABEL)


def autoscaling_config(gcs_address: str) -> dict[str, Any]:
    """Return the configuration of the autoscaler; empty if none runs.

    That is the file of `ray up` or `ray start --autoscaling-config`, under KubeRay the RayCluster
    as its autoscaler reads it. Only the head node has it, and Ray has no interface for the largest
    size of the cluster: its own `get_cluster_config` reads a table that nothing in the open-source
    Ray fills.
    """
    if gcs_address not in _configs:
        config: Any = _read_config(gcs_address)
        if config is None:  # this is not the head node, or its monitor has ended
            config = _on_head(_read_config, gcs_address)
        if config is None:  # another one may be started
            return {}
        _configs[gcs_address] = config
    return _configs[gcs_address]


_configs: dict[str, dict[str, Any]] = {}
"""Configurations by address of a cluster, for which they are constant."""


def ended_autoscaler() -> str | None:
    """Return the log of an autoscaler whose process on the head node (Ray's monitor) has ended.

    Returns:
        None while it runs and for a cluster without one; Kubernetes restarts its own.
    """
    if not ray.is_initialized():
        return None
    return _on_head(_ended_monitor_log, ray.get_runtime_context().gcs_address)


def _on_head(function: Callable[[str], Any], gcs_address: str) -> Any:
    """Call a function on the cluster's head node."""
    if on_head():
        return function(gcs_address)
    # From within a trial: not on the trial's own node
    task: Any = ray.remote(**head_options())(function)
    return ray.get(task.remote(gcs_address))


def on_head() -> bool:
    """Return whether this process is on the head node of its cluster."""
    node_id = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["NodeID"] == node_id]
    return any(map(is_head, nodes))


def is_head(node: Mapping[str, Any]) -> bool:
    """Return whether a node of `ray.nodes` is the head."""
    return _HEAD_RESOURCE in node["Resources"]


def _read_config(gcs_address: str) -> dict[str, Any] | None:
    """Read the configuration of the autoscaler; None if it is not on this machine.

    It is the file that the command line of the cluster's monitor names, or what KubeRay's
    autoscaler reads from Kubernetes.
    """
    if _under_kuberay():
        name = os.environ["RAY_CLUSTER_NAME"]
        return AutoscalingConfigProducer(name, os.environ["RAY_CLUSTER_NAMESPACE"])()
    if (words := _monitor_command(gcs_address)) is None:
        return None
    for word in words:
        if word.startswith(_CONFIG_OPTION):
            file = Path(word.removeprefix(_CONFIG_OPTION)).expanduser()
            return yaml.safe_load(file.read_text("utf-8"))
    return {}


def _under_kuberay() -> bool:
    """Return whether KubeRay runs this head node: it sets both variables, the second to scale."""
    is_head = os.environ.get("RAY_NODE_TYPE_NAME") == _HEAD_GROUP_NAME
    return is_head and "RAY_enable_autoscaler_v2" in os.environ


_CONFIG_OPTION = "--autoscaling-config="


def _monitor_command(gcs_address: str) -> list[str] | None:
    """Return the command line of the cluster's monitor; None if it does not run on this machine.

    Every head node has one unless it was started without.
    """
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().decode(errors="replace").split("\0")
            is_monitor = any(Path(word).name == "monitor.py" for word in words)
            if is_monitor and f"--gcs-address={gcs_address}" in words:
                return words
    return None


def _ended_monitor_log(gcs_address: str) -> str | None:
    """Return what `ended_autoscaler` does, on the head node.

    A monitor writes down its command line when it starts.
    """
    if _under_kuberay() or _monitor_command(gcs_address) is not None:
        return None
    node: Any = worker._global_node
    log = Path(node.get_logs_dir_path(), "monitor.log")
    for file in (log, *sorted(log.parent.glob(f"{log.name}.*"))):
        with contextlib.suppress(OSError):
            for line in file.read_text("utf-8", "replace").splitlines():
                ours = "started with command" in line and f"--gcs-address={gcs_address}" in line
                if ours and _CONFIG_OPTION in line:
                    return str(log)
    return None


def node_coordinator() -> Any:
    """Return the actor that sends a cluster's request of nodes to the autoscaler, Ray Train's."""
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
        get_or_create_autoscaling_coordinator,  # ray.data takes a second to import
    )

    return get_or_create_autoscaling_coordinator()


def request_bundles(
    coordinator: Any, requester: str, bundles: list[dict[str, float]], seconds: float
) -> None:
    """Make the autoscaler keep, or add, nodes with room for these bundles at the same time.

    A cluster has one request. Ray Train's coordinator replaces it every 20 s by the union of what
    was sent to it, workers of trainings among them: a request made by other means is overwritten.

    Args:
        coordinator: From `node_coordinator`.
        requester: Whose earlier request is replaced.
        bundles: Resources, in addition to those of running trainings.
        seconds: Time after which the request expires, unless it is made again.
    """
    from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import (
        ResourceRequestPriority,
    )

    coordinator.request_resources.remote(
        requester_id=requester,
        resources=bundles,
        expire_after_s=seconds,
        priority=ResourceRequestPriority.LOW,
    )


def cancel_bundles(coordinator: Any, requester: str) -> None:
    """End a request of `request_bundles`."""
    ray.get(coordinator.cancel_request.remote(requester_id=requester), timeout=10)


def head_options() -> Mapping[str, Any]:
    """Return the options that place a task or an actor without CPUs on the head node."""
    return {
        "num_cpus": 0,
        "resources": {_HEAD_RESOURCE: 0.001},
        "scheduling_strategy": "DEFAULT",
    }


def cluster_status() -> ClusterStatus:
    """Return the data that `ray status` shows."""
    return get_cluster_status(ray.get_runtime_context().gcs_address)


def pending_bundles(status: ClusterStatus) -> Iterator[tuple[int, Mapping[str, float]]]:
    """Yield the demands that wait for resources: the number of bundles, and the resources of one.

    Tasks and actors have a bundle each; placement groups count as a whole.
    """
    demands = status.resource_demands
    for demand in (*demands.placement_group_demand, *demands.ray_task_actor_demand):
        for request in demand.bundles_by_count:
            yield request.count, dict(request.bundle)
