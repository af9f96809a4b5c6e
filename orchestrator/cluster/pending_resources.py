"""Resources that a search waits for while nodes are slow to start.

Waiting is no failure until it exceeds the limit of the configuration.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import ray
from ray.autoscaler.v2.schema import ClusterStatus
from ray.exceptions import RayError

from attention.base.timing import duration
from orchestrator.cluster.capacity import (
    AUTOSCALER_ENDED,
    describe_nodes,
    group_slots,
    live_nodes,
    slots,
)
from orchestrator.cluster.placement import Demand, ProcessResources
from orchestrator.cluster.ray_internals import (
    autoscaling_config,
    cluster_status,
    ended_autoscaler,
    pending_bundles,
)
from orchestrator.cluster.stall import StalledError, StallWatch

STATUS_SECONDS = 5.0
GRACE_SECONDS = 15.0
"""Shorter waits are not reported: they occur while processes start and end."""

_Bundle = tuple[tuple[str, float], ...]


def describe_pending(demand: Demand) -> str | None:
    """Return which processes of a demand wait for resources; None if none do.

    The text states how many the present nodes have room for, and what the autoscaler does.
    """
    status = cluster_status()
    requests: Counter[_Bundle] = Counter()
    for count, resources in pending_bundles(status):
        requests[_bundle_key(resources)] += count
    # Tune requests the processes of its next trials early, so that some of them always wait
    process = ProcessResources(demand.process_cpus)
    kinds = [(demand.worker, "worker(s)")]
    if demand.task != process:
        kinds.append((demand.task, "task(s) that plan and measure"))
    if not slots(live_nodes(), process.bundle):
        kinds.append((process, "process(es) of trials"))
    parts = [
        _describe(requests[key], resources, name)
        for resources, name in kinds
        if (key := _bundle_key(resources.bundle)) in requests
    ]
    return f"{'; '.join(parts)}; {_autoscaler(status)}" if parts else None


def _bundle_key(resources: Mapping[str, float]) -> _Bundle:
    return tuple(sorted((kind, round(amount, 4)) for kind, amount in resources.items()))


def _describe(count: int, resources: ProcessResources, name: str) -> str:
    room = slots(live_nodes(), resources.bundle)
    state = f"has room for {room} of {count}"
    if room >= count:
        state = f"has room for {room}, which is in use"
    return f"{count} {name} of {resources} each, the cluster {state}"


def _autoscaler(status: ClusterStatus) -> str:
    if (log := ended_autoscaler()) is not None:
        return AUTOSCALER_ENDED.format(log)
    if not autoscaling_config(ray.get_runtime_context().gcs_address):
        return "no autoscaler: nodes must be added by hand"
    parts = [f"{node.ray_node_type_name} is starting" for node in status.pending_nodes]
    for launch in status.pending_launches:
        parts.append(f"{launch.count} x {launch.ray_node_type_name} requested")
    failures = {
        f"{launch.ray_node_type_name} was refused ({launch.details or 'no reason'})"
        for launch in status.failed_launches
    }
    parts += sorted(failures)
    return f"autoscaler: {', '.join(parts) or 'no node is starting'}"


class CapacityWatch:
    """Whether nodes have been missing for too long.

    Waiting for what is in use does not count, nor do processes of other jobs.

    Args:
        demand: Returns that of the present part of the search: of its trials or its promotion,
            whose workers may be alike while their numbers differ.
        seconds: How long nodes may be missing.
    """

    def __init__(self, demand: Callable[[], Demand], seconds: float) -> None:
        self._demand = demand
        self._seconds = seconds
        self._since: float | None = None

    def reason(self) -> str | None:
        """Return the requested and the present resources, after the limit; else None."""
        status = cluster_status()
        missing = self._missing(status)
        now = time.monotonic()
        if not missing:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if now - self._since < self._seconds:
            return None
        return (
            f"no node has had room for {duration(now - self._since)} for {', '.join(missing)}; "
            f"{describe_nodes(live_nodes())}; {_autoscaler(status)}; add nodes, request less, or "
            "set resources.max_wait_hours to more (0: no limit)"
        )

    def _missing(self, status: ClusterStatus) -> list[str]:
        """Return waiting processes that do not fit the present nodes, even if these were free."""
        pending = {_bundle_key(resources) for _, resources in pending_bundles(status)}
        nodes = live_nodes()
        missing: dict[str, None] = {}
        demand = self._demand()
        for resources in (demand.worker, demand.task, ProcessResources(demand.process_cpus)):
            room = slots(nodes, resources.bundle)
            if resources == demand.worker:
                room = group_slots(nodes, demand.shape)
            if _bundle_key(resources.bundle) in pending and not room:
                count = demand.shape.workers if resources == demand.worker else 1
                missing[f"{count} x {resources}"] = None
        return list(missing)


@contextlib.contextmanager
def watch_pending(
    demand: Callable[[], Demand],
    on_change: Callable[[str | None], None],
    *limits: StallWatch | CapacityWatch | None,
) -> Iterator[None]:
    """While the body runs, report what a demand waits for.

    Args:
        demand: Returns that of the present part of the work.
        on_change: Called in a separate thread with `describe_pending`, once something has waited
            for GRACE_SECONDS and when that changes, and with None when nothing waits any more.
        limits: Interrupt the body, as Ctrl-C would, if nothing can continue or nodes do not come.

    Raises:
        StalledError: If one of `limits` has interrupted the body.
    """
    ended = threading.Event()
    reasons: list[str] = []

    def look() -> None:
        reported: str | None = None
        since: float | None = None
        while not ended.wait(STATUS_SECONDS):
            pending = reported
            with contextlib.suppress(RayError):  # the head is busy or away
                pending = describe_pending(demand())
                for watch in watches:
                    if not reasons and (reason := watch.reason()) is not None:
                        reasons.append(reason)
                        signal.pthread_kill(caller, signal.SIGINT)
            if pending is None:
                since = None
            else:
                since = since or time.monotonic()
                if time.monotonic() - since < GRACE_SECONDS:
                    continue
            if pending != reported:
                on_change(pending)
                reported = pending
        if reported is not None:
            on_change(None)

    caller = threading.get_ident()
    # A signal interrupts the main thread alone
    in_main = threading.current_thread() is threading.main_thread()
    watches = [limit for limit in limits if limit is not None and in_main]
    thread = threading.Thread(target=look, name="pending-resources", daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        if not reasons:
            raise
    finally:
        ended.set()
        thread.join()
    if reasons:
        raise StalledError(reasons[0])
