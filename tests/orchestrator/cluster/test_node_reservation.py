"""Nodes that a search needs again: what is requested of Ray's autoscaler, and until when. The autoscaler itself is not
started: that this cluster has node types is a fake."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.experimental.internal_kv import _internal_kv_get
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import (
    TrainAutoscalingCoordinatorClient,
)

from orchestrator.cluster import node_reservation
from orchestrator.cluster.node_reservation import NodeReservation
from orchestrator.cluster.ray_internals import cluster_status

WORKERS = {"CPU": 4.0, "GPU": 2.0}
OTHERS = {"CPU": 8.0, "GPU": 1.0}
TRAINING = {"CPU": 0.5}


@pytest.fixture
def reservation(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> type[NodeReservation]:
    monkeypatch.setattr(node_reservation, "node_types", lambda: [(2, WORKERS)])
    return NodeReservation


def requested() -> list[dict[str, float]]:
    """The current request of these searches to the autoscaler; trainings of tests before may have left theirs."""
    if is_autoscaler_v2():
        demands: Any = cluster_status().resource_demands.cluster_constraint_demand
        bundles = [dict(some.bundle) for d in demands for some in d.bundles_by_count for _ in range(some.count)]
    else:
        bundles = json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or "[]")
    return [bundle for bundle in bundles if bundle in (WORKERS, OTHERS, TRAINING)]


def comes_to(expected: list[dict[str, float]], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while requested() != expected:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_searches_of_a_cluster_share_its_one_request(reservation: type[NodeReservation]) -> None:
    first, second = reservation("first"), reservation("second")
    first.hold([WORKERS, WORKERS])
    assert comes_to([WORKERS, WORKERS]), requested()
    second.hold([OTHERS])
    assert comes_to([WORKERS, WORKERS, OTHERS]), requested()
    first.hold([WORKERS])
    assert comes_to([WORKERS, OTHERS]), requested()
    first.release()
    assert comes_to([OTHERS]), requested()
    second.release()
    assert comes_to([]), requested()


def test_a_training_does_not_replace_a_reservation(reservation: type[NodeReservation]) -> None:
    search, training = reservation("search"), TrainAutoscalingCoordinatorClient("train-of-the-search")
    search.hold([WORKERS])
    training.send_resource_request(ScalingConfig(num_workers=1, resources_per_worker=TRAINING), 1)
    assert comes_to([WORKERS, TRAINING]), requested()
    search.release()
    assert comes_to([TRAINING]), requested()
    training.cancel_resource_request()
    assert comes_to([]), requested()


def test_of_a_search_that_was_killed_nothing_is_reserved_for_long(reservation: type[NodeReservation]) -> None:
    reservation("killed", 5.0).hold([WORKERS])  # and is not heard of again
    assert comes_to([WORKERS]), requested()
    assert comes_to([], 60), requested()  # the coordinator looks every 20 s


def test_without_an_autoscaler_nothing_is_requested(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_reservation, "node_types", list)
    monkeypatch.setattr(node_reservation, "request_bundles", lambda *_: pytest.fail("nodes were requested"))
    NodeReservation("alone").hold([WORKERS])
