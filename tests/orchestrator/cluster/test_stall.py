"""When a search counts as stalled. Ray's reports are made up here: no machine has an autoscaler or other jobs."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cluster import pending_resources, stall
from orchestrator.cluster.capacity import Nodes
from orchestrator.cluster.pending_resources import CapacityWatch, watch_pending
from orchestrator.cluster.placement import Demand
from orchestrator.cluster.stall import StalledError, StallWatch

GPU = {"GPU": 1.0, "CPU": 8.0}


class Status:
    """A cluster of one node whose GPU is in use, and one bundle that waits for it."""

    def __init__(self) -> None:
        self.used = 1.0
        self.pending: list[tuple[int, dict[str, float]]] = [(1, GPU)]
        self.pending_nodes: list[Any] = []
        self.pending_launches: list[Any] = []
        self.idle_nodes: list[Any] = []

    @property
    def active_nodes(self) -> list[Any]:
        used = {"GPU": self.used, "CPU": 8.0, "memory": time.time()}
        node = SimpleNamespace(node_id="a", used_resources=lambda: used, total_resources=lambda: GPU)
        return [node]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The inputs of `StallWatch`; everything in it can be changed."""
    seen = SimpleNamespace(
        status=Status(), lines=["planning: 3 of 9 layers, 1:05 left"], jobs=False, addable=[], log=None
    )
    monkeypatch.setattr(stall, "cluster_status", lambda: seen.status)
    monkeypatch.setattr(stall, "pending_bundles", lambda status: status.pending)
    monkeypatch.setattr(stall, "values", lambda: seen.lines)
    monkeypatch.setattr(stall, "other_jobs_at_work", lambda: seen.jobs)
    monkeypatch.setattr(stall, "addable_nodes", lambda: seen.addable)
    monkeypatch.setattr(stall, "ended_autoscaler", lambda: seen.log)
    monkeypatch.setattr(stall, "_processes", lambda *states: "")
    seen.clock = 0.0
    monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: seen.clock, time=time.time))
    return seen


def watch(cluster: Any, newest: float = 0.0) -> StallWatch:
    """A watch that has looked once, and 100 of its 60 seconds ago."""
    watching = StallWatch(60, lambda: newest)
    assert watching.reason() is None
    cluster.clock = 100.0
    return watching


def test_it_is_stalled_when_nothing_moves_and_nothing_can(cluster: Any) -> None:
    watching = watch(cluster)
    cluster.lines = ["planning: 3 of 9 layers, 2:45 left"]  # the clock alone
    assert watching.reason() == (
        "no progress for 2 min, nothing else uses the cluster, and no node can be added: "
        "1 x 1 GPU + 8 CPU requested; 8 of 8 CPU and 1 of 1 GPU in use"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda cluster: setattr(cluster.status, "pending", []),
        lambda cluster: setattr(cluster.status, "pending", [(2, GPU)]),
        lambda cluster: setattr(cluster.status, "used", 0.0),
        lambda cluster: setattr(cluster.status, "pending_nodes", ["p4d"]),
        lambda cluster: setattr(cluster.status, "pending_launches", ["p4d"]),
        lambda cluster: setattr(cluster, "lines", ["planning: 4 of 9 layers, 1:00 left"]),
        lambda cluster: setattr(cluster, "jobs", True),
        lambda cluster: setattr(cluster, "addable", [Nodes(1, GPU)]),
    ],
    ids=["nothing-waits", "more-waits", "less-in-use", "starting", "launching", "progress", "other-job", "grows"],
)
def test_it_is_not_while_anything_moves_or_may(cluster: Any, change: Any) -> None:
    watching = watch(cluster)
    change(cluster)
    assert watching.reason() is None


def test_lines_that_its_processes_write_are_progress(cluster: Any) -> None:
    watching = watch(cluster, newest=time.time() - 10)
    assert watching.reason() is None
    cluster.clock = 145.0  # 55 seconds after the line
    assert watching.reason() is None


def test_an_autoscaler_that_has_ended_or_has_no_such_node_adds_none(cluster: Any) -> None:
    watching = watch(cluster)
    cluster.addable = [Nodes(4, {"CPU": 8.0})]
    assert watching.reason()
    cluster.addable, cluster.log = [Nodes(4, GPU)], "monitor.log"
    assert watching.reason()


class Stalls:
    """A watch that finds a stall when it looks for the third time."""

    looked = 0

    def reason(self) -> str | None:
        self.looked += 1
        return "another one waits" if self.looked > 2 else None


@pytest.mark.parametrize("orderly", [False, True], ids=["waits", "ends-in-an-orderly-way"])
def test_a_stall_ends_the_body_as_an_interruption_does(orderly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tune takes an interruption for an order to stop its trials, and returns."""
    monkeypatch.setattr(pending_resources, "STATUS_SECONDS", 0.05)
    monkeypatch.setattr(pending_resources, "describe_pending", lambda demand: None)
    demand, watching = lambda: Demand(1, 1, 1, 1, 1), Stalls()
    with pytest.raises(StalledError, match="another one waits"), watch_pending(demand, print, watching):  # type: ignore[arg-type]
        try:
            for _ in range(600):  # what interrupts comes between two calls, as in Tune's loop
                time.sleep(0.1)
        except KeyboardInterrupt:
            if not orderly:
                raise
    with pytest.raises(KeyboardInterrupt), watch_pending(demand, print, None):
        raise KeyboardInterrupt


@pytest.fixture
def capacity(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The inputs of `CapacityWatch` on a cluster whose one node has no GPU."""
    seen = SimpleNamespace(status=Status(), nodes=[Nodes(1, {"CPU": 8.0})], clock=0.0)
    monkeypatch.setattr(pending_resources, "cluster_status", lambda: seen.status)
    monkeypatch.setattr(pending_resources, "pending_bundles", lambda status: status.pending)
    monkeypatch.setattr(pending_resources, "live_nodes", lambda: seen.nodes)
    monkeypatch.setattr(pending_resources, "_autoscaler", lambda status: "autoscaler: no node is starting")
    monkeypatch.setattr(pending_resources, "time", SimpleNamespace(monotonic=lambda: seen.clock))
    return seen


def two_workers() -> Demand:
    return Demand(trial_cpus=0.05, trial_gpus=0, workers=2, cpus_per_worker=8, gpus_per_worker=1)


def test_nodes_that_do_not_come_end_the_search_with_what_was_requested(capacity: Any) -> None:
    watching = CapacityWatch(two_workers, 3600)
    assert watching.reason() is None
    capacity.clock = 3599.0
    assert watching.reason() is None
    capacity.clock = 3600.0
    assert watching.reason() == (
        "no node has had room for 1 h for 2 x 1 GPU and 8 CPU; the cluster's nodes: 1 of 8 CPU; autoscaler: no "
        "node is starting; add nodes, request less, or set resources.max_wait_hours to more (0: no limit)"
    )


def test_trials_do_not_wait_for_the_nodes_of_a_larger_promotion(capacity: Any) -> None:
    """Workers of both are alike: only the number that starts together differs."""
    present = two_workers()
    watching = CapacityWatch(lambda: present, 60)
    capacity.nodes = [Nodes(2, GPU)]  # in use by another trial of two workers
    for clock in (0.0, 1000.0):
        capacity.clock = clock
        assert watching.reason() is None
    present = replace(present, workers=3)
    assert watching.reason() is None
    capacity.clock = 1060.0
    assert "3 x" in (watching.reason() or "")


def test_a_wait_for_gpus_in_use_or_of_another_job_is_not_one_for_nodes(capacity: Any) -> None:
    watching = CapacityWatch(two_workers, 60)
    capacity.nodes = [Nodes(2, GPU)]  # even if they are in use
    assert watching.reason() is None
    capacity.clock = 100.0
    assert watching.reason() is None
    capacity.nodes = [Nodes(1, GPU)]  # room for one of the two workers, which start together
    assert watching.reason() is None
    capacity.clock = 200.0
    assert "2 x" in (watching.reason() or "")
    capacity.status.pending = [(1, {"GPU": 4.0})]
    assert watching.reason() is None
