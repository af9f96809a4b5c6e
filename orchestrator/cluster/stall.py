"""A search that cannot continue: its processes wait for each other, and no node can be added.

Waiting for nodes is no failure, nor is waiting for what another job uses. Any other wait is
reported and ends the search, which would otherwise occupy its accelerators without end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from ray.autoscaler.v2.schema import ClusterStatus
from ray.exceptions import RayError
from ray.util.state import list_actors, list_tasks
from ray.util.state.exception import RayStateApiException

from attention.base.progress import CLOCK
from attention.base.timing import duration
from orchestrator.cluster.capacity import addable_nodes, slots
from orchestrator.cluster.ray_internals import (
    cluster_status,
    ended_autoscaler,
    other_jobs_at_work,
    pending_bundles,
    values,
)

_COUNTED = ("CPU", "GPU")
_LISTED = 8


class StalledError(RuntimeError):
    """The search cannot continue: its processes wait for resources that others of it use."""


class StallWatch:
    """Whether a search makes progress.

    It does as long as the running or waiting processes of the cluster, the published progress, or
    the files that its processes write change.

    Args:
        seconds: Seconds without progress, after which it counts as stalled.
        newest: Returns when such a file was last written, in seconds since 1970.
    """

    def __init__(self, seconds: float, newest: Callable[[], float]) -> None:
        self._seconds = seconds
        self._newest = newest
        self._seen: Hashable = None
        self._moved = time.monotonic()

    def reason(self) -> str | None:
        """Return what waits for what, if no progress is possible; else None."""
        status = cluster_status()
        seen = _moving(status)
        now = time.monotonic()
        if seen != self._seen:
            self._seen = seen
            self._moved = now
        if now - self._moved < self._seconds:
            return None
        pending = list(pending_bundles(status))
        if not pending or _may_grow(status, pending) or other_jobs_at_work():
            return None
        age = time.time() - self._newest()
        if age < self._seconds:
            self._moved = now - age
            return None
        return (
            f"no progress for {duration(now - self._moved)}, nothing else uses the cluster, "
            f"and no node can be added: {_waiting(pending)}; {_holding(status)}"
        )


def _moving(status: ClusterStatus) -> Hashable:
    """Return the values that change if there is progress."""
    nodes = [
        (node.node_id, *((kind, node.used_resources().get(kind, 0.0)) for kind in _COUNTED))
        for node in (*status.active_nodes, *status.idle_nodes)
    ]
    pending = [(count, *sorted(bundle.items())) for count, bundle in pending_bundles(status)]
    lines = [CLOCK.sub("", line) for line in values()]
    return tuple(sorted(nodes)), tuple(sorted(pending)), tuple(sorted(lines))


def _may_grow(status: ClusterStatus, pending: Iterable[tuple[int, Mapping[str, float]]]) -> bool:
    """Return whether a node that starts, or can be added, has room for what waits."""
    if status.pending_nodes or status.pending_launches:
        return True
    nodes = addable_nodes()
    if not any(slots(nodes, bundle) for _, bundle in pending):
        return False
    return ended_autoscaler() is None


def _waiting(pending: Iterable[tuple[int, Mapping[str, float]]]) -> str:
    """Return what waits, by name if Ray's dashboard has it."""
    bundles = ", ".join(f"{count} x {_amounts(bundle)}" for count, bundle in pending)
    names = _processes("PENDING_NODE_ASSIGNMENT", "PENDING_CREATION")
    return f"{bundles} requested{f' by {names}' if names else ''}"


def _holding(status: ClusterStatus) -> str:
    """Return what is in use, and by what."""
    nodes = (*status.active_nodes, *status.idle_nodes)
    used = {kind: sum(node.used_resources().get(kind, 0.0) for node in nodes) for kind in _COUNTED}
    there = {
        kind: sum(node.total_resources().get(kind, 0.0) for node in nodes) for kind in _COUNTED
    }
    amounts = " and ".join(
        f"{used[kind]:g} of {there[kind]:g} {kind}" for kind in _COUNTED if there[kind]
    )
    names = _processes("RUNNING", "RUNNING_IN_RAY_GET", "RUNNING_IN_RAY_WAIT", "ALIVE")
    return f"{amounts} in use{f' by {names}' if names else ''}"


def _processes(*states: str) -> str:
    """Return tasks and actors in some states that take resources, by name; empty if unknown."""
    try:
        tasks: list[Any] = list_tasks(detail=True, limit=1000, raise_on_missing_output=False)
        actors: list[Any] = list_actors(detail=True, limit=1000, raise_on_missing_output=False)
    except (RayError, RayStateApiException, OSError):  # no dashboard
        return ""
    waiting: Counter[str] = Counter()
    for task in tasks:
        if task.state in states and task.type == "NORMAL_TASK" and task.required_resources:
            waiting[f"{task.name!r} ({_amounts(task.required_resources)})"] += 1
    for actor in actors:
        if actor.state in states and actor.required_resources:
            waiting[f"{actor.class_name!r} ({_amounts(actor.required_resources)})"] += 1
    return ", ".join(f"{count} x {name}" for name, count in waiting.most_common(_LISTED))


def _amounts(bundle: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {kind}" for kind, amount in sorted(bundle.items(), reverse=True))
