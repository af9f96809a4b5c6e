"""What Ray has no public name for, as it is in ray 2.60: look here first when Ray is updated."""

from __future__ import annotations

from ray._private import state
from ray._private.utils import get_num_cpus


def cpus_of_machine() -> float:
    """CPUs that a Ray which is started on this machine will have, containers' limits included."""
    return float(get_num_cpus())


def largest_cluster() -> dict[str, float]:
    """Resources of an autoscaling cluster at its full size; empty for one that is as large as it gets."""
    return dict(state.state.get_max_resources_from_cluster_config() or {})


def free_on_nodes() -> list[dict[str, float]]:
    """Resources that nobody uses, node by node."""
    return list(state.available_resources_per_node().values())
