"""How many trials fit a cluster, node by node, and what is refused; the nodes are numbers here, no machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.cluster import capacity
from orchestrator.cluster.capacity import (
    ConcurrencyLimit,
    Nodes,
    cluster_nodes,
    concurrency,
    resolve_strategy,
    room_to_plan,
    search_concurrency,
    worker_bundles,
)
from orchestrator.cluster.placement import Demand
from orchestrator.config.schema import ConfigError, SearchConfig
from trainers.settings import Shape

A10G = {"CPU": 48.0, "GPU": 4.0, "accelerator_type:A10G": 1.0}
A100 = {"CPU": 96.0, "GPU": 8.0, "accelerator_type:A100": 1.0}
CLOUD = [Nodes(1, {}), Nodes(2, {"CPU": 32.0}), Nodes(4, A10G), Nodes(2, A100)]
"""The cluster of cluster.yaml at its full size."""
LARGE = Demand(8, 1, 8, 8, 1)
"""A trial of configs/llama2-7b.yaml."""


def one(**resources: float) -> list[Nodes]:
    return [Nodes(1, resources)]


@pytest.mark.parametrize(
    ("nodes", "demand", "limit", "expected"),
    [
        (one(CPU=2), Demand(0.05, 0, 1, 0.95, 0), "auto", 2),
        (one(CPU=2), Demand(0.05, 0, 1, 0.95, 0), 1, 1),
        (one(CPU=2), Demand(0.05, 0, 1, 1.0, 0), "auto", 1),
        (one(CPU=2), Demand(0.05, 0, 2, 0.95, 0), "auto", 1),
        (one(CPU=64, GPU=8), Demand(1, 0, 2, 4, 1), "auto", 4),
        (one(CPU=8, GPU=8), Demand(1, 0, 1, 1, 1), "auto", 4),
        # The GPU of planning is free again when the workers start
        (one(CPU=64, GPU=8), Demand(1, 1, 1, 4, 1), "auto", 8),
        (one(CPU=64, GPU=8), Demand(1, 1, 1, 4, 1), 3, 3),
        (one(CPU=96, GPU=8), LARGE, "auto", 1),
        # Twice 1.5 CPUs are there in all, but no node has a second time as much
        ([Nodes(2, {"CPU": 2.0})], Demand(0.05, 0, 1, 1.5, 0), "auto", 2),
        ([Nodes(3, {"CPU": 1.0})], Demand(0.05, 0, 1, 0.6, 0), "auto", 3),
        # Workers that no single node has room for are placed on several
        ([Nodes(2, {"CPU": 2.0})], Demand(0.05, 0, 3, 1, 0), "auto", 1),
        # Two of three nodes hold eight GPUs
        (CLOUD, LARGE, "auto", 2),
        (CLOUD, replace(LARGE, strategy="PACK"), "auto", 4),
        (CLOUD, replace(LARGE, workers=4), "auto", 8),
        (CLOUD, replace(LARGE, workers=4, accelerator_type="A100"), "auto", 4),
        (CLOUD, replace(LARGE, workers=4, accelerator_type="A10G", task_type="A100"), "auto", 4),
    ],
)
def test_as_many_trials_run_as_fit_node_by_node(nodes: list[Nodes], demand: Demand, limit: Any, expected: int) -> None:
    assert concurrency(nodes, demand, limit) == expected


@pytest.mark.parametrize(
    ("nodes", "demand", "message"),
    [
        (one(CPU=2), Demand(0.05, 0, 4, 1, 0), ["train.num_workers", "4 worker(s)", "4.05 CPU", "has 2"]),
        (one(CPU=64), Demand(1, 0, 8, 1, 1), ["train.num_workers", "8 GPU", "has 0", "add nodes"]),
        ([Nodes(4, {"CPU": 1.0})], Demand(0.05, 0, 1, 2, 0), ["a worker needs 2 CPU on one node", "4 of 1 CPU"]),
        (CLOUD, replace(LARGE, workers=1, gpus_per_worker=16), ["worker needs 16 GPU", "2 of 8 GPU (A100)"]),
        (CLOUD, replace(LARGE, accelerator_type="H100"), ["resources.accelerator_type", "'H100'", "8 GPU (A100)"]),
        (CLOUD, replace(LARGE, task_type="T4"), ["resources.trial_accelerator_type", "'T4'", "4 GPU (A10G)"]),
        (CLOUD, replace(LARGE, workers=64, accelerator_type="A100"), ["64 GPU", "the cluster has 16"]),
        (
            CLOUD,
            replace(LARGE, workers=16, strategy="STRICT_PACK"),
            ["placement_strategy", "16 workers", "on one node"],
        ),
        (CLOUD, replace(LARGE, trial_gpus=9), ["resources.trial_gpus", "9 GPU and 8 CPU on one node"]),
        # A worker fits one node, and so does what a trial holds itself, but not both
        (one(CPU=1), Demand(0.5, 0, 1, 1, 0), ["1.5 CPU", "0.5 for the trial itself", "has 1"]),
        ([Nodes(2, {"CPU": 1.5})], Demand(0.05, 0, 3, 0.9, 0), ["do not fit the nodes one by one"]),
    ],
)
def test_a_trial_that_can_never_start_is_refused_with_what_there_is(
    nodes: list[Nodes], demand: Demand, message: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        concurrency(nodes, demand)
    for word in message:
        assert word in str(caught.value)


def test_a_promotion_that_can_never_start_is_refused_before_the_trials() -> None:
    def fitting(**promotion: Any) -> int:
        record = {
            "name": "x",
            "model": {"path": "none"},
            "search": {"kv_ratios": [0.5]},
            "train": {"num_workers": 4, "batch_size": 16, "gpus_per_worker": 1},
            "promotion": {"steps": 1, **promotion},
            "resources": {"accelerator_type": "A10G", "placement_strategy": "STRICT_PACK"},
        }
        return search_concurrency(SearchConfig.model_validate(record), CLOUD)

    wide = {"num_workers": 16}
    assert fitting() == fitting(train=wide, enabled=False) == 4
    with pytest.raises(ConfigError, match=r"^promotion: resources.placement_strategy: STRICT_PACK needs 16 workers"):
        fitting(train=wide)
    with pytest.raises(ConfigError, match=r"^promotion: resources.accelerator_type: no node has 'H100'"):
        fitting(resources={"accelerator_type": "H100"})
    assert fitting(train=wide, resources={"accelerator_type": "A100", "placement_strategy": "PACK"}) == 4


def test_workers_share_a_node_where_one_can_hold_them() -> None:
    assert resolve_strategy(Shape(8, 8, 1), CLOUD).strategy == "STRICT_PACK"
    assert resolve_strategy(Shape(8, 8, 1, "A10G"), CLOUD).strategy == "PACK"  # such a node has four
    assert resolve_strategy(Shape(16, 8, 1), CLOUD).strategy == "PACK"
    assert resolve_strategy(Shape(8, 8, 1, None, "SPREAD"), CLOUD).strategy == "SPREAD"
    assert resolve_strategy(Shape(2, 1, 0), one(CPU=2)).strategy == "STRICT_PACK"


def test_the_room_follows_the_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"CPU": 2.0}
    monkeypatch.setattr(capacity, "cluster_nodes", lambda: [Nodes(1, nodes)])
    monkeypatch.setattr(capacity, "REFRESH_SECONDS", 0)
    trials = ConcurrencyLimit(Demand(0.05, 0, 1, 0.95, 0))
    seen = []
    for nodes["CPU"] in (2.0, 8.0, 8.0, 1.0, 0.5, 3.0):
        seen.append(trials.trials())
    assert seen == [2, 8, 8, 1, 1, 3]
    output = capsys.readouterr().out.splitlines()
    assert [line.partition("room for ")[2] for line in output] == [
        "8 trial(s) at a time",
        "1 trial(s) at a time",
        "0 trial(s) at a time; the search waits for nodes",
        "3 trial(s) at a time",
    ]
    nodes["CPU"] = 64.0
    assert ConcurrencyLimit(Demand(0.05, 0, 1, 0.95, 0), 4).trials() == 4
    monkeypatch.setattr(capacity, "REFRESH_SECONDS", 1e6)
    rested = ConcurrencyLimit(Demand(0.05, 0, 1, 0.95, 0))
    assert rested.trials() == 64
    nodes["CPU"] = 2.0
    assert rested.trials() == 64  # not queried for every trial


def node(resources: dict[str, float], name: str | None) -> dict[str, Any]:
    """A node as `ray.nodes` has it."""
    return {"Alive": True, "Resources": resources, "Labels": {"ray.io/node-group": name} if name else {}}


LARGER = A100 | {"accelerator_type:A100-80G": 1.0}
FEWER = A100 | {"CPU": 90.0}
HEAD_NODE = node({"CPU": 8.0, "node:__internal_head__": 1.0}, "head")


@pytest.mark.parametrize(
    ("written", "up", "name", "full"),
    [
        # The node has Ray's own accelerator_type in addition to that of its type
        pytest.param({"CPU": 96.0, "GPU": 8.0, "accelerator_type:A100-80G": 1.0}, LARGER, "p4de", 16, id="type"),
        pytest.param({"CPU": 96.0, "GPU": 8.0, "accelerator_type:A100-80G": 1.0}, LARGER, None, 16, id="no-name"),
        # A container of the node has fewer CPUs than the machine that its type describes
        pytest.param(A100, FEWER, "p4de", 16, id="cpus"),
        pytest.param(A100, FEWER, None, 16, id="cpus-no-name"),
        pytest.param(A100, A100, "p4de", 16, id="alike"),
        # Added by hand, of no type
        pytest.param(A10G, A100, None, 24, id="another"),
    ],
)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_no_node_counts_twice(
    written: dict[str, float],
    up: dict[str, float],
    name: str | None,
    full: int,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a type of two nodes, of which `count` are up, there are two; nodes of no type are added to these."""
    monkeypatch.setattr(capacity.ray, "nodes", lambda: [HEAD_NODE, *[node(up, name)] * count])
    monkeypatch.setattr(capacity, "node_types", lambda: {"p4de": (2, written)})
    gpus = capacity.total(cluster_nodes(), "GPU")
    assert gpus == (16 if full == 16 else 8 + 8 * count)
    trials = concurrency(cluster_nodes(), replace(LARGE, workers=4, trial_gpus=0, cpus_per_worker=1))
    assert trials == gpus // 4


def test_more_nodes_than_the_most_are_counted_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray up` with a lower number than before takes none away that is busy."""
    monkeypatch.setattr(capacity.ray, "nodes", lambda: [HEAD_NODE, *[node(A100, "p4d")] * 3])
    monkeypatch.setattr(capacity, "node_types", lambda: {"p4d": (2, A100), "g5": (4, A10G)})
    assert {(some.count, some.resources.get("GPU", 0)) for some in cluster_nodes()} == {(1, 0), (3, 8), (4, 4)}


@pytest.mark.parametrize(
    ("nodes", "demand", "training", "planning", "fits"),
    [
        # One machine of eight: next to a trial that plans there is room to plan, next to one that trains there is none
        (one(CPU=96, GPU=8), LARGE, 0, 2, True),
        (one(CPU=96, GPU=8), LARGE, 1, 1, False),
        (one(CPU=96, GPU=8), LARGE, 0, 9, False),
        (one(CPU=96, GPU=8), replace(LARGE, workers=6), 1, 2, True),
        (one(CPU=96, GPU=8), replace(LARGE, workers=6), 1, 3, False),
        # Planning on cheaper nodes continues while workers train
        ([Nodes(1, A10G), Nodes(1, A100)], replace(LARGE, task_type="A10G"), 1, 4, True),
        ([Nodes(1, A10G), Nodes(1, A100)], replace(LARGE, task_type="A10G"), 1, 5, False),
        ([Nodes(1, A10G)], replace(LARGE, accelerator_type="A100", task_type="A10G"), 1, 1, False),
    ],
)
def test_room_to_plan_is_what_workers_leave(
    nodes: list[Nodes], demand: Demand, training: int, planning: int, fits: bool
) -> None:
    assert room_to_plan(nodes, demand, training, planning) == fits


def test_workers_are_requested_as_they_are_placed() -> None:
    eight = Shape(8, 8, 1, "A100")
    (bundle,) = worker_bundles(CLOUD, eight, 1)
    assert bundle == {"CPU": 64, "GPU": 8, "accelerator_type:A100": pytest.approx(0.008)}
    spread = worker_bundles(CLOUD, eight._replace(strategy="SPREAD"), 2)
    assert len(spread) == 16 and spread[0] == {"CPU": 8, "GPU": 1, "accelerator_type:A100": 0.001}
