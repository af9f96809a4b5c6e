"""What a search waits for while nodes are slow to come.

Waiting is no failure: nothing of it runs into a time limit.
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

from orchestrator.cluster.capacity import AUTOSCALER_ENDED, live_nodes, slots
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
"""A shorter wait is not reported: processes start, and others end."""

_Bundle = tuple[tuple[str, float], ...]


def describe_pending(demand: Demand) -> str | None:
    """Return which processes of a demand wait for resources; None if none do.

    The text says how many the nodes that are there could hold, and what the autoscaler does.
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
        parts.append(f"{launch.count} x {launch.ray_node_type_name} asked for")
    failures = {
        f"{launch.ray_node_type_name} was refused ({launch.details or 'no reason'})"
        for launch in status.failed_launches
    }
    parts += sorted(failures)
    return f"autoscaler: {', '.join(parts) or 'no node on its way'}"


@contextlib.contextmanager
def watch_pending(
    demand: Demand, on_change: Callable[[str | None], None], stall: StallWatch | None = None
) -> Iterator[None]:
    """While the body runs, report what a demand waits for.

    Args:
        on_change: Called in a thread of its own with `describe_pending`, once something has waited
            for GRACE_SECONDS and when that changes, and with None when nothing waits any more.
        stall: Ends the body where nothing can go on, as Ctrl-C would.

    Raises:
        StalledError: If `stall` has ended the body.
    """
    ended = threading.Event()
    reasons: list[str] = []

    def watch() -> None:
        reported: str | None = None
        since: float | None = None
        while not ended.wait(STATUS_SECONDS):
            pending = reported
            with contextlib.suppress(RayError):  # the head is busy or away
                pending = describe_pending(demand)
                if stall is not None and not reasons and (reason := stall.reason()) is not None:
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
    if threading.current_thread() is not threading.main_thread():
        stall = None  # a signal interrupts the main thread alone
    thread = threading.Thread(target=watch, name="pending-resources", daemon=True)
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
