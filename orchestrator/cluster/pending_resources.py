"""What a search waits for while nodes are slow to come. Waiting is no failure: nothing of it runs into a time limit."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import ray
from ray.autoscaler.v2.schema import ClusterStatus
from ray.exceptions import RayError

from orchestrator.cluster.capacity import AUTOSCALER_ENDED, present, slots
from orchestrator.cluster.placement import Demand, bundle, in_words
from orchestrator.cluster.ray_internals import autoscaling_config, cluster_status, ended_autoscaler, pending

LOOK_SECONDS = 5.0
GRACE_SECONDS = 15.0
"""What waits for less is not told: processes start, and others end."""

Bundle = tuple[tuple[str, float], ...]


def waits_for(demand: Demand) -> str | None:
    """What of a demand has no room now, in words: who waits, what the nodes that are there could hold of it, and what
    the autoscaler does about it. None if nothing waits."""
    status = cluster_status()
    asked: dict[Bundle, int] = {}
    for count, resources in pending(status):
        asked[_key(resources)] = asked.get(_key(resources), 0) + count
    worker, process = demand.shape[1:4], (demand.process_cpus, 0.0, None)
    # Tune asks for the processes of its next trials early, so that some of them always wait
    needs = [(worker, "worker(s)"), (demand.task_needs, "task(s) that plan and measure")]
    if demand.task_needs == process:
        needs.pop()
    if not slots(present(), bundle(*process)):
        needs.append((process, "process(es) of trials"))
    told = [_told(asked[key], need, who) for need, who in needs if (key := _key(bundle(*need))) in asked]
    return f"{'; '.join(told)}; {_autoscaler(status)}" if told else None


def _key(resources: Mapping[str, float]) -> Bundle:
    return tuple(sorted((kind, round(amount, 4)) for kind, amount in resources.items()))


def _told(count: int, need: tuple[float, float, str | None], who: str) -> str:
    room = slots(present(), bundle(*need))
    here = f"has room for {room} of {count}" if room < count else f"has room for {room}, which is in use"
    return f"{count} {who} of {in_words(*need)} each, the cluster {here}"


def _autoscaler(status: ClusterStatus) -> str:
    if (log := ended_autoscaler()) is not None:
        return AUTOSCALER_ENDED.format(log)
    if not autoscaling_config(ray.get_runtime_context().gcs_address):
        return "no autoscaler: nodes must be added by hand"
    does = [f"{node.ray_node_type_name} is starting" for node in status.pending_nodes]
    does += [f"{asked.count} x {asked.ray_node_type_name} asked for" for asked in status.pending_launches]
    failed = {f"{no.ray_node_type_name} was refused ({no.details or 'no reason'})" for no in status.failed_launches}
    return f"autoscaler: {', '.join([*does, *sorted(failed)]) or 'no node on its way'}"


@contextlib.contextmanager
def watched(demand: Demand, tell: Callable[[str | None], None]) -> Iterator[None]:
    """For as long as the body runs, `tell`, in a thread of its own, what the demand waits for: when something has
    waited for GRACE_SECONDS, when that changes, and None when nothing waits any more."""
    ended = threading.Event()

    def look() -> None:
        told: str | None = None
        since: float | None = None
        while not ended.wait(LOOK_SECONDS):
            now = told
            with contextlib.suppress(RayError):  # the head is busy or away
                now = waits_for(demand)
            since = None if now is None else since or time.monotonic()
            if now is not None and time.monotonic() - (since or 0.0) < GRACE_SECONDS:
                continue
            if now != told:
                tell(now)
                told = now
        if told is not None:
            tell(None)

    thread = threading.Thread(target=look, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
