"""A Ray cluster of several nodes on this machine, as Ray's own tests make one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster


def local_cluster(head: dict[str, Any]) -> Any:
    """Return a cluster with a head node of these arguments.

    It notes its address in Ray's default folder for any `temp_dir`, and fails where no other Ray has made that.
    """
    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
    return Cluster(initialize_head=True, head_node_args=head)
