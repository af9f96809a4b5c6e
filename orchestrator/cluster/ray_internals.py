"""What Ray has no public name for, as it is in ray 2.60: look here first when Ray is updated."""

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
from ray.autoscaler._private.kuberay.autoscaling_config import _HEAD_GROUP_NAME, AutoscalingConfigProducer
from ray.autoscaler.v2.schema import ClusterStatus
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

ON_HEAD = "node:__internal_head__"
"""Ray's resource of the head node alone."""


def cpus_of_machine() -> float:
    """CPUs that a Ray which is started on this machine will have, containers' limits included."""
    return float(get_num_cpus())


def accelerator_of_machine() -> str | None:
    """Ray's name for the GPUs of this machine; None without any."""
    return NvidiaGPUAcceleratorManager.get_current_node_accelerator_type()


def free_on_nodes() -> list[dict[str, float]]:
    """Resources that nobody uses, node by node."""
    return list(state.state.available_resources_per_node().values())


# ---- its store of keys and values ------------------------------------------------------------------------------------

NAMESPACE = b"headfold"


def store_line(key: str, line: str) -> None:
    """Keep a line for all processes of the cluster; an empty one is forgotten. A head node that is away is not waited
    for."""
    with contextlib.suppress(RayError, RuntimeError):
        if line:
            _internal_kv_put(key.encode(), line.encode(), namespace=NAMESPACE)
        else:
            _internal_kv_del(key.encode(), namespace=NAMESPACE)


def stored_line(key: str) -> str:
    """What is kept under a key; empty without it."""
    with contextlib.suppress(RayError, RuntimeError):
        return (_internal_kv_get(key.encode(), namespace=NAMESPACE) or b"").decode()
    return ""


# ---- the autoscaler --------------------------------------------------------------------------------------------------


def node_types() -> list[tuple[int, dict[str, float]]]:
    """The worker nodes that the autoscaler may bring: the most of each type, and the resources of one. Empty for a
    cluster that is as large as it gets."""
    config = autoscaling_config(ray.get_runtime_context().gcs_address)
    head, most = config.get("head_node_type"), config.get("max_workers", 0)
    kinds = {name: kind for name, kind in config.get("available_node_types", {}).items() if name != head}
    return [(min(most, kind.get("max_workers", most)), dict(kind.get("resources", {}))) for kind in kinds.values()]


def autoscaling_config(gcs_address: str) -> dict[str, Any]:
    """What the cluster's autoscaler was started with (`ray up`, `ray start --autoscaling-config`; under KubeRay: the
    RayCluster as its autoscaler reads it); empty without one that runs (see `ended_autoscaler`).

    It is known on the head node alone. Ray says nowhere what the cluster may grow to: its own `get_cluster_config` asks
    a table that nothing in the open-source Ray fills [2.60].
    """
    if gcs_address not in _configs:
        found: Any = _read_config(gcs_address)
        if found is None:  # this is not the head node, or its monitor has ended
            found = _on_head(_read_config, gcs_address)
        if found is None:  # another one may be started
            return {}
        _configs[gcs_address] = found
    return _configs[gcs_address]


_configs: dict[str, dict[str, Any]] = {}
"""What does not change as long as a cluster lives."""


def ended_autoscaler() -> str | None:
    """The log of the cluster's autoscaler, if one was configured and its process on the head node, which Ray calls the
    monitor, has ended; None while it runs, and for a cluster without one. Kubernetes restarts its own."""
    if not ray.is_initialized():
        return None
    return _on_head(_log_of_ended_monitor, ray.get_runtime_context().gcs_address)


def _on_head(function: Callable[[str], Any], gcs_address: str) -> Any:
    """Call a function on the cluster's head node."""
    if on_head():
        return function(gcs_address)
    # From within a trial: not on the trial's own node
    options: Any = {"num_cpus": 0, "resources": {ON_HEAD: 0.001}, "scheduling_strategy": "DEFAULT"}
    task: Any = ray.remote(**options)(function)
    return ray.get(task.remote(gcs_address))


def on_head() -> bool:
    """Whether this process is on the head of the cluster that it is connected to."""
    here = ray.get_runtime_context().get_node_id()
    return any(ON_HEAD in node["Resources"] for node in ray.nodes() if node["NodeID"] == here)


def _read_config(gcs_address: str) -> dict[str, Any] | None:
    """The file that is named by the command line of the cluster's monitor, or what KubeRay's autoscaler reads from
    Kubernetes; None if neither is here."""
    if _under_kuberay():
        return AutoscalingConfigProducer(os.environ["RAY_CLUSTER_NAME"], os.environ["RAY_CLUSTER_NAMESPACE"])()
    if (words := _monitor(gcs_address)) is None:
        return None
    named = [word.partition("=")[2] for word in words if word.startswith(AUTOSCALING_CONFIG)]
    return yaml.safe_load(Path(named[0]).expanduser().read_text("utf-8")) if named else {}


def _under_kuberay() -> bool:
    """KubeRay sets both on its head, the second where it scales."""
    return os.environ.get("RAY_NODE_TYPE_NAME") == _HEAD_GROUP_NAME and "RAY_enable_autoscaler_v2" in os.environ


AUTOSCALING_CONFIG = "--autoscaling-config="


def _monitor(gcs_address: str) -> list[str] | None:
    """The command line of the cluster's monitor, which every head has that is not started without; None if no such
    process runs here."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().decode(errors="replace").split("\0")
            if f"--gcs-address={gcs_address}" in words and any(Path(word).name == "monitor.py" for word in words):
                return words
    return None


def _log_of_ended_monitor(gcs_address: str) -> str | None:
    """As `ended_autoscaler`, on the head node. A monitor writes down its command line when it starts."""
    if _under_kuberay() or _monitor(gcs_address) is not None:
        return None
    node: Any = worker._global_node
    log = Path(node.get_logs_dir_path(), "monitor.log")
    for file in (log, *sorted(log.parent.glob(f"{log.name}.*"))):
        with contextlib.suppress(OSError):
            started = [
                line for line in file.read_text("utf-8", "replace").splitlines() if "started with command" in line
            ]
            if any(f"--gcs-address={gcs_address}" in line and AUTOSCALING_CONFIG in line for line in started):
                return str(log)
    return None


def cluster_status() -> ClusterStatus:
    """What `ray status` shows."""
    return get_cluster_status(ray.get_runtime_context().gcs_address)


def pending(status: ClusterStatus) -> Iterator[tuple[int, Mapping[str, float]]]:
    """What waits for room: how many bundles of which resources, tasks and actors each, placement groups as a whole."""
    demands = status.resource_demands
    for demand in (*demands.placement_group_demand, *demands.ray_task_actor_demand):
        for asked in demand.bundles_by_count:
            yield asked.count, dict(asked.bundle)
